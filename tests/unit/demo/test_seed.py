"""The seeded history of the sample shop."""

from typing import get_args

import pytest

from perdure.demo.history import SEEDED_TIME, seed
from perdure.snapshot import RunStatus
from perdure.store import RunSummary
from perdure.stores import MemoryStore
from perdure.testing import TestClock


async def seeded() -> list[RunSummary]:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await seed(store, clock)
    return list(await store.list(limit=1000))


async def test_every_status_occurs() -> None:
    assert {run.status for run in await seeded()} == {*get_args(RunStatus)}


async def test_it_is_the_same_each_time() -> None:
    first, second = await seeded(), await seeded()
    assert [(run.id, run.status, run.tags) for run in first] == [
        (run.id, run.status, run.tags) for run in second
    ]


async def test_the_clock_is_advanced_by_the_seeded_time() -> None:
    clock = TestClock()
    before = clock.now()
    await seed(MemoryStore(clock=clock), clock)
    assert clock.now() - before == SEEDED_TIME


async def test_runs_that_failed_in_the_carrier_outage_have_a_cause() -> None:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    await seed(store, clock)
    snapshot = await store.load("order-1121")
    assert snapshot is not None
    record = snapshot["steps"]["ship"]
    assert record["ok"] is False
    assert record["attempts"] == 5
    assert "503 Service Unavailable" in str(record["cause"])


async def test_runs_that_fail_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    await seeded()
    assert caplog.records == []
