"""Measure how removing a million finished runs affects the steps of working runs.

    python -m bench.retention [--runs 1000000] [--stores sqlite,postgres] [--window 5] [--seconds N]
                              [--hour 1]

Two hundred runs execute a step about twice a second each. Removal, as workers do it, is switched on
and off every few seconds, so that other load affects both cases. Workers remove slowly on purpose:
a million runs take two to three hours, and from the fourth hour on they remove twice as fast.
`--hour` chooses the hour to measure.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from statistics import quantiles
from typing import NamedTuple

from bench.million import TEMPLATES, WORKFLOWS, fill
from bench.places import place
from bench.timing import now
from perdure import Runtime, Step, Worker, workflow
from perdure.clock import SystemClock
from perdure.retention import OVER
from perdure.runtime.pruning import Policies, Pruner
from perdure.store import MaintenanceStore, Store, require_maintenance
from perdure.stores import open_store

WORKING = 200
EVERY = 0.5
ALLOWED = 1.2
"""How many times longer the slowest steps may take during the removal."""


class Times(NamedTuple):
    """The durations of steps in milliseconds."""

    steps: int
    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.steps} steps, p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms"


class Load:
    """Runs that work until they are stopped, and how long their steps took."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._stopped = asyncio.Event()
        load = self

        @workflow("bench-working")
        async def working(step: Step, number: int) -> None:
            await asyncio.sleep(EVERY * number / WORKING)
            while not load._stopped.is_set():
                began = now()
                await step("work", asyncio.sleep, 0)
                load.taken.append((now() - began) * 1000)
                await asyncio.sleep(EVERY)

        self.working = working

    def stop(self) -> None:
        """Let the runs end."""
        self._stopped.set()


def times(durations: list[float]) -> Times:
    """Return the percentiles of durations."""
    cuts = quantiles(durations, n=100)
    return Times(len(durations), cuts[49], cuts[98])


POLICIES: Policies = {
    name: dict.fromkeys(OVER, timedelta(days=1)) for name in (*WORKFLOWS, "long", "big")
}
"""What is removed: all runs that were over for a day."""


@asynccontextmanager
async def worker(store: Store, load: Load) -> AsyncGenerator[Runtime]:
    """Execute the working runs; nothing is removed before the policy is declared."""
    runtime = Runtime(store, workflows=[load.working])
    async with Worker(runtime, concurrency=WORKING + 50):
        for number in range(WORKING):
            await runtime.trigger(load.working, number, run_id=f"working-{number}", wait=False)
        yield runtime
        load.stop()


class Comparison(NamedTuple):
    """The steps of working runs without and with the removal, and its speed."""

    without: Times
    beside: Times
    removed: int
    seconds: float


async def compare(name: str, runs: int, window: float, seconds: float, hour: int) -> Comparison:
    """Measure the steps of working runs, with and without the removal in turn."""
    with place(name) as here:
        await fill(here.url, max(runs * 31 // 30, 2 * TEMPLATES))
        load = Load()
        async with open_store(here.url) as store, worker(store, load):
            await asyncio.sleep(5)
            return await _in_turn(require_maintenance(store), load, window, seconds, hour)


async def _in_turn(
    store: MaintenanceStore, load: Load, window: float, limit: float, hour: int
) -> Comparison:
    without: list[float] = []
    beside: list[float] = []
    removed, seconds, count = 0, 0.0, -1
    until = now() + limit
    while count and now() < until:
        load.taken.clear()
        await asyncio.sleep(window)
        without += load.taken
        load.taken.clear()
        began = now()
        count = await _remove(store, window, hour)
        removed, seconds = removed + count, seconds + now() - began
        beside += load.taken
    return Comparison(times(without), times(beside), removed, seconds)


async def _remove(store: MaintenanceStore, window: float, hour: int) -> int:
    """Remove runs for some seconds, and return how many."""
    clock = SystemClock()
    pruner = Pruner(store, clock, POLICIES, clock.now() - timedelta(hours=hour - 1))
    until, removed = now() + window, 0
    async with aclosing(pruner.remove()) as batches:
        async for batch in batches:
            removed += batch.runs
            if now() >= until:
                break
    return removed


async def main() -> None:
    """Measure the given stores, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--window", type=float, default=5)
    parser.add_argument("--stores", default="sqlite,postgres", help="separated by commas")
    parser.add_argument("--seconds", type=float, default=600, help="how long to measure a store")
    parser.add_argument("--hour", type=int, default=1, help="how long workers have been removing")
    chosen = parser.parse_args()
    for name in chosen.stores.split(","):
        comparison = await compare(name, chosen.runs, chosen.window, chosen.seconds, chosen.hour)
        change = comparison.beside.p99 / comparison.without.p99
        rate = comparison.removed / comparison.seconds
        seconds = f"{comparison.seconds:.0f} s ({rate:,.0f}/s)"
        print(f"{name}: {comparison.removed:,} runs removed in {seconds}")
        print(f"  without: {comparison.without}\n  beside:  {comparison.beside}")
        verdict = "ok" if change <= ALLOWED else "TOO SLOW"
        print(f"  p99 {change - 1:+.0%} ({verdict}); load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
