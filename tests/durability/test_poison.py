"""A run that kills every process it is executed in, beside runs that do not."""

import asyncio
import os
from pathlib import Path

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import sqlite
from tests.durability.forked import forked

LEASE = 0.5
NEIGHBOURS = 20

_processes = forked()


@workflow("poison")
async def poison(step: Step) -> None:
    async def kill() -> None:
        await asyncio.sleep(0.2)
        os._exit(1)

    await step("kill", kill)


@workflow("healthy")
async def healthy(step: Step) -> str:
    for _ in range(3):
        await step("work", asyncio.sleep, 0.3)
    return "done"


async def serve(path: Path) -> None:
    async with sqlite(path) as store:
        runtime = Runtime(store, workflows=[poison, healthy], lease_ttl=LEASE)
        async with Worker(runtime, poll=0.05) as worker:
            await worker.serve()


def work(path: Path) -> None:
    """Work until the poison run kills the process."""
    asyncio.run(serve(path))


async def test_a_poison_run_is_paused_and_its_neighbours_complete(tmp_path: Path) -> None:
    """Workers are restarted when they die. The cause is found, and no other run is suspected."""
    path = tmp_path / "runs.db"
    async with sqlite(path) as store:
        runtime = Runtime(store, workflows=[poison, healthy], lease_ttl=LEASE)
        await runtime.trigger(poison, run_id="poison", wait=False)
        for n in range(NEIGHBOURS):
            await runtime.trigger(healthy, run_id=f"healthy-{n}", wait=False)
        deaths = await work_until_calm(runtime, path)
        runs = await runtime.list_runs(limit=100)
        paused = await runtime.get_run("poison")
    assert {run.status for run in runs if run.id != "poison"} == {"completed"}
    assert paused is not None
    assert (paused.status, deaths) == ("paused", 5)
    assert "5 crashes without progress" in paused.reason


async def is_busy(runtime: Runtime) -> bool:
    queued = await runtime.list_runs(status="queued", limit=1)
    return bool(queued or await runtime.list_runs(status="running", limit=1))


async def work_until_calm(runtime: Runtime, path: Path) -> int:
    """Start workers one after another until nothing is left to do; return how many died."""
    deaths = 0
    process = _processes.Process(target=work, args=(path,))
    process.start()
    try:
        async with asyncio.timeout(60):
            while await is_busy(runtime):
                if not process.is_alive():
                    deaths += 1
                    process = _processes.Process(target=work, args=(path,))
                    process.start()
                await asyncio.sleep(0.05)
    finally:
        process.terminate()
        process.join()
    return deaths
