"""A hundred thousand sleeping runs cost a worker nothing, measured on a SQLite file."""

import asyncio
import gc
import shutil
import time
import tracemalloc
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.codec import dumps
from perdure.snapshot import new_snapshot
from perdure.store import NewRun
from perdure.stores.sqlite import sqlite
from perdure.testing.faults import FaultyStore

pytestmark = pytest.mark.alone

SLEEPERS = 100_000
POLL = 0.2


@workflow("sleeper")
async def sleeper(step: Step) -> str:
    await step.sleep("year", timedelta(days=365))
    return "rested"


@pytest.fixture(scope="module")
def full_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the sleeping runs, created once."""
    path = tmp_path_factory.mktemp("sleepers") / "runs.db"
    asyncio.run(put_to_sleep(path, SLEEPERS))
    return path


async def put_to_sleep(path: Path, count: int) -> None:
    now = datetime.now(UTC)
    wake_at = now + timedelta(days=365)
    snapshot = dumps(new_snapshot("sleeper", now=now, metadata={"version": 1}))
    async with sqlite(path, durability="normal") as store:
        for start in range(0, count, 2000):
            ids = range(start, min(start + 2000, count))
            await store.enqueue([NewRun(f"run-{n}", "sleeper", snapshot, wake_at) for n in ids])


@pytest.fixture
async def store(full_file: Path, tmp_path: Path) -> AsyncIterator[FaultyStore]:
    path = shutil.copy(full_file, tmp_path / "runs.db")
    async with sqlite(path) as store:
        yield FaultyStore(store)


async def test_sleeping_runs_cost_neither_memory_nor_queries(store: FaultyStore) -> None:
    """In two seconds there is one fast, empty claim per poll, and memory does not grow."""
    runtime = Runtime(store, workflows=[sleeper])
    async with Worker(runtime, poll=POLL) as worker:
        await asyncio.sleep(2 * POLL)
        store.calls.clear()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await asyncio.sleep(2)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert {call.verb for call in store.calls} == {"claim"}
    assert len(store.calls) <= 2 / (0.75 * POLL) + 1
    assert (worker.counters.claimed, worker.running) == (0, 0)
    assert after - before < 100_000
    assert peak - before < 300_000


async def test_a_due_run_among_sleeping_runs_is_found_at_once(store: FaultyStore) -> None:
    """Due runs are found by an index that skips the hundred thousand others."""
    runtime = Runtime(store, workflows=[sleeper], suspend_after=0)
    async with Worker(runtime, poll=POLL):
        run = await runtime.trigger(sleeper, run_id="one", wait=False)
        started = time.monotonic()
        while run.status in ("queued", "running"):
            await asyncio.sleep(0.005)
            run = (await runtime.get_run("one")) or run
        assert time.monotonic() - started < 1
    assert run.status == "suspended"
