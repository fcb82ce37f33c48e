"""A worker process of the test of rollbacks: trips that fail after three bookings."""

import asyncio
import logging
import os

from perdure import Retry, Runtime, Step, Worker, durable, workflow
from perdure.stores import open_store

LEASE = 1.0
PARTS = ("room", "seat", "car")


def note(log: str, line: str) -> None:
    """Log what was done, with one atomic append."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{line}\n".encode())
    os.close(file)


@workflow("killed-trip")
async def trip(step: Step, log: str) -> None:
    async def book(part: str) -> str:
        note(log, f"book {step.run_id} {part}")
        return part

    async def cancel(part: str) -> None:
        await asyncio.sleep(0.05)
        note(log, f"cancel {step.run_id} {part} {durable.current().idempotency_key}")

    async with step.saga("booking", undo_retry=Retry(3, delay=0.01)):
        for part in PARTS:
            await step(part, book, part, undo=cancel)
    raise ValueError("no funds")


async def main(url: str, options: dict[str, str]) -> None:
    store = open_store(url, **options)
    runtime = Runtime(store, workflows=[trip], lease_ttl=LEASE)
    async with Worker(runtime, poll=0.1, max_crashes=1000) as worker:
        await worker.serve()
    await store.close()


def work(url: str, options: dict[str, str]) -> None:
    """Run a worker in this process until it is killed."""
    logging.disable(logging.ERROR)
    asyncio.run(main(url, options))
