"""A run that kills every process it is executed in, beside runs that do not."""

import asyncio
import os
from pathlib import Path

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.operations import Operations
from perdure.stores import sqlite
from tests.durability.forked import forked

LEASE = 0.5
NEIGHBOURS = 20

_processes = forked()


@workflow("poison")
async def poison(step: Step, cure: str) -> str:
    """Kill the process in its second step, unless the file `cure` exists."""

    async def kill() -> str:
        await asyncio.sleep(0.2)
        return "cured" if Path(cure).exists() else os._exit(1)

    await step("before", asyncio.sleep, 0)
    return await step("kill", kill)


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


@pytest.mark.parametrize("how", ["resume", "unpause"])
async def test_a_poison_run_is_paused_and_its_neighbours_complete(tmp_path: Path, how: str) -> None:
    """Workers are restarted when they die. The cause is found, and no other run is suspected; when
    it is cured, it continues where it was.
    """
    path = tmp_path / "runs.db"
    async with sqlite(path) as store:
        runtime = Runtime(store, workflows=[poison, healthy], lease_ttl=LEASE)
        await runtime.trigger(poison, str(tmp_path / "cure"), run_id="poison", wait=False)
        for n in range(NEIGHBOURS):
            await runtime.trigger(healthy, run_id=f"healthy-{n}", wait=False)
        deaths = await work_until_calm(runtime, path)
        runs = await runtime.list_runs(limit=100)
        paused = await runtime.get_run("poison")
        (tmp_path / "cure").touch()
        await continue_by(how, runtime)
        more_deaths = await work_until_calm(runtime, path)
        cured = await runtime.get_run("poison")
    assert {run.status for run in runs if run.id != "poison"} == {"completed"}
    assert paused is not None
    # The first owner wrote an entry, so that its death does not count.
    assert (paused.status, deaths) == ("paused", 6)
    assert "5 crashes without progress" in paused.reason
    assert cured is not None
    assert (cured.status, cured.output, more_deaths) == ("completed", "cured", 0)
    assert [step.key for step in cured.history] == ["before", "kill"]


async def continue_by(how: str, runtime: Runtime) -> None:
    if how == "resume":
        await runtime.resume("poison", wait=False)
    else:
        await Operations(runtime.store).unpause("poison", by="ana", why="cured")


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
