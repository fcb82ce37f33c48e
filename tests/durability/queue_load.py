"""A worker process on a queue with a limit; it logs the leases of permits, and when steps begin."""

import asyncio
import logging
from typing import NamedTuple

from perdure import Queue, Rate, Runtime, Step, Worker, workflow
from perdure.stores import open_store
from tests.durability.lease_log import LeaseLog
from tests.durability.queue_process import write_line

LEASE = 1.0
SLOTS, STEP_SECONDS = 8, 0.25
RATE = 100
# A worker that could use all slots would keep them, and the others would be killed for nothing.
MOST = {"slots": 3, "paced": 100}


class Load(NamedTuple):
    """The store of a worker, and the files in which it logs leases and steps."""

    url: str
    options: dict[str, str]
    leases: str
    steps: str


@workflow("slots", queue=Queue("slots", concurrency=SLOTS))
async def slots(step: Step, log: str) -> None:
    await step("work", work_for_a_while, log, step.run_id)


@workflow("paced", queue=Queue("paced", rate=Rate(RATE, per="1s")))
async def paced(step: Step, log: str) -> None:
    await step("work", write_line, log, "begin", step.run_id)


async def work_for_a_while(log: str, run_id: str) -> None:
    write_line(log, "begin", run_id)
    await asyncio.sleep(STEP_SECONDS)


async def main(load: Load, queue: str) -> None:
    store = open_store(load.url, **load.options)
    runtime = Runtime(LeaseLog(store, load.leases), workflows=[slots, paced], lease_ttl=LEASE)
    # Kills hit runs at random, some of them several times in a row.
    worker = Worker(runtime, queues=[queue], concurrency=MOST[queue], poll=0.1, max_crashes=1000)
    async with worker:
        await worker.serve()
    await store.close()


def work(load: Load, queue: str) -> None:
    """Work until a signal arrives."""
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(load, queue))
