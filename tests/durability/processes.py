"""Real worker processes on a SQLite file, and the run that they are killed, paused and stopped
with.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from perdure import Runtime, Step, Worker, workflow
from perdure.store import Store
from perdure.stores import open_store
from tests.durability.forked import forked

_processes = forked()


@dataclass
class Job:
    """Where to log which process works, and how long a step takes."""

    log: str
    seconds: float


def sign(log: str) -> int:
    """Log that this process is working, with one atomic append."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{os.getpid()}\n".encode())
    os.close(file)
    return os.getpid()


@workflow("job")
async def job(step: Step, payload: Job) -> int:
    async def work() -> int:
        pid = sign(payload.log)
        await asyncio.sleep(payload.seconds)
        return pid

    await step("prepare", lambda: None)
    return await step("work", work)


async def main(url: str, lease: float, grace: float) -> None:
    store = open_store(url)
    runtime = Runtime(store, workflows=[job], lease_ttl=lease)
    async with Worker(runtime, grace=grace) as worker:
        await worker.serve()
    await store.close()


def work(url: str, lease: float, grace: float) -> None:
    """Work until a signal arrives."""
    asyncio.run(main(url, lease, grace))


@contextmanager
def worker_process(url: str, *, lease: float = 1.0, grace: float = 5.0) -> Iterator[BaseProcess]:
    """Start a worker in its own process, and kill it in the end if it is still running."""
    # Forked from a process that has imported everything, since imports take seconds.
    _processes.set_forkserver_preload([__name__])
    process = _processes.Process(target=work, args=(url, lease, grace))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Runtime]:
    """Return a runtime that only triggers and reads runs."""
    store: Store = open_store(url)
    try:
        yield Runtime(store, workflows=[job])
    finally:
        await store.close()


def signed(log: Path) -> list[int]:
    """Return the ids of the processes that have worked so far."""
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []
