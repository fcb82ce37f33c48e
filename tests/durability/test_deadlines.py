"""Deadlines: a run that has not ended in time fails, whatever it is doing."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import DeadlinePassed, InvalidArgument
from perdure.runtime.run import Run
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock, explore_crashes

MakeRuntime = Callable[..., Runtime]


@workflow("import", deadline="1h")
async def slow_import(step: Step) -> str:
    await step("start", lambda: "started")
    await step.sleep("long", "2h")
    return "imported"


async def test_a_suspended_run_fails_at_its_deadline(
    make_runtime: MakeRuntime, clock: TestClock
) -> None:
    """It wakes up for that, although its own wait ends later."""
    run = await make_runtime(slow_import).trigger(slow_import)
    assert run.deadline == clock.now() + timedelta(hours=1)
    await clock.advance("59m")
    assert await make_runtime(slow_import).sweep() == []
    await clock.advance("1m")
    (run,) = await make_runtime(slow_import).sweep()
    assert run.status == "failed"
    assert isinstance(run.error, DeadlinePassed)
    assert (run.error.run_id, run.error.deadline) == (run.id, run.deadline)


async def test_a_step_is_cut_off_at_the_deadline(store: MemoryStore, clock: TestClock) -> None:
    """It has not failed: it has no record."""
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")

    @workflow("hang", deadline="10s")
    async def hanging(step: Step) -> None:
        await step("hang", hang)

    runtime = Runtime(store, workflows=[hanging], clock=clock)
    task = asyncio.ensure_future(runtime.trigger(hanging))
    await clock.advance("10s")
    run = await task
    assert (run.status, run.history, ended) == ("failed", (), ["cancelled"])


async def test_a_run_that_ends_in_time_keeps_its_result(make_runtime: MakeRuntime) -> None:
    """The deadline costs no write."""

    @workflow("quick", deadline="1h")
    async def quick(step: Step) -> str:
        return await step("work", lambda: "done")

    run = await make_runtime(quick).trigger(quick)
    assert (run.status, run.output) == ("completed", "done")


async def test_the_time_in_the_queue_does_not_count(store: MemoryStore, clock: TestClock) -> None:
    """A deadline of a workflow counts from when a run is first driven, and then stays."""
    runtime = Runtime(store, workflows=[slow_import], clock=clock)
    await runtime.trigger(slow_import, run_id="r", wait=False)
    await clock.advance("5h")
    (run,) = await runtime.sweep()
    assert (run.status, run.deadline) == ("suspended", clock.now() + timedelta(hours=1))


@workflow("patient")
async def patient(step: Step) -> None:
    await step.wait_for_event("never", "never")


async def test_a_trigger_may_set_a_deadline(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """A duration from when the run is first driven, or a time, whatever the workflow says."""
    runtime = make_runtime(patient)
    noon = clock.now() + timedelta(hours=12)
    run = await runtime.trigger(patient, run_id="a", deadline=noon)
    assert run.deadline == noon
    run = await runtime.trigger(patient, run_id="b", deadline="2h")
    assert run.deadline == clock.now() + timedelta(hours=2)
    await clock.advance("2h")
    assert [(run.id, run.status) for run in await runtime.sweep()] == [("b", "failed")]


async def test_a_deadline_that_passed_in_the_queue_fails_the_run(
    store: MemoryStore, clock: TestClock
) -> None:
    """No step begins."""
    starts: list[str] = []

    @workflow("late")
    async def late(step: Step) -> None:
        await step("begin", starts.append, "begun")

    runtime = Runtime(store, workflows=[late], clock=clock)
    soon = clock.now() + timedelta(minutes=1)
    await runtime.trigger(late, wait=False, deadline=soon)
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert (run.status, starts) == ("failed", [])


async def test_a_retry_gets_a_new_deadline(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """Otherwise it would fail at once."""
    runtime = make_runtime(slow_import)
    await runtime.trigger(slow_import, run_id="r")
    await clock.advance("1h")
    await runtime.sweep()
    run: Run = await runtime.retry("r")
    assert (run.status, run.deadline) == ("suspended", clock.now() + timedelta(hours=1))


async def test_a_loop_keeps_its_deadline(make_runtime: MakeRuntime, clock: TestClock) -> None:
    """Continuing as new does not extend it."""

    @workflow("loop", deadline="1h")
    async def loop(step: Step, n: int) -> None:
        await step.sleep("pause", "25m")
        await step.continue_as_new(n + 1)

    run = await make_runtime(loop).trigger(loop, 1)
    for _ in range(3):
        await clock.advance("25m")
        (run,) = await make_runtime(loop).sweep() or [run]
    assert (run.status, run.payload) == ("failed", 3)


async def test_every_crash_leaves_the_same_outcome() -> None:
    """The deadline is durable with the first entry, and the run fails after it."""

    def failed(clean: Run, survived: Run) -> None:
        assert isinstance(clean.error, DeadlinePassed)
        assert isinstance(survived.error, DeadlinePassed)

    report = await explore_crashes(slow_import, compare=failed)
    assert report.crashes > 4


@pytest.mark.parametrize("deadline", [0, "soon", -1, True, "5000000d"])
def test_a_deadline_must_be_a_positive_duration(deadline: object) -> None:
    """Refused where it is written."""
    with pytest.raises(InvalidArgument, match="deadline"):
        workflow("x", deadline=deadline)  # type: ignore[arg-type]  # that is the point
