"""A worker process of the queue tests: it logs when each step begins and ends."""

import asyncio
import os
import time

from perdure import Limits, Queue, Runtime, Step, Worker, workflow
from perdure.stores import open_store

LEASE = 1.0
QUEUE = Queue("jobs", concurrency=3, per_key=Limits(concurrency=2))
STEP_SECONDS = 0.05


@workflow("queue-job", queue=QUEUE, key=lambda payload: payload[1])
async def job(step: Step, payload: tuple[str, str]) -> None:
    log, key = payload
    await step("work", work_and_log, log, key, step.run_id)


async def work_and_log(log: str, key: str, run_id: str) -> None:
    write_line(log, "begin", key, run_id)
    try:
        await asyncio.sleep(STEP_SECONDS)
    finally:
        write_line(log, "end", key, run_id)


def write_line(log: str, *words: str) -> None:
    """Log what happens in this process, and when, with one atomic append."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{time.monotonic_ns()} {os.getpid()} {' '.join(words)}\n".encode())
    os.close(file)


async def main(url: str, options: dict[str, str]) -> None:
    store = open_store(url, **options)
    async with Worker(Runtime(store, workflows=[job], lease_ttl=LEASE), poll=0.1) as worker:
        await worker.serve()
    await store.close()


def work(url: str, options: dict[str, str]) -> None:
    """Work until a signal arrives."""
    asyncio.run(main(url, options))
