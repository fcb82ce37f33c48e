"""The seeded history of the sample shop."""

from typing import get_args

import pytest
import pytest_asyncio

from perdure.demo.history import SEEDED_TIME, seed
from perdure.snapshot import RunStatus
from perdure.stores import MemoryStore
from perdure.testing import TestClock

# Seeding takes seconds, so the tests share a store and its event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def seeded_store() -> MemoryStore:
    clock = TestClock()
    before, store = clock.now(), MemoryStore(clock=clock)
    await seed(store, clock)
    assert clock.now() - before == SEEDED_TIME
    return store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store() -> MemoryStore:
    return await seeded_store()


async def test_every_status_occurs(store: MemoryStore) -> None:
    assert {run.status for run in await store.list(limit=1000)} == {*get_args(RunStatus)}


async def test_it_is_the_same_each_time(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The failures of its runs are not logged."""
    first, second = [await each.list(limit=1000) for each in (store, await seeded_store())]
    assert [(run.id, run.status, run.tags) for run in first] == [
        (run.id, run.status, run.tags) for run in second
    ]
    assert caplog.records == []


async def test_runs_that_failed_in_the_carrier_outage_have_a_cause(store: MemoryStore) -> None:
    snapshot = await store.load("order-1121")
    assert snapshot is not None
    record = snapshot["steps"]["ship"]
    assert record["ok"] is False
    assert record["attempts"] == 5
    assert "503 Service Unavailable" in str(record["cause"])
