"""Processes that signal runs and execute them, until they are killed."""

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from perdure import Runtime, Step, Worker, workflow
from perdure.store import Handoff, Store
from perdure.stores import open_store
from tests.durability.forked import forked

LEASE = 10.0
"""Longer than a process may stand still on a busy machine: only those that were killed are gone."""

EVENTS = 50


def write(log: str, *words: object) -> None:
    """Add a line to a file with one atomic append."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{' '.join(map(str, words))}\n".encode())
    os.close(file)


async def begin(log: str, run_id: str, place: int) -> None:
    write(log, "began", run_id, place)


@workflow("relay")
async def relay(step: Step, log: str) -> list[list[int]]:
    """Receive events until each number has come, with a step after each of them."""
    received: list[list[int]] = []
    while len({number for number, _ in received}) < EVENTS:
        received.append(await step.wait_for_event("go", "go"))
        await step("begin", begin, log, step.run_id, len(received))
        write(log, "saw", step.run_id, len(received))
    return received


class LoggingStore:
    """A store that logs which runs come with a message."""

    def __init__(self, store: Store, log: str) -> None:
        self._store = store
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def send_and_claim(self, *arguments: Any, **options: Any) -> Handoff:
        handoff: Handoff = await cast(Any, self._store).send_and_claim(*arguments, **options)
        for grant in handoff.grants:
            write(self._log, "handoff", grant.lease.id)
        return handoff


async def send(runtime: Runtime, run_id: str, log: str) -> None:
    """Send the events of a run, except for those that a process knows to be stored."""
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    for number in range(EVENTS):
        if f"sent {run_id} {number}" not in lines:
            # Each has a number of its own: it was sent twice if a process died before the reply.
            event = [number, random.getrandbits(48)]
            await runtime.signal(run_id, "go", event, wait=False)
            write(log, "sent", run_id, number)
            # The run waits again for most of the events.
            await asyncio.sleep(random.random() * 0.06)


async def main(url: str, options: dict[str, str], run_ids: Sequence[str], log: str) -> None:
    store = cast(Store, LoggingStore(open_store(url, **options), log))
    runtime = Runtime(store, workflows=[relay], lease_ttl=LEASE)
    async with Worker(runtime, concurrency=50, poll=0.1, max_crashes=1000) as worker:
        await asyncio.gather(*(send(runtime, run_id, log) for run_id in run_ids))
        await worker.serve()


def work(url: str, options: dict[str, str], run_ids: Sequence[str], log: str) -> None:
    """Signal and execute runs in this process until it is killed."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url, options, run_ids, log))


_processes = forked()


def started(url: str, options: dict[str, str], run_ids: Sequence[str], log: str) -> BaseProcess:
    """Start a process that signals and executes runs."""
    process = _processes.Process(target=work, args=(url, options, run_ids, log))
    process.start()
    return process
