"""What is measured of perdure, each workload a coroutine that gives a number."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from perdure import Runtime, Step, Worker, Workflow, codec, durable, workflow
from perdure.clock import SystemClock
from perdure.snapshot import new_snapshot
from perdure.store import NewRun, Store, require_schedule

VALUE = {"id": "1", "name": "Ann", "padding": "x" * 60}
now = time.perf_counter


async def fetch(id: str) -> dict[str, str]:
    """Give what a step gives here: about 100 bytes."""
    return VALUE


async def timed(work: Awaitable[Any]) -> float:
    """Give the seconds it takes."""
    began = now()
    await work
    return now() - began


async def loop_turn(turns: int = 3000) -> float:
    """Give the seconds of one `await asyncio.sleep(0)`, the unit for what needs no store."""
    began = now()
    for _ in range(turns):
        await asyncio.sleep(0)
    return (now() - began) / turns


def steps(count: int) -> Callable[[Step], Awaitable[None]]:
    """Give a workflow function of so many steps, one after another."""

    async def sequence(step: Step) -> None:
        for _ in range(count):
            await step("fetch", fetch, "1")

    return sequence


async def one_run(store: Store | None, id: str, count: int) -> None:
    """Run so many steps durably."""
    result = await durable.run({}, steps(count), id=id, store=store)
    result.unwrap()


async def many_runs(store: Store, name: str, runs: int, count: int = 10) -> float:
    """Give steps per second of many runs at once."""
    took = await timed(asyncio.gather(*(one_run(store, f"{name}-{n}", count) for n in range(runs))))
    return runs * count / took


async def resume(store: Store, id: str, count: int = 1000) -> float:
    """Give the seconds per step of resuming a run with so many recorded steps, load included."""

    async def go_on(step: Step) -> None:
        await steps(count)(step)

    task = asyncio.ensure_future(durable.run({}, _stopping(count), id=id, store=store))
    await asyncio.wait([task])
    took = await timed(durable.run({}, go_on, id=id, store=store))
    return took / count


def _stopping(count: int) -> Callable[[Step], Awaitable[None]]:
    async def stopping(step: Step) -> None:
        await steps(count)(step)
        raise asyncio.CancelledError

    return stopping


@workflow("bench-due")
async def due_workflow(step: Step) -> None:
    """One step; it is due when the measuring begins."""
    await step("fetch", fetch, "1")


async def due_runs(store: Store, name: str, runs: int = 1000) -> float:
    """Give runs per second of one worker that finds so many due at once."""
    runtime = Runtime(store, workflows=[due_workflow])
    clock = SystemClock()
    snapshot = codec.dumps(new_snapshot("bench-due", now=clock.now(), metadata={"version": 1}))
    new = [NewRun(f"{name}-{n}", "bench-due", snapshot) for n in range(runs)]
    await require_schedule(store).enqueue(new)
    began = now()
    async with Worker(runtime, concurrency=200, poll=0.05) as worker:
        while worker.counters.finished < runs:
            await asyncio.sleep(0.002)
    return runs / (now() - began)


async def first_step(store: Store, id: str) -> float:
    """Give the seconds from the call of a run to the end of its first step's record."""
    began = now()
    took = 0.0

    async def begin(step: Step) -> None:
        nonlocal took
        await step("fetch", fetch, "1")
        took = now() - began

    (await durable.run({}, begin, id=id, store=store)).unwrap()
    return took


async def plain_step(count: int) -> tuple[float, float, float]:
    """Give the seconds of a step without a store, of its replay, and of the function alone."""
    wf = Workflow("bench")
    step = await timed(wf.run(steps(count)))
    again = Workflow("bench", snapshot=wf.snapshot())
    replay = await timed(again.run(steps(count)))
    began = now()
    for _ in range(count):
        await fetch("1")
    return step / count, replay / count, (now() - began) / count
