"""Workers that are killed while they remove old runs: they remove all of them, and no others."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.runtime.ends import new_log
from perdure.runtime.maintenance import MAINTENANCE, read_input
from perdure.snapshot import RunStatus
from perdure.store import NewRun, Rest, Store, require_schedule
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.retention_process import make_older, work

RUNS, KILLS = 3000, 6
SNAPSHOT = (
    b'{"formatVersion":1,"workflowName":"old","steps":{},'
    b'"execution":{"status":"completed","lastUpdated":"2020-01-01T00:00:00.000Z"}}'
)
ENDS: tuple[RunStatus, ...] = ("completed", "failed", "cancelled", "paused")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with open_store(url) as store:
        yield store


async def create(store: Store, prefix: str, runs: int) -> None:
    schedule = require_schedule(store, "the test")
    for first in range(0, runs, 500):
        await schedule.enqueue(
            [
                NewRun(f"{prefix}-{n}", "old", SNAPSHOT, rest=Rest(ENDS[n % len(ENDS)]))
                for n in range(first, min(first + 500, runs))
            ]
        )


async def log_ids(store: Store) -> set[str]:
    return {log.id for log in await store.list(prefix="~log:", limit=1000)}


async def test_workers_that_are_killed_remove_everything_in_the_end(url: str, store: Store) -> None:
    """A log never outlives its run, whenever a worker dies."""
    await create(store, "old", RUNS)
    now = (await store.list(limit=1))[0].updated_at
    schedule = require_schedule(store, "the test")
    await schedule.enqueue([new_log(f"old-{n}/1/map", f"old-{n}", now) for n in range(40)])
    await asyncio.to_thread(make_older, url, 3)
    await create(store, "new", 100)
    for number in range(KILLS):
        process = forked().Process(target=work, args=(url,))
        process.start()
        await asyncio.sleep(random.uniform(0.05, 0.6) if number else 0.1)
        process.kill()
        await asyncio.to_thread(process.join)
        remaining_ids = {run.id for run in await store.list(prefix="old-", limit=RUNS)}
        assert {
            id.removeprefix("~log:").partition("/")[0] for id in await log_ids(store)
        } <= remaining_ids
    process = forked().Process(target=work, args=(url,))
    process.start()
    try:
        await asyncio.wait_for(all_removed(store), 60)
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)
    paused = {f"old-{n}" for n in range(RUNS) if ENDS[n % len(ENDS)] == "paused"}
    kept_ids = {run.id for run in await store.list(limit=2 * RUNS)}
    assert kept_ids == {*paused, *(f"new-{n}" for n in range(100))}
    assert await log_ids(store) == {f"~log:old-{n}/1/map" for n in range(3, 40, 4)}


async def all_removed(store: Store) -> None:
    while read_input(await store.load(MAINTENANCE)).looked_at is None:
        await asyncio.sleep(0.05)
