"""The worker of the tests of schedules: logs each effect of a run with its process id."""

import asyncio
import logging
import os

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import open_store

LEASE = 1.0


def log_effect(log: str, run_id: str) -> None:
    """Log an effect, with one atomic append."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{run_id} {os.getpid()}\n".encode())
    os.close(file)


@workflow("beat")
async def beat(step: Step, log: str) -> str:
    await step("log", log_effect, log, step.run_id)
    return str(step.scheduled_for)


async def main(url: str) -> None:
    store = open_store(url)
    runtime = Runtime(store, workflows=[beat], lease_ttl=LEASE)
    async with Worker(runtime, poll=0.1, max_crashes=1000) as worker:
        await worker.serve()
    await store.close()


def work(url: str) -> None:
    """Run a worker in this process until it is killed."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(url))
