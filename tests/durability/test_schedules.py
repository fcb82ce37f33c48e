"""Schedules: each nominal time starts one run, whatever happens to workers and stores."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Cron, Queue, Runtime, Schedule, Step, workflow
from perdure.errors import InvalidArgument, ScheduleConflict
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.store import Grant, LeaseRequest
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock
from tests.durability.conftest import MakeRuntime

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@workflow("report")
async def report(step: Step) -> str:
    await step("write", str, step.run_id)
    return str(step.scheduled_for)


@workflow("slow")
async def slow(step: Step) -> None:
    await step.wait_for_event("end", "end")


async def sweep(runtime: Runtime) -> None:
    while await runtime.sweep():
        pass


async def runs_of(runtime: Runtime, name: str) -> list[str]:
    return sorted(run.id for run in await runtime.list_runs(prefix=f"{name}@"))


async def test_a_run_starts_at_each_time(make_runtime: MakeRuntime, clock: TestClock) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("hourly", report, every="1h")
    for _ in range(3):
        await clock.advance("1h")
        await sweep(runtime)
    assert await runs_of(runtime, "hourly") == [
        "hourly@2030-01-01T01:00:00Z",
        "hourly@2030-01-01T02:00:00Z",
        "hourly@2030-01-01T03:00:00Z",
    ]
    run = await runtime.get_run("hourly@2030-01-01T02:00:00Z")
    assert run is not None
    assert (run.status, run.output) == ("completed", "2030-01-01 02:00:00+00:00")
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.missed, info.next_at) == (3, 0, BEGIN + HOUR * 4)


async def test_a_run_has_the_tags_and_the_payload_of_its_schedule(
    make_runtime: MakeRuntime, clock: TestClock, store: MemoryStore
) -> None:
    runtime = make_runtime(greet)
    await runtime.schedule("greet", greet, "ana", every="1h", tags={"team": "a"})
    await clock.advance("1h")
    await sweep(runtime)
    [run] = await runtime.list_runs(tags={"team": "a"})
    assert run.tags == ("team=a", "~schedule=greet")
    assert (await runtime.result(run.id)) == "hello ana"


@workflow("greet")
async def greet(step: Step, name: str) -> str:
    return f"hello {name}"


async def test_times_are_computed_from_the_last_one_not_from_now(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """A worker that is always late does not shift the schedule."""
    runtime = make_runtime(report)
    await runtime.schedule("hourly", report, every="1h")
    for _ in range(3):
        await clock.advance("67m")
        await sweep(runtime)
    assert [id[-9:] for id in await runs_of(runtime, "hourly")] == [
        "01:00:00Z",
        "02:00:00Z",
        "03:00:00Z",
    ]


async def test_missed_times_are_counted_and_the_rest_is_caught_up(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("hourly", report, every="1h", catch_up="90m", overlap="allow")
    await clock.advance("10h10m")
    await sweep(runtime)
    assert len(await runs_of(runtime, "hourly")) == 2
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.missed, info.last_at) == (2, 8, BEGIN + HOUR * 10)


@pytest.mark.parametrize(
    ("overlap", "started", "skipped", "buffered"),
    [("skip", 1, 2, 0), ("buffer_one", 1, 1, 1), ("buffer_all", 1, 0, 2), ("allow", 3, 0, 0)],
)
async def test_overlap_decides_what_happens_while_a_run_is_open(
    make_runtime: MakeRuntime,
    clock: TestClock,
    overlap: Any,
    started: int,
    skipped: int,
    buffered: int,
) -> None:
    runtime = make_runtime(slow)
    schedule = await runtime.schedule("slow", slow, every="1h", overlap=overlap)
    for _ in range(3):
        await clock.advance("1h")
        await sweep(runtime)
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.skipped, info.buffered) == (started, skipped, buffered)
    assert len(info.open) == len(await runs_of(runtime, "slow")) == started


async def test_a_buffered_run_starts_when_the_open_one_ends(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """At once, not at the next time; in order."""
    runtime = make_runtime(slow)
    schedule = await runtime.schedule("slow", slow, every="1h", overlap="buffer_all")
    for _ in range(3):
        await clock.advance("1h")
        await sweep(runtime)
    for hour in (1, 2, 3):
        info = await schedule.get()
        assert info is not None
        assert info.open == (f"slow@2030-01-01T0{hour}:00:00Z",)
        await runtime.signal(info.open[0], "end")
        await sweep(runtime)
    assert [run.status for run in await runtime.list_runs(prefix="slow@")] == ["completed"] * 3
    assert clock.now() == BEGIN + HOUR * 3


async def test_an_open_run_is_cancelled(make_runtime: MakeRuntime, clock: TestClock) -> None:
    runtime = make_runtime(slow)
    await runtime.schedule("slow", slow, every="1h", overlap="cancel")
    for _ in range(2):
        await clock.advance("1h")
        await sweep(runtime)
    statuses = {run.id[-9:]: run.status for run in await runtime.list_runs(prefix="slow@")}
    assert statuses == {"01:00:00Z": "cancelled", "02:00:00Z": "waiting"}


@workflow("broken")
async def broken(step: Step) -> None:
    raise ValueError("no paper")


async def test_a_failed_run_pauses_its_schedule(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(broken)
    schedule = await runtime.schedule("broken", broken, every="1h", on_failure="pause")
    for _ in range(3):
        await clock.advance("1h")
        await sweep(runtime)
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.status, info.next_at) == (1, "paused", None)
    assert info.reason == "the run of 2030-01-01 01:00:00+00:00 failed"


async def test_a_paused_schedule_starts_nothing_and_catches_nothing_up(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("hourly", report, every="1h", catch_up="1d")
    await schedule.pause(by="ana", why="holidays")
    await clock.advance("5h30m")
    await sweep(runtime)
    assert await runs_of(runtime, "hourly") == []
    await schedule.unpause(by="ana")
    await sweep(runtime)
    assert await runs_of(runtime, "hourly") == []
    await clock.advance("30m")
    await sweep(runtime)
    assert await runs_of(runtime, "hourly") == ["hourly@2030-01-01T06:00:00Z"]
    info = await schedule.get()
    assert info is not None
    assert info.missed == 0


async def test_a_deleted_schedule_starts_nothing_more_and_its_runs_continue(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(slow)
    schedule = await runtime.schedule("slow", slow, every="1h", overlap="buffer_one")
    await clock.advance("1h")
    await sweep(runtime)
    await schedule.delete()
    await clock.advance("3h")
    await sweep(runtime)
    [run_id] = await runs_of(runtime, "slow")
    run = (await runtime.signal(run_id, "end")).run
    assert run is not None
    assert (run.status, await schedule.get()) == ("completed", None)


async def test_a_schedule_ends_after_its_last_time_and_can_be_extended(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("h", report, every="1h", end_at=BEGIN + HOUR)
    await clock.advance("5h")
    await sweep(runtime)
    info = await schedule.get()
    assert info is not None
    assert (info.started + info.missed, info.next_times) == (1, ())
    await schedule.update(end_at=None)
    await clock.advance("1h")
    await sweep(runtime)
    assert await runs_of(runtime, "h") == ["h@2030-01-01T06:00:00Z"]


async def test_an_update_applies_from_now_on(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """Times of the new schedule that are past are not caught up, and the payload is kept."""
    runtime = make_runtime(greet)
    schedule = await runtime.schedule("greet", greet, "ana", every="1d", catch_up="1d")
    await clock.advance("10h")
    await schedule.update(every="1h", overlap="allow")
    await sweep(runtime)
    assert await runs_of(runtime, "greet") == []
    await clock.advance("1h")
    await sweep(runtime)
    [run_id] = await runs_of(runtime, "greet")
    assert (run_id, await runtime.result(run_id)) == ("greet@2030-01-01T11:00:00Z", "hello ana")


async def test_an_update_of_the_payload_keeps_the_times(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(greet)
    schedule = await runtime.schedule("greet", greet, "ana", every="1h")
    await clock.advance("1h")
    await schedule.update(payload="bo")
    await sweep(runtime)
    [run_id] = await runs_of(runtime, "greet")
    assert (run_id, await runtime.result(run_id)) == ("greet@2030-01-01T01:00:00Z", "hello bo")


async def test_backfill_and_schedule_start_each_time_once(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("h", report, every="1h", overlap="allow")
    await clock.advance("2h")
    await sweep(runtime)
    runs = await schedule.backfill(BEGIN - HOUR, BEGIN + HOUR * 2)
    assert [run.id[-9:-4] for run in runs] == ["23:00", "00:00", "01:00", "02:00"]
    assert [run.status for run in runs] == ["queued", "queued", "completed", "completed"]
    assert [run.id for run in await schedule.backfill(BEGIN, BEGIN)] == [runs[1].id]


async def test_a_schedule_started_by_hand(make_runtime: MakeRuntime, clock: TestClock) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("h", report, every="1h")
    await clock.advance("7m")
    run = await schedule.trigger()
    await sweep(runtime)
    assert run.id == "h@2030-01-01T00:07:00Z"
    assert await runtime.result(run) == "2030-01-01 00:07:00+00:00"


async def test_a_name_may_contain_anything(make_runtime: MakeRuntime, clock: TestClock) -> None:
    runtime = make_runtime(report)
    names = ["a'b\"c/d", "🕰@:", "x" * 200]
    for name in names:
        await runtime.schedule(name, report, every=Cron("0 * * * *"))
    await clock.advance("1h")
    await sweep(runtime)
    for name in names:
        assert await runs_of(runtime, name) == [f"{name}@2030-01-01T01:00:00Z"]


async def test_listeners_and_lists_do_not_see_the_run_of_a_schedule(
    store: MemoryStore, clock: TestClock
) -> None:
    events: list[Any] = []
    runtime = Runtime(store, workflows=[report], clock=clock, on_event=events.append)
    await runtime.schedule("h", report, every="1h")
    await clock.advance("1h")
    await sweep(runtime)
    await runtime.flush()
    assert {event.workflow for event in events} == {"report"}
    assert {run.workflow for run in await runtime.list_runs()} == {"report"}
    assert runtime.registry.names == ["report"]


async def test_operators_pause_the_run_of_a_schedule(
    make_runtime: MakeRuntime, clock: TestClock, store: MemoryStore
) -> None:
    """It is a run like any other, so the acts are recorded with it."""
    runtime = make_runtime(report)
    await runtime.schedule("h", report, every="1h", catch_up="1d")
    operations = Operations(store, clock=clock)
    await operations.pause("~schedule:h", by="ana", why="holidays")
    await clock.advance("3h30m")
    await sweep(runtime)
    await operations.unpause("~schedule:h", by="bo")
    await clock.advance("30m")
    await sweep(runtime)
    assert await runs_of(runtime, "h") == ["h@2030-01-01T04:00:00Z"]
    acts = (await Insights(store, clock=clock).acts('"~schedule:h"')).acts
    assert [(act.by, act.verb) for act in acts] == [("bo", "unpause"), ("ana", "pause")]


async def test_a_store_that_cannot_be_searched_has_schedules_too(
    make_runtime: MakeRuntime, clock: TestClock, store: MemoryStore
) -> None:
    plain = FaultyStore(store)
    plain.capabilities = replace(plain.capabilities, search=False)
    runtime = make_runtime(slow, on=plain)
    schedule = await runtime.schedule("slow", slow, every="1h")
    for _ in range(3):
        await clock.advance("1h")
        await sweep(runtime)
    await runtime.signal("slow@2030-01-01T01:00:00Z", "end")
    await clock.advance("1h")
    await sweep(runtime)
    info = await schedule.get()
    assert info is not None
    assert (info.started, info.skipped) == (2, 2)
    assert info.open == ("slow@2030-01-01T04:00:00Z",)


async def test_runs_with_large_payloads_start_in_several_writes(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(greet)
    name = "x" * 300_000
    await runtime.schedule("greet", greet, name, every="1h", catch_up="1d", overlap="allow")
    await clock.advance("10h")
    await sweep(runtime)
    assert len(await runs_of(runtime, "greet")) == 10


@workflow("email", queue=Queue("emails", concurrency=1), key=lambda to: to, priority=2)
async def email(step: Step, to: str) -> str:
    return f"email to {to}"


async def test_the_runs_of_a_schedule_are_in_the_queue_of_their_workflow(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """Even if the process that starts them does not know the workflow."""
    runtime, stranger = make_runtime(email), make_runtime(report)
    await runtime.schedule("email", email, "ana", every="1h")
    await clock.advance("1h")
    await sweep(stranger)
    [run] = await runtime.list_runs(prefix="email@")
    assert run.queue == "emails/ana"
    await sweep(runtime)
    assert await runtime.result(run.id) == "email to ana"


async def test_a_user_cannot_start_the_workflow_of_schedules(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(report)
    with pytest.raises(InvalidArgument, match=r"workflow: .*does not begin with '~'"):
        await runtime.trigger("~schedule", {}, wait=False)
    with pytest.raises(InvalidArgument, match=r"workflow: .*does not begin with '~'"):
        await runtime.schedule("s", "~schedule", {}, every="1h")


async def test_a_time_costs_four_writes(store: MemoryStore, clock: TestClock) -> None:
    """The lease, the decision, the new run, and the rest until the next time."""
    counted = FaultyStore(store)
    await Runtime(counted, clock=clock).schedule("h", "report", every="1h")
    await clock.advance("1h")
    counted.calls.clear()
    await Runtime(counted, clock=clock).sweep()
    calls = [call.verb for call in counted.calls]
    assert calls == ["due", "acquire", "append", "enqueue", "append"]


async def test_a_schedule_that_was_cancelled_is_revived_by_an_update(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    runtime = make_runtime(report)
    schedule = await runtime.schedule("h", report, every="1h", catch_up="1d")
    await runtime.cancel("~schedule:h")
    await clock.advance("3h")
    with pytest.raises(ScheduleConflict, match="its status differ"):
        await runtime.schedule("h", report, every="1h", catch_up="1d")
    await schedule.update()
    await sweep(runtime)
    assert await runs_of(runtime, "h") == []
    await clock.advance("1h")
    await sweep(runtime)
    assert await runs_of(runtime, "h") == ["h@2030-01-01T04:00:00Z"]


async def after_a_lease(store: MemoryStore, clock: TestClock, *changes: Any) -> None:
    """Begin changes of the schedule "h" while it is owned, so that all of them read it first."""
    [grant] = await store.acquire([LeaseRequest("~schedule:h", "worker", HOUR)])
    assert isinstance(grant, Grant)
    tasks = [asyncio.ensure_future(change) for change in changes]
    await clock.advance("1ms")
    await store.release([grant.lease])
    while not all(task.done() for task in tasks):
        await clock.advance("50ms")
    await asyncio.gather(*tasks)


async def test_updates_at_the_same_time_are_all_kept(store: MemoryStore, clock: TestClock) -> None:
    runtime = Runtime(store, workflows=[report], clock=clock)
    schedule = await runtime.schedule("h", report, every="1h")
    updates = (schedule.update(jitter="5m"), schedule.update(overlap="allow"))
    await after_a_lease(store, clock, *updates)
    info = await schedule.get()
    assert info is not None
    assert (info.schedule.jitter, info.schedule.overlap) == (timedelta(minutes=5), "allow")


def declared(version: int, every: str, **options: Any) -> Any:
    @workflow("h", version=version, schedule=Schedule(every=every), **options)
    async def h(step: Step) -> None: ...

    return h


async def test_an_older_version_never_overwrites_a_newer_one(
    store: MemoryStore, clock: TestClock
) -> None:
    """Both have found the schedule of a still older version, and wait for its lease."""
    first, second, third = (
        Runtime(store, workflows=[declared(n, f"{n}h")], clock=clock) for n in (1, 2, 3)
    )
    await first.declare_schedules()
    await after_a_lease(store, clock, third.declare_schedules(), second.declare_schedules())
    [info] = await first.schedules()
    assert (info.schedule.every, info.declared) == (3 * HOUR, 3)


async def test_a_higher_version_moves_its_schedule_to_another_queue(
    store: MemoryStore, clock: TestClock
) -> None:
    plain = Runtime(store, workflows=[declared(1, "1h")], clock=clock)
    queued = Runtime(store, workflows=[declared(2, "1h", queue=Queue("reports"))], clock=clock)
    await plain.declare_schedules()
    await queued.declare_schedules()
    await clock.advance("1h")
    await sweep(queued)
    [run] = await queued.list_runs(prefix="h@")
    assert run.queue == "reports"
