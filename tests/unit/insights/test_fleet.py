"""Workers, workflows, queues and charts."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Runtime
from perdure.codec import dumps
from perdure.errors import InvalidArgument
from perdure.insights.insights import Insights
from perdure.presence import (
    DefinitionDocument,
    Minute,
    Throughput,
    WorkflowSwitch,
    WorkflowThroughput,
    set_switch,
)
from perdure.presence.documents import write_definition, write_throughput
from perdure.snapshot import new_snapshot
from perdure.store import LeaseRequest, NewRun, SearchStore, require_schedule
from perdure.stores._shell import StoreShell
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker, order, order_v2

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> TestClock:
    return TestClock(NOON)


@pytest.fixture
def insights(store: SearchStore, clock: TestClock) -> Insights:
    return Insights(store, clock=clock)


def throughput(worker: str, hour: datetime = NOON, **facts: object) -> Throughput:
    defaults = {"host": "ops", "pid": 7, "started_at": hour, "seen_at": hour}
    return Throughput(worker=worker, hour=hour, **{**defaults, **facts})  # type: ignore[arg-type]  # any field


async def test_a_worker_that_disappeared_is_lost_for_a_day(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    """One that stopped cleanly is not, and neither is one that lives."""
    await write_throughput(store, throughput("lost"))
    await write_throughput(store, throughput("stopped", stopped=True))
    await write_throughput(store, throughput("w-1"))
    await live_worker(store, clock.now(), "w-1")
    assert [(each.id, each.state) for each in await insights.workers()] == [
        ("w-1", "live"),
        ("lost", "lost"),
    ]
    await clock.advance("25h")
    assert await insights.workers() == ()


async def test_a_lost_worker_is_shown_with_the_runs_that_it_still_owns(
    store: StoreShell[Any], insights: Insights
) -> None:
    await write_throughput(store, throughput("lost", owner="lost"))
    await store.enqueue([NewRun("r", "order", dumps(new_snapshot("order", now=NOON)))])
    await store.acquire([LeaseRequest("r", "lost", timedelta(minutes=1))])
    worker = await insights.worker("lost")
    assert worker is not None
    assert [run.id for run in worker.owned] == ["r"]


async def test_one_worker(store: SearchStore, insights: Insights, clock: TestClock) -> None:
    await live_worker(store, clock.now(), "w-1")
    worker = await insights.worker("w-1")
    assert worker is not None
    assert worker.state == "live"
    assert await insights.worker("w-2") is None


async def test_a_workflow_that_has_runs_but_no_worker(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    runtime = Runtime(store, workflows=[order, order_v2], clock=clock, suspend_after=0)
    await runtime.trigger(order, {"does": "fail"}, run_id="failed")
    await runtime.trigger(order_v2, {"does": "sleep"}, run_id="sleeps")
    [row] = await insights.workflows()
    assert (row.name, row.workers) == ("order", ())
    assert row.counts["failed"].count == 1
    single = await insights.workflow("order")
    assert single is not None
    assert replace(single, durations_by_hour=()) == row
    assert await insights.workflow("unknown") is None


async def test_live_runs_are_counted_by_version(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    old = Runtime(store, workflows=[order], clock=clock, suspend_after=0)
    await old.trigger(order, {"does": "sleep"}, run_id="old")
    await old.trigger(order, {}, run_id="over")
    new = Runtime(store, workflows=[order_v2], clock=clock, suspend_after=0)
    await new.trigger(order_v2, {}, run_id="new", wait=False)
    row = await insights.workflow("order")
    assert row is not None
    assert row.versions == {1: 1, 2: 1}


async def test_a_paused_workflow_says_why(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    """The reason is redacted like any other text."""
    why = "see https://ana:hunter2@wiki"
    await set_switch(store, WorkflowSwitch("order", True, "ana", why, clock.now()))
    [row] = await insights.workflows()
    assert row.paused
    assert "hunter2" not in row.paused_reason
    assert "wiki" in row.paused_reason


async def test_a_workflow_that_a_worker_knows(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    schema = {"type": "object"}
    document = DefinitionDocument(
        workflow="order", version=2, seen_at=NOON, payload_schema=schema, doc="Ship it."
    )
    await write_definition(store, document)
    await live_worker(store, clock.now(), "w-1")
    row = await insights.workflow("order")
    assert row is not None
    assert row.workers == ("w-1",)
    assert [(each.version, each.payload_schema, each.doc) for each in row.definitions] == [
        (2, schema, "Ship it.")
    ]


async def test_all_percentiles_of_one_duration_are_the_same(
    store: SearchStore, insights: Insights
) -> None:
    counted = WorkflowThroughput(completed=1, durations=(0, 0, 1))
    await write_throughput(store, throughput("w", workflows={"order": counted}))
    await write_definition(store, DefinitionDocument(workflow="order", version=1, seen_at=NOON))
    [row] = await insights.workflows()
    assert row.durations is not None
    assert row.durations.p50 == row.durations.p95 == row.durations.p99 == timedelta(milliseconds=6)


async def test_durations_of_several_workers_are_added(
    store: SearchStore, insights: Insights
) -> None:
    counted = WorkflowThroughput(completed=2, durations=(0, 2), steps={"ship": (1,)})
    for worker in ("w-1", "w-2"):
        await write_throughput(store, throughput(worker, workflows={"order": counted}))
    await set_switch(store, WorkflowSwitch("order", True, "ana", "", NOON))
    row = await insights.workflow("order")
    assert row is not None
    assert row.durations is not None
    assert (row.durations.count, row.durations.p50) == (4, timedelta(milliseconds=3))
    assert row.steps["ship"].count == 2
    assert row.by_hour == (*[0] * 23, 4)


async def test_queues_with_their_due_runs(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    """All keys of a queue are one row."""
    snapshot = dumps(new_snapshot("order", now=NOON))
    queues = ("", "emails/a", "emails/b", "emails/b", "other")
    runs = [NewRun(f"run-{n}", "order", snapshot, queue=name) for n, name in enumerate(queues)]
    await require_schedule(store).enqueue(runs)
    await clock.advance(5)
    rows = await insights.queues()
    assert [(row.name, row.due, row.capped) for row in rows] == [
        ("", 1, False),
        ("emails", 3, False),
        ("other", 1, False),
    ]
    assert all(row.oldest_due is not None and row.oldest_due <= clock.now() for row in rows)


async def test_the_history_of_an_hour(
    store: SearchStore, insights: Insights, clock: TestClock
) -> None:
    """A minute in which no worker reported is a gap, not zero."""
    minutes = (Minute(0, 10, 3, 1, 0, 5, {"": 7}), Minute(2, 10))
    await write_throughput(store, throughput("w-1", minutes=minutes))
    await write_throughput(store, throughput("w-2", minutes=(Minute(0, 10, 2, depths={"": 6}),)))
    await clock.advance("4m")
    history = await insights.history("1h")
    points = {point.at: point for point in history.points}
    first = points[NOON]
    assert (len(points), history.step) == (60, timedelta(minutes=1))
    assert (first.completed, first.failed, first.slots, first.running) == (5, 1, 20, 5)
    assert first.depths == {"": 7}
    assert points[NOON + timedelta(minutes=1)].completed is None
    assert points[NOON + timedelta(minutes=2)].completed == 0
    assert max(points) == NOON + timedelta(minutes=3)


@pytest.mark.parametrize(("window", "points"), [("1h", 60), ("6h", 72), ("24h", 96), ("48h", 96)])
async def test_every_minute_of_a_window_is_in_one_point(
    store: SearchStore, insights: Insights, clock: TestClock, window: str, points: int
) -> None:
    for n in range(3):
        minutes = tuple(Minute(minute, 1, 1) for minute in range(60))
        await write_throughput(store, throughput("w", NOON - timedelta(hours=n), minutes=minutes))
    await clock.advance("1h")
    history = await insights.history(window)
    assert len(history.points) == points
    assert sum(point.completed or 0 for point in history.points) == (60 if window == "1h" else 180)


async def test_another_window_is_refused(insights: Insights) -> None:
    with pytest.raises(InvalidArgument, match="48h"):
        await insights.history("2h")


async def test_a_lost_worker_needs_attention(store: SearchStore, insights: Insights) -> None:
    await write_throughput(store, throughput("gone", owner="o-1"))
    overview = await insights.overview()
    assert any("gone" in each.text for each in overview.attention)
