"""The worker of the chaos test: executes runs, and logs each accepted write with its process id."""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from perdure import Runtime, Step, Worker, workflow
from perdure.store import Entry, Store, Verdict, capabilities, require_journal
from perdure.stores import open_store

LEASE = 1.0


async def add(a: int, b: int) -> int:
    return a + b


@workflow("chaos")
async def chaos(step: Step, n: int) -> list[Any]:
    first = await step("first", add, n, 1)

    async def branch(start: int) -> int:
        total = await step("work", add, start, 10)
        return await step("work", add, total, 100)

    left, right = await asyncio.gather(branch(first), branch(first + 1))
    await step.sleep("nap", 0.5)
    event = await step.wait_for_event("go", "go")
    second_event = await step.wait_for_event("again", "go", timeout=60)
    last = await step("last", add, event, second_event)
    return [first, left, right, event, second_event, last]


def expected(n: int) -> list[int]:
    """Return the output of run `n`, which is sent the events `n` and `n + 1000`."""
    return [n + 1, n + 111, n + 112, n, n + 1000, 2 * n + 1000]


class LoggingStore:
    """A store that logs the run, epoch and process of each accepted entry, a line each.

    A line is one atomic append, so processes can share the file.
    """

    def __init__(self, store: Store, path: str) -> None:
        self.capabilities = capabilities(store)
        self._store = require_journal(store)
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        verdicts = await self._store.append(entries)
        for entry, verdict in zip(entries, verdicts, strict=True):
            if verdict is Verdict.ACCEPTED:
                line = f"{entry.id} {entry.epoch} {entry.n} {os.getpid()}\n"
                os.write(self._log, line.encode())
        return verdicts


async def main(url: str, options: dict[str, str], log: str) -> None:
    store = open_store(url, **options)
    runtime = Runtime(
        LoggingStore(store, log), workflows=[chaos], lease_ttl=LEASE, suspend_after=0.05
    )
    async with Worker(runtime, concurrency=50, poll=0.2, max_crashes=1000) as worker:
        await worker.serve()
    await store.close()


def work(url: str, options: dict[str, str], log: str) -> None:
    """Run a worker in this process until it is killed."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url, options, log))
