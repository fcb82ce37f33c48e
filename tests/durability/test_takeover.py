"""How long it takes from `kill -9` of a worker until another one continues its runs, measured on
real processes.
"""

import asyncio
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Runtime
from tests.durability.processes import Job, job, opened, signed, worker_process

pytestmark = pytest.mark.alone

LEASE = 1.0
RUNS = 20


async def until_all_are_with(process: BaseProcess, log: Path) -> None:
    """Wait until a process works on every run."""
    async with asyncio.timeout(20):
        while signed(log).count(process.pid or 0) < RUNS:
            await asyncio.sleep(0.01)


async def trigger_all(runtime: Runtime, log: Path, *, seconds: float) -> None:
    for n in range(RUNS):
        await runtime.trigger(job, Job(str(log), seconds), run_id=f"run-{n}", wait=False)


@pytest.mark.parametrize("moment", [0.0, 0.35, 0.7])
async def test_runs_continue_within_the_lease_and_a_second(tmp_path: Path, moment: float) -> None:
    """This holds for all runs of the killed worker, whenever in its lease it dies."""
    url, log = f"sqlite:///{tmp_path}/runs.db", tmp_path / "log"
    async with opened(url) as runtime:
        await trigger_all(runtime, log, seconds=60)
        with worker_process(url, lease=LEASE) as victim:
            await until_all_are_with(victim, log)
            with worker_process(url, lease=LEASE) as heir:
                await asyncio.sleep(0.5 + moment)
                victim.kill()
                killed = time.monotonic()
                await until_all_are_with(heir, log)
                took = time.monotonic() - killed
    assert took <= LEASE + 1
    assert len(signed(log)) == 2 * RUNS


async def test_a_living_worker_keeps_its_runs(tmp_path: Path) -> None:
    """A second worker claims nothing while the first renews, for several times the lease."""
    url, log = f"sqlite:///{tmp_path}/runs.db", tmp_path / "log"
    async with opened(url) as runtime:
        await trigger_all(runtime, log, seconds=2.5)
        with worker_process(url, lease=0.6) as first:
            await until_all_are_with(first, log)
            with worker_process(url, lease=0.6):
                async with asyncio.timeout(20):
                    while not await all_completed(runtime):
                        await asyncio.sleep(0.05)
    assert len(signed(log)) == RUNS


async def all_completed(runtime: Runtime) -> bool:
    return len(await runtime.list_runs(status="completed")) == RUNS
