"""Fairness and order in a queue with two worker processes, and the cost of many keys.

`python -m bench.fairness [sqlite postgres …]` runs 10,000 runs on 100 unequal keys and prints how
even the keys' shares are at half time (Jain's index), how many runs began before an earlier run of
their key, and how many begin between the trigger of a run with priority 9 and its own begin.
`--many-keys 100000` compares as many keys of one run each with a hundred keys.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.places import place
from perdure import Limits, Queue, Runtime, Step, Worker, workflow
from perdure.stores import open_store
from tests.durability.lease_history import jain

WORKERS = 2
SIZES = {f"{key:02}": 20 + key * 160 // 99 for key in range(100)}
URGENT = -1
QUEUE = Queue("fair", concurrency=50, per_key=Limits(concurrency=1))


class Job(NamedTuple):
    """A run: where it logs its begin, its key, and its number among those of the key."""

    log: str
    key: str
    number: int


class Begin(NamedTuple):
    """When a run began, in nanoseconds."""

    at: int
    key: str
    number: int


@workflow("bench-fair", queue=QUEUE, key=lambda job: job.key)
async def fair(step: Step, job: Job) -> None:
    """Log when the run began."""
    await step("begin", write_begin, job)


async def write_begin(job: Job) -> None:
    """Append a line to the log of this process."""
    with Path(job.log, str(os.getpid())).open("a") as file:
        file.write(f"{time.monotonic_ns()} {job.key} {job.number}\n")


async def serve(url: str) -> None:
    """Work until the process is killed."""
    async with open_store(url) as store:
        await Worker(Runtime(store, workflows=[fair])).serve()


def work(url: str) -> None:
    """Run a worker process."""
    asyncio.run(serve(url))


@asynccontextmanager
async def workers(url: str, count: int = WORKERS) -> AsyncIterator[None]:
    """Start worker processes, and end them."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(url,)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def unequal_jobs(log: str) -> list[Job]:
    """Return jobs of keys with few and with many runs, mixed."""
    keys = [key for key, size in SIZES.items() for _ in range(size)]
    random.Random(5).shuffle(keys)
    numbers: Counter[str] = Counter()
    jobs: list[Job] = []
    for key in keys:
        jobs.append(Job(log, key, numbers[key]))
        numbers[key] += 1
    return jobs


def read_begins(log: str) -> list[Begin]:
    """Return the begins of all processes, in order."""
    lines = [line.split() for path in Path(log).iterdir() for line in path.read_text().splitlines()]
    return sorted(Begin(int(at), key, int(number)) for at, key, number in lines)


async def has_begun(log: str, count: int) -> list[Begin]:
    """Wait until this many runs have begun."""
    while len(begins := read_begins(log)) < count:
        await asyncio.sleep(0.1)
    return begins


def inversions(begins: Sequence[Begin]) -> int:
    """Return how many runs began after a later one of their key."""
    latest: dict[str, int] = {}
    late = 0
    for begin in begins:
        late += begin.number < latest.get(begin.key, -1)
        latest[begin.key] = max(begin.number, latest.get(begin.key, -1))
    return late


def shares(begins: Sequence[Begin], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many runs of each key that still has some waiting have begun."""
    counts = Counter(begin.key for begin in begins)
    return {key: counts[key] for key, size in sizes.items() if counts[key] < size}


async def measure_turns(url: str, count: int) -> str:
    """Return the measurements for unequal keys."""
    async with open_store(url) as store:
        with tempfile.TemporaryDirectory() as log:
            runtime, jobs = Runtime(store, workflows=[fair]), unequal_jobs(log)
            await runtime.trigger_many(fair, jobs)
            async with workers(url, count):
                await has_begun(log, len(jobs) // 2)
                await runtime.trigger(fair, Job(log, "99", URGENT), priority=9, wait=False)
                triggered = time.monotonic_ns()
                begins = await has_begun(log, len(jobs) + 1)
    plain = [begin for begin in begins if begin.number != URGENT]
    urgent = next(begin for begin in begins if begin.number == URGENT)
    before = sum(triggered < begin.at < urgent.at for begin in begins)
    at_half = shares(plain[: len(plain) // 2], SIZES)
    rate = len(begins) / (begins[-1].at - begins[0].at) * 1e9
    return (
        f"Jain {jain(at_half):.4f} at half time (from {min(at_half.values())} to "
        f"{max(at_half.values())} runs of a key), {inversions(plain)} runs out of order, "
        f"{before} before priority 9, {rate:,.0f} runs/s"
    )


async def rate_of_keys(url: str, keys: int, runs: int) -> float:
    """Return the runs per second if the runs are spread over this many keys."""
    async with open_store(url) as store:
        with tempfile.TemporaryDirectory() as log:
            runtime = Runtime(store, workflows=[fair])
            jobs = [Job(log, f"key-{n % keys}", n // keys) for n in range(max(keys, runs))]
            await runtime.trigger_many(fair, jobs)
            async with workers(url):
                first = await has_begun(log, 1)
                begins = await has_begun(log, runs)
    return runs / (begins[runs - 1].at - first[0].at) * 1e9


async def main(names: Sequence[str], many_keys: int, runs: int, count: int) -> None:
    """Measure each store and print the results."""
    for name in names:
        with place(name) as measured:
            if not many_keys:
                print(f"{name:10} {await measure_turns(measured.url, count)}", flush=True)
                continue
        rates: dict[int, float] = {}
        for keys in (100, many_keys):
            with place(name) as measured:
                rates[keys] = await rate_of_keys(measured.url, keys, runs)
        text = ", ".join(f"{keys:,} keys {rate:,.0f} runs/s" for keys, rate in rates.items())
        print(f"{name:10} {text} ({rates[many_keys] / rates[100]:.0%})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("stores", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--many-keys", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=WORKERS)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.stores, arguments.many_keys, arguments.runs, arguments.workers))
