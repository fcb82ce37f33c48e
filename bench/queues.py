"""Workload J: what a queue costs, beside the same runs in no queue.

`python -m bench.queues [sqlite postgres …]` prints runs per second of one worker.
"""

import asyncio
import sys
from statistics import median

from bench.places import place
from bench.timing import now
from bench.workloads import finished
from perdure import Limits, Queue, Runtime, Step, Worker, workflow
from perdure.runtime.definition import Definition
from perdure.store import Store

RUNS, KEYS, REPEATS = 3000, 50, 5


async def work(step: Step, number: int) -> None:
    """Execute one step."""
    await step("work", lambda: number)


PLAIN = workflow("bench-plain")(work)
UNLIMITED = workflow("bench-queue", queue=Queue("open"))(work)
LIMITED = workflow("bench-limit", queue=Queue("limited", concurrency=100))(work)
PER_KEY = workflow(
    "bench-keys",
    queue=Queue("keyed", per_key=Limits(concurrency=4)),
    key=lambda number: str(number % KEYS),
)(work)
LANES = {"plain": PLAIN, "queue": UNLIMITED, "limit": LIMITED, "limit per key": PER_KEY}


async def rate(store: Store, definition: Definition[int, None]) -> float:
    """Return how many runs per second one worker executes, all of which are due."""
    runtime = Runtime(store, workflows=[definition])
    await runtime.trigger_many(definition, range(RUNS))
    began = now()
    async with Worker(runtime, concurrency=100) as worker:
        await finished(worker, RUNS)
        return RUNS / (now() - began)


async def measure(store: Store) -> dict[str, float]:
    """Return the median rate of each lane; they take turns."""
    rates: dict[str, list[float]] = {name: [] for name in LANES}
    for _ in range(REPEATS):
        for name, definition in LANES.items():
            rates[name].append(await rate(store, definition))
    return {name: median(each) for name, each in rates.items()}


async def main(names: list[str]) -> None:
    """Measure each store and print the rates."""
    for name in names:
        with place(name) as measured:
            store = measured.open()
            rates = await measure(store)
            await store.close()
        for lane, each in rates.items():
            share = each / rates["plain"]
            print(f"{name:10} {lane:14} {each:8,.0f} runs/s {share:7.0%}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["sqlite", "postgres"]))
