"""Workers in other processes: listed, reported as lost, drained, and paused for a workflow."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from perdure import Runtime, SystemClock
from perdure.insights.insights import Insights
from perdure.insights.model import WorkerRow
from perdure.presence import WorkerSwitch, WorkflowSwitch, set_switch
from perdure.stores.sqlite import SqliteStore, sqlite
from tests.durability.processes import Job, job, signed, worker_process

WITHIN_TEN_SECONDS = 12.0


class AMinuteLater(SystemClock):
    """The clock of a reader for whom the heartbeats of the last 30 seconds have expired."""

    def now(self) -> datetime:
        return super().now() + timedelta(minutes=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with sqlite(path) as store:
        yield store


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


async def until(condition: Callable[[], bool], within: float) -> None:
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


async def only_worker(store: SqliteStore) -> WorkerRow:
    async with asyncio.timeout(20):
        while not (workers := await Insights(store).workers()):
            await asyncio.sleep(0.01)
    [worker] = workers
    return worker


async def test_a_killed_worker_is_lost_and_a_stopped_one_is_not(
    store: SqliteStore, url: str, path: Path
) -> None:
    with worker_process(url) as killed:
        lost_worker = await only_worker(store)
        os.kill(killed.pid or 0, signal.SIGKILL)
        await asyncio.to_thread(killed.join)
        async with sqlite(path, clock=AMinuteLater()) as later:
            [worker] = await Insights(later, clock=AMinuteLater()).workers()
    assert (worker.id, worker.state, worker.pid) == (lost_worker.id, "lost", lost_worker.pid)
    with worker_process(url) as stopped:
        await until_seen(store, stopped.pid)
        stopped.terminate()
        await asyncio.to_thread(stopped.join)
    async with sqlite(path, clock=AMinuteLater()) as later:
        assert await Insights(later, clock=AMinuteLater()).workers() == (worker,)


async def until_seen(store: SqliteStore, pid: int | None) -> None:
    async with asyncio.timeout(20):
        while pid not in {each.pid for each in await Insights(store).workers()}:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_switch_drains_a_worker_of_another_process(store: SqliteStore, url: str) -> None:
    with worker_process(url) as process:
        worker = await only_worker(store)
        began = time.monotonic()
        await set_switch(store, WorkerSwitch(worker.id, True, "ana", "", SystemClock().now()))
        await asyncio.to_thread(process.join, 20)
        assert process.exitcode == 0
        assert time.monotonic() - began < WITHIN_TEN_SECONDS


@pytest.mark.slow
async def test_a_workflow_paused_in_one_process_is_not_claimed_in_another(
    store: SqliteStore, url: str, tmp_path: Path
) -> None:
    """Until it is resumed; then its runs continue."""
    log, now = tmp_path / "log", SystemClock().now()
    runtime = Runtime(store, workflows=[job])
    await set_switch(store, WorkflowSwitch("job", True, "ana", "outage", now))
    with worker_process(url):
        await only_worker(store)
        await runtime.trigger(job, Job(str(log), 0), run_id="run", wait=False)
        await asyncio.sleep(2)
        assert signed(log) == []
        await set_switch(store, WorkflowSwitch("job", False, "ana", "over", now))
        await until(lambda: bool(signed(log)), WITHIN_TEN_SECONDS)


async def test_a_second_signal_ends_the_grace_period(
    store: SqliteStore, url: str, tmp_path: Path
) -> None:
    """The runs are released at once: another worker need not wait for their leases."""
    log = tmp_path / "log"
    runtime = Runtime(store, workflows=[job])
    await runtime.trigger(job, Job(str(log), 60), run_id="run", wait=False)
    with worker_process(url, lease=60, grace=60) as process:
        await until(lambda: bool(signed(log)), 20)
        process.terminate()
        await asyncio.to_thread(process.join, 0.5)
        assert process.is_alive()
        process.terminate()
        await asyncio.to_thread(process.join, 10)
        assert process.exitcode == 0
    [run] = await store.summaries(["run"])
    assert run is not None
    assert run.owner is None
