"""Schedules, and the state of their runs."""

from datetime import UTC, datetime

import pytest

from perdure import Cron, Runtime, Step, workflow
from perdure.insights import MASK, Insights
from perdure.operations import Operations
from perdure.store import NewRun
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker
from tests.unit.insights.samples import new_snapshot_json


@workflow("report")
async def report(step: Step, payload: dict[str, str]) -> None:
    """Wait for the day's numbers."""
    await step.wait_for_event("numbers", "numbers")


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
async def runtime(store: MemoryStore, clock: TestClock) -> Runtime:
    """Return a runtime with one schedule."""
    runtime = Runtime(store, workflows=[report], clock=clock, suspend_after=0)
    nine = Cron("0 9 * * *", tz="Europe/Berlin")
    await runtime.schedule("daily", report, {"api_key": "s3cret"}, every=nine, tags={"team": "a"})
    return runtime


async def sweep(runtime: Runtime) -> None:
    while await runtime.sweep():
        pass


async def test_a_schedule_with_its_next_times(runtime: Runtime, store: MemoryStore) -> None:
    [row] = await Insights(store).schedules()
    assert (row.name, row.workflow, row.every, row.tz) == (
        "daily",
        "report",
        "0 9 * * *",
        "Europe/Berlin",
    )
    assert row.next_times[0] == datetime(2030, 1, 1, 8, tzinfo=UTC)
    assert (row.payload, row.tags) == ({"api_key": MASK}, {"team": "a"})


async def test_a_schedule_names_its_open_runs(
    runtime: Runtime, store: MemoryStore, clock: TestClock
) -> None:
    await clock.advance("8h")
    await sweep(runtime)
    row = await Insights(store).schedule("daily")
    assert row is not None
    assert (row.started, row.open) == (1, ("daily@2030-01-01T08:00:00Z",))
    facts = await Insights(store, clock=clock).run(row.open[0])
    assert (facts.schedule, facts.run.tags) == ("daily", {"team": "a"})


async def test_the_runs_of_a_schedule_are_found(
    runtime: Runtime, store: MemoryStore, clock: TestClock
) -> None:
    await clock.advance("8h")
    await sweep(runtime)
    page = await Insights(store, clock=clock).runs("schedule:daily")
    assert [row.id for row in page.runs] == ["daily@2030-01-01T08:00:00Z"]


async def test_an_interval_is_shown_as_a_duration(runtime: Runtime, store: MemoryStore) -> None:
    await runtime.schedule("often", report, {}, every="90m")
    row = await Insights(store).schedule("often")
    assert row is not None
    assert (row.every, row.tz) == ("1 h 30 min", "")


async def test_a_schedule_that_does_not_exist(store: MemoryStore) -> None:
    assert await Insights(store).schedule("nope") is None
    assert await Insights(store).schedules() == ()


async def test_a_schedule_that_cannot_be_read_hides_no_other(
    runtime: Runtime, store: MemoryStore
) -> None:
    await store.enqueue([NewRun("~schedule:odd", "~schedule", new_snapshot_json("~schedule"))])
    assert [row.name for row in await Insights(store).schedules()] == ["daily"]


async def test_why_a_schedule_waits(runtime: Runtime, store: MemoryStore, clock: TestClock) -> None:
    sentence = 'Scheduled: the next run of workflow "report" starts at 08:00 UTC, in 8 h.'
    assert (await Insights(store, clock=clock).why("~schedule:daily")).sentence == sentence


async def test_why_a_schedule_is_paused(
    runtime: Runtime, store: MemoryStore, clock: TestClock
) -> None:
    await Operations(store, clock=clock).pause("~schedule:daily", by="ana", why="holidays")
    why = await Insights(store, clock=clock).why("~schedule:daily")
    assert why.sentence == 'Paused by ana 0 ms ago: "holidays".'


async def test_why_a_schedule_that_is_due_does_nothing(
    runtime: Runtime, store: MemoryStore, clock: TestClock
) -> None:
    await clock.advance("8h1m")
    await live_worker(store, clock.now())
    why = await Insights(store, clock=clock).why("~schedule:daily")
    assert why.situation == "no_worker"
