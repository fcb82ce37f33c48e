"""A run that kills every process it runs in, beside runs that do not."""

import asyncio
import os
from pathlib import Path

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import open_store
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


async def serve(url: str) -> None:
    async with open_store(url) as store:
        runtime = Runtime(store, workflows=[poison, healthy], lease_ttl=LEASE)
        async with Worker(runtime, poll=0.05) as worker:
            await worker.serve()


def work(url: str) -> None:
    """Be a worker until the poison kills it."""
    asyncio.run(serve(url))


async def test_a_poison_run_is_paused_and_its_neighbours_complete(tmp_path: Path) -> None:
    """Workers are started again whenever they die; the cause is found, and nobody else blamed."""
    url = f"sqlite:///{tmp_path}/runs.db"
    async with open_store(url) as store:
        runtime = Runtime(store, workflows=[poison, healthy], lease_ttl=LEASE)
        await runtime.trigger(poison, run_id="poison", wait=False)
        for n in range(NEIGHBOURS):
            await runtime.trigger(healthy, run_id=f"healthy-{n}", wait=False)
        deaths = await work_until_calm(runtime, url)
        runs = await runtime.list_runs(limit=100)
        paused = await runtime.get_run("poison")
    assert {run.status for run in runs if run.id != "poison"} == {"completed"}
    assert paused is not None
    assert (paused.status, deaths) == ("paused", 5)
    assert "5 crashes without progress" in paused.reason


async def work_until_calm(runtime: Runtime, url: str) -> int:
    """Start workers, one after the other, until nothing is left to do; return how many died."""
    deaths = 0
    process = _processes.Process(target=work, args=(url,))
    process.start()
    try:
        async with asyncio.timeout(60):
            while await runtime.list_runs(status="running", limit=1):
                if not process.is_alive():
                    deaths += 1
                    process = _processes.Process(target=work, args=(url,))
                    process.start()
                await asyncio.sleep(0.05)
    finally:
        process.terminate()
        process.join()
    return deaths
