"""Runs that start at certain times."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import Cron, Runtime, Schedule, Step, Worker, sync, workflow
from perdure.errors import (
    InvalidArgument,
    InvalidCron,
    InvalidDuration,
    InvalidPayload,
    Refused,
    ScheduleConflict,
    ScheduleNotFound,
)
from perdure.stores import MemoryStore
from perdure.testing import TestClock

MIDNIGHT = datetime(2030, 1, 1, tzinfo=UTC)


@workflow("report")
async def report(step: Step, customer: str) -> str:
    day = step.scheduled_for
    assert day is not None
    return await step("write", f"{customer}: {{:%d %B}}".format, day)


@pytest.fixture
def runtime(clock: TestClock) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[report], clock=clock)


async def sweep(runtime: Runtime) -> None:
    """Do what a worker does when it looks for work."""
    while await runtime.sweep():
        pass


async def test_every_morning_at_nine(runtime: Runtime, clock: TestClock) -> None:
    """The run's id is the schedule's name and its time in UTC, and the run knows that time."""
    nine = Cron("0 9 * * *", tz="Europe/Berlin")
    schedule = await runtime.schedule("daily", report, "ana", every=nine)
    await clock.advance("2d8h")
    await sweep(runtime)
    assert await runtime.result("daily@2030-01-03T08:00:00Z") == "ana: 03 January"
    info = await schedule.get()
    assert info is not None
    assert info.next_at == datetime(2030, 1, 4, 8, tzinfo=UTC)
    assert info.missed == 2


async def test_schedules_are_listed_by_name(runtime: Runtime) -> None:
    await runtime.schedule("weekly", report, "bo", every="7d", tags={"team": "b"})
    await runtime.schedule("daily", report, "ana", every="1d")
    daily, weekly = await runtime.schedules()
    assert (daily.name, daily.payload, daily.next_at) == (
        "daily",
        "ana",
        MIDNIGHT + timedelta(days=1),
    )
    assert (weekly.schedule, weekly.tags) == (Schedule(every=timedelta(days=7)), {"team": "b"})


async def test_a_schedule_is_found_by_its_name(runtime: Runtime) -> None:
    await runtime.schedule("daily", report, "ana", every="1d")
    schedule = await runtime.get_schedule("daily")
    await schedule.delete()
    with pytest.raises(ScheduleNotFound, match=r"no schedule 'daily'"):
        await runtime.get_schedule("daily")
    with pytest.raises(ScheduleNotFound):
        await schedule.delete()


async def test_the_same_schedule_may_be_created_again(runtime: Runtime, clock: TestClock) -> None:
    """A program that creates it whenever it starts does not change it."""
    await runtime.schedule("daily", report, "ana", every="1d", tags={"a": "b"})
    await clock.advance("5h")
    schedule = await runtime.schedule("daily", report, "ana", every="24h", tags={"a": "b"})
    info = await schedule.get()
    assert info is not None
    assert info.next_at == MIDNIGHT + timedelta(days=1)


async def test_another_schedule_of_the_same_name_is_a_conflict(runtime: Runtime) -> None:
    await runtime.schedule("daily", report, "ana", every="1d")
    with pytest.raises(ScheduleConflict, match=r"its every, overlap, payload differ") as conflict:
        await runtime.schedule("daily", report, "bo", every="2d", overlap="allow")
    assert conflict.value.differences == ("every", "overlap", "payload")


async def test_pausing_is_an_act_with_a_reason(runtime: Runtime) -> None:
    schedule = await runtime.schedule("daily", report, "ana", every="1d")
    await schedule.pause(by="ana", why="holidays")
    info = await schedule.get()
    assert info is not None
    assert (info.paused, info.reason, info.next_at) == (True, "by ana: holidays", None)
    with pytest.raises(Refused, match="it is already paused"):
        await schedule.pause()
    await schedule.unpause(by="ana")
    info = await schedule.get()
    assert info is not None
    assert not info.paused


async def test_an_update_of_a_paused_schedule_leaves_it_paused(runtime: Runtime) -> None:
    schedule = await runtime.schedule("daily", report, "ana", every="1d")
    await schedule.pause(why="holidays")
    await schedule.update(every="2d", payload="bo", tags={"a": "b"})
    info = await schedule.get()
    assert info is not None
    assert (info.paused, info.payload, info.tags) == (True, "bo", {"a": "b"})
    assert info.schedule.every == timedelta(days=2)


async def test_a_run_by_hand_and_runs_for_the_past(runtime: Runtime, clock: TestClock) -> None:
    schedule = await runtime.schedule("daily", report, "ana", every=Cron("0 9 * * *"))
    now = await schedule.trigger()
    december = await schedule.backfill(MIDNIGHT - timedelta(days=31), MIDNIGHT)
    await sweep(runtime)
    assert await runtime.result(now) == "ana: 01 January"
    assert len(december) == 31
    assert await runtime.result(december[0]) == "ana: 01 December"


@workflow("cleanup", schedule=Schedule(every="1h"))
async def cleanup(step: Step) -> str:
    return "clean"


async def test_a_worker_creates_declared_schedules(clock: TestClock) -> None:
    runtime = Runtime(MemoryStore(clock=clock), workflows=[cleanup], clock=clock)
    async with Worker(runtime):
        await clock.advance("1h1m")
        assert await runtime.result("cleanup@2030-01-01T01:00:00Z") == "clean"


def cleanup_of(version: int, every: str) -> Any:
    @workflow("cleanup", version=version, schedule=Schedule(every=every))
    async def cleanup(step: Step) -> None: ...

    return cleanup


async def test_only_a_higher_version_updates_a_declared_schedule(clock: TestClock) -> None:
    """Two deployments at the same time do not overwrite it in turn."""
    store = MemoryStore(clock=clock)
    first = Runtime(store, workflows=[cleanup_of(1, "1h")], clock=clock)
    second = Runtime(store, workflows=[cleanup_of(2, "2h")], clock=clock)
    for runtime in (first, second, first, second):
        await runtime.declare_schedules()
    [info] = await first.schedules()
    assert (info.schedule.every, info.declared) == (timedelta(hours=2), 2)


async def test_a_change_without_a_higher_version_is_logged(
    clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(clock=clock)
    before = Runtime(store, workflows=[cleanup_of(1, "1h")], clock=clock)
    after = Runtime(store, workflows=[cleanup_of(1, "2h")], clock=clock)
    await before.declare_schedules()
    await after.declare_schedules()
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "stored with another every than version 1 of the workflow declares" in record.message
    [info] = await after.schedules()
    assert info.schedule.every == timedelta(hours=1)


async def test_an_invalid_schedule_is_refused_at_once(runtime: Runtime) -> None:
    """Nothing is written."""
    with pytest.raises(InvalidDuration, match="every"):
        await runtime.schedule("daily", report, "ana", every=0)
    with pytest.raises(InvalidCron, match="tz"):
        Cron("0 9 * * *", tz="Europe/Atlantis")
    with pytest.raises(InvalidArgument, match="No run would ever start"):
        await runtime.schedule("daily", report, "ana", every="1d", end_at=MIDNIGHT)
    with pytest.raises(InvalidPayload):
        await runtime.schedule("daily", "report", 5, every="1d")
    with pytest.raises(InvalidArgument, match=r"name: .*does not begin with '~'"):
        await runtime.schedule("~daily", report, "ana", every="1d")
    with pytest.raises(InvalidArgument, match="at most 200 characters"):
        await runtime.schedule("d" * 201, report, "ana", every="1d")
    assert await runtime.schedules() == []


def test_a_declared_schedule_has_the_name_of_its_workflow() -> None:
    with pytest.raises(InvalidArgument, match="at most 200 characters"):

        @workflow("w" * 201, schedule=Schedule(every="1h"))
        async def long_name(step: Step) -> None: ...


def test_a_declared_schedule_needs_no_payload() -> None:
    with pytest.raises(InvalidArgument, match=r"schedule: .*Give the payload a default"):

        @workflow("mail", schedule=Schedule(every="1h"))
        async def mail(step: Step, to: str) -> None: ...


async def test_what_a_backfill_refuses(runtime: Runtime) -> None:
    schedule = await runtime.schedule("daily", report, "ana", every="1s")
    with pytest.raises(InvalidArgument, match="end: expected a datetime in the past"):
        await schedule.backfill(MIDNIGHT, MIDNIGHT + timedelta(days=1))
    with pytest.raises(InvalidArgument, match="end: expected a datetime after start"):
        await schedule.backfill(MIDNIGHT, MIDNIGHT - timedelta(days=1))
    with pytest.raises(InvalidArgument, match="at most 10,000 times"):
        await schedule.backfill(MIDNIGHT - timedelta(days=1), MIDNIGHT)


async def test_a_program_may_create_a_schedule_again_after_its_end(
    runtime: Runtime, clock: TestClock
) -> None:
    tomorrow = MIDNIGHT + timedelta(days=1)
    await runtime.schedule("once", report, "ana", every="1d", end_at=tomorrow)
    await clock.advance("1d")
    await sweep(runtime)
    schedule = await runtime.schedule("once", report, "ana", every="1d", end_at=tomorrow)
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.next_at) == (1, None)
    with pytest.raises(InvalidArgument, match="No run would ever start"):
        await schedule.update(every="2d")


async def test_a_worker_starts_although_a_declared_schedule_has_ended(
    clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow("sale", schedule=Schedule(every="1h", end_at=MIDNIGHT))
    async def sale(step: Step) -> None: ...

    runtime = Runtime(MemoryStore(clock=clock), workflows=[sale], clock=clock)
    await runtime.declare_schedules()
    assert "schedule 'sale' is not created" in caplog.text


def test_schedules_without_an_event_loop(tmp_path: Path) -> None:
    with sync.Client(f"sqlite:///{tmp_path}/runs.db", workflows=[report]) as client:
        schedule = client.schedule("daily", report, "ana", every="1d")
        schedule.update(overlap="allow")
        schedule.pause(by="ana")
        [info] = client.schedules()
        assert (info.paused, info.schedule.overlap) == (True, "allow")
        client.get_schedule("daily").unpause(by="ana")
        assert schedule.trigger().status == "queued"
        schedule.delete()
        assert schedule.get() is None
