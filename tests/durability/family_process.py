"""A worker process of the test of child runs: parents, each with ten children."""

import asyncio
import logging
import os
from uuid import uuid4

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import open_store
from tests.durability.chaos import LoggingStore

LEASE = 1.0
CALLED, STARTED, MAPPED = 4, 3, 3
CHILDREN = CALLED + STARTED + MAPPED


def token() -> str:
    """Return what no other execution of a step returns."""
    return f"{os.getpid()}-{uuid4().hex}"


@workflow("family-child")
async def child(step: Step, n: int) -> str:
    first = await step("work", token)
    if n % 2:
        await step.sleep("nap", 0.2)
    return f"{n} {first} {await step('work', token)}"


@workflow("family-parent")
async def parent(step: Step) -> list[str]:
    """Start ten children in all three ways; return their outputs."""
    refs = [await step.start("started", child, CALLED + n) for n in range(STARTED)]
    called = await step.all(*(step.call("called", child, n) for n in range(CALLED)))
    results = [await step.result("result", ref) for ref in refs]
    mapped = await step.map_runs("mapped", child, range(CALLED + STARTED, CHILDREN))
    return [*called, *results, *mapped]


async def main(url: str, options: dict[str, str], log: str) -> None:
    store = open_store(url, **options)
    runtime = Runtime(
        LoggingStore(store, log), workflows=[parent, child], lease_ttl=LEASE, suspend_after=0.05
    )
    async with Worker(runtime, concurrency=50, poll=0.2, max_crashes=1000) as worker:
        await worker.serve()
    await store.close()


def work(url: str, options: dict[str, str], log: str) -> None:
    """Run a worker in this process until it is killed."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url, options, log))
