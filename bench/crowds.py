"""Ten thousand runs at once in one process, beside two hundred.

    python -m bench.crowds [memory sqlite postgres …]

It prints the steps per second of both, which take turns, and the resident memory that each of ten
thousand runs adds while it is in a step.
"""

import asyncio
import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from resource import getpagesize
from statistics import median
from subprocess import run

from bench.places import place
from bench.workloads import many_runs
from perdure import Step, durable
from perdure.cli.garbage import collector_for
from perdure.store import Store
from perdure.stores import MemoryStore, open_store

FEW, MANY, REPEATS = 200, 10_000, 5
KEPT = 0.8
"""The share of the rate that the larger crowd must reach."""


async def rates(store: Store) -> tuple[float, float]:
    """Return the steps per second of few and of many concurrent runs."""
    few: list[float] = []
    many: list[float] = []
    for repeat in range(REPEATS + 1):
        few += [await many_runs(store, f"few-{repeat}-{number}", FEW) for number in range(5)]
        many.append(await many_runs(store, f"many-{repeat}", MANY))
    # The first of each warms up.
    return median(few[5:]), median(many[1:])


async def held(store: Store) -> float:
    """Return the kilobytes of resident memory per run, while many runs are in a step."""
    reached, released = asyncio.Semaphore(0), asyncio.Event()

    async def wait() -> None:
        reached.release()
        await released.wait()

    async def body(step: Step) -> None:
        await step("wait", wait)

    async def begin(name: str) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(durable.run({}, body, id=f"{name}-{number}", store=store))
            for _ in range(MANY):
                await reached.acquire()
            measured.append(_resident())
            released.set()

    measured: list[int] = []
    gc.collect()
    before = _resident()
    await begin("held")
    return (measured[0] - before) / MANY / 1024


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * getpagesize()


async def measure(name: str) -> None:
    """Measure one store, and print the results."""
    with nullcontext(None) if name == "memory" else place(name) as here:
        async with MemoryStore() if here is None else open_store(here.url) as store:
            memory = await held(store)
            with collector_for(MANY):
                few, many = await rates(store)
    verdict = "" if many >= KEPT * few else "  missed"
    print(f"{name}: {FEW} runs {few:,.0f} steps/s · {MANY:,} runs {many:,.0f} steps/s", end=" · ")
    print(f"{many / few:.2f} (≥ {KEPT}){verdict} · {memory:.1f} KB per run", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        asyncio.run(measure(sys.argv[1]))
    else:
        # In a new process each, because freed memory stays with the process.
        for chosen in sys.argv[1:] or ["memory", "postgres"]:
            run([sys.executable, "-m", "bench.crowds", chosen], check=True)
