"""A worker process that is stopped finishes its runs in time, or releases them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Run, Runtime
from tests.durability.processes import Job, job, opened, signed, worker_process

pytestmark = pytest.mark.alone


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
async def runtime(url: str) -> AsyncIterator[Runtime]:
    async with opened(url) as runtime:
        yield runtime


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def until_at_work(log: Path, times: int = 1) -> None:
    async with asyncio.timeout(20):
        while len(signed(log)) < times:
            await asyncio.sleep(0.01)


async def stop(process: BaseProcess, number: int) -> float:
    """Send a signal and return how long the process took to exit; it must exit with 0."""
    started = time.monotonic()
    os.kill(process.pid or 0, number)
    await asyncio.to_thread(process.join, 20)
    assert process.exitcode == 0
    return time.monotonic() - started


async def get(runtime: Runtime) -> Run:
    run = await runtime.get_run("run")
    assert run is not None
    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_runs_that_can_finish_within_the_grace_period_do(
    url: str, runtime: Runtime, log: Path, number: int
) -> None:
    """The process exits when its runs have ended, not when the grace period has."""
    await runtime.trigger(job, Job(str(log), 0.7), run_id="run", wait=False)
    with worker_process(url, lease=60, grace=15) as worker:
        await until_at_work(log)
        assert await stop(worker, number) < 5
    assert (await get(runtime)).status == "completed"


async def test_runs_that_cannot_finish_are_released_at_once(
    url: str, runtime: Runtime, log: Path
) -> None:
    """The lease of a minute is released: the next worker continues at once, and recorded steps do
    not run again.
    """
    await runtime.trigger(job, Job(str(log), 4), run_id="run", wait=False)
    with worker_process(url, lease=60, grace=0.2) as worker:
        await until_at_work(log)
        assert await stop(worker, signal.SIGTERM) < 3
    handed_back = await get(runtime)
    assert (handed_back.status, [step.key for step in handed_back.history]) == (
        "running",
        ["prepare"],
    )
    assert [due.id for due in await runtime.store.due(runtime.clock.now(), 10)] == ["run"]  # type: ignore[attr-defined]
    started = time.monotonic()
    with worker_process(url, lease=60):
        await until_at_work(log, 2)
        assert time.monotonic() - started < 3


async def test_a_second_worker_claims_runs_while_the_first_drains(
    url: str, runtime: Runtime, log: Path
) -> None:
    """As in a deployment: the old process claims nothing more, the new one claims new runs."""
    await runtime.trigger(job, Job(str(log), 1.5), run_id="run", wait=False)
    with worker_process(url, lease=60, grace=15) as old:
        await until_at_work(log)
        os.kill(old.pid or 0, signal.SIGTERM)
        await asyncio.sleep(0.3)
        with worker_process(url, lease=60) as new:
            await runtime.trigger(job, Job(str(log), 0), run_id="next", wait=False)
            await until_at_work(log, 2)
            assert signed(log) == [old.pid, new.pid]
            await asyncio.to_thread(old.join, 20)
    assert (await get(runtime)).status == "completed"
