"""Repairing runs: each verb is one recorded change, and a worker continues."""

from datetime import timedelta

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import Refused, ScheduleNotFound
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.store import require_search
from perdure.stores import MemoryStore
from perdure.testing import TestClock


class CarrierDown(Exception):
    """The carrier does not answer."""


async def ship(order: str) -> str:
    raise CarrierDown("503")


@workflow("order")
async def order(step: Step) -> str:
    await step("charge", lambda: "receipt 17")
    parcel = await step("ship", ship, "42")
    await step.sleep("settle", "7 days")
    return parcel


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def runtime(clock: TestClock) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)


@pytest.fixture
def operations(runtime: Runtime, clock: TestClock) -> Operations:
    return Operations(runtime.store, clock=clock)


async def test_a_failed_step_can_be_completed_by_hand(
    runtime: Runtime, operations: Operations
) -> None:
    failed = await runtime.trigger(order)
    await operations.complete_step(failed.id, "ship", "parcel 7", by="ana", why="ticket 4411")
    [run] = await runtime.sweep()
    assert [step.value for step in run.history] == ["receipt 17", "parcel 7"]


async def test_the_run_says_who_changed_it(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    failed = await runtime.trigger(order)
    await operations.skip_step(failed.id, "ship", by="ana", why="picked up in person")
    [act] = (await Insights(runtime.store, clock=clock).run(failed.id)).acts
    assert (act.by, act.verb, act.step, act.why) == (
        "ana",
        "skip_step",
        "ship",
        "picked up in person",
    )


async def test_a_sleep_can_be_ended_now(runtime: Runtime, operations: Operations) -> None:
    failed = await runtime.trigger(order)
    await operations.complete_step(failed.id, "ship", "parcel 7", by="ana")
    await runtime.sweep()
    await operations.wake(failed.id, by="ana", why="the customer asked")
    [run] = await runtime.sweep()
    assert run.output == "parcel 7"


async def test_a_fork_tries_again_from_a_step(runtime: Runtime, operations: Operations) -> None:
    failed = await runtime.trigger(order)
    fork = await operations.fork(failed.id, "ship", new_id="second-try", by="ana")
    assert fork.sentence == "Forked as second-try. 1 record kept, 1 left out."


async def test_a_verb_that_does_not_fit_is_refused(
    runtime: Runtime, operations: Operations
) -> None:
    failed = await runtime.trigger(order, run_id="order-1")
    with pytest.raises(Refused, match="pause was refused for run 'order-1': it is failed"):
        await operations.pause(failed.id, by="ana")


async def test_all_runs_of_a_query_are_retried(runtime: Runtime, operations: Operations) -> None:
    for number in range(3):
        await runtime.trigger(order, run_id=f"order-{number}")
    bulk = operations.bulk("status:failed error:CarrierDown", "retry", by="ana")
    progress = [each async for each in bulk][-1]
    assert (progress.done, progress.refused) == (3, 0)


async def test_a_schedule_is_paused_triggered_and_backfilled(clock: TestClock) -> None:
    """Runs that an operator starts record the operator's name; so does the schedule's own run."""
    runtime = Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)
    await runtime.schedule("nightly", order, every="1d")
    operations = Operations(runtime.store, clock=clock)
    await operations.pause_schedule("nightly", by="ana", why="stocktaking")
    [schedule] = await runtime.schedules()
    assert schedule.paused

    triggered = await operations.trigger_schedule("nightly", by="ana", why="asked for")
    facts = await Insights(runtime.store, clock=clock).run(triggered.run_id)
    assert [(act.verb, act.by) for act in facts.acts] == [("trigger_schedule", "ana")]

    now = clock.now()
    outcome = await operations.backfill_schedule("nightly", now - timedelta(days=3), now, by="ana")
    assert outcome.sentence == "Schedule nightly has 4 runs in this period."
    await operations.unpause_schedule("nightly", by="ana")
    await operations.delete_schedule("nightly", by="ana", why="replaced")
    assert await runtime.schedules() == []
    with pytest.raises(ScheduleNotFound):
        await operations.pause_schedule("nightly", by="ana")


async def test_runs_are_copied_to_another_store(runtime: Runtime, clock: TestClock) -> None:
    """The same call continues an interrupted copy: existing runs are left alone."""
    await runtime.trigger(order, run_id="order-1")
    other = MemoryStore(clock=clock)
    for copied, existing in ((1, 0), (0, 1)):
        steps = Operations(other, clock=clock).copy_from(runtime.store, by="ana", why="moving")
        progress = [each async for each in steps][-1]
        assert (progress.copied, progress.existing) == (copied, existing)
    run = await Runtime(other, workflows=[order], clock=clock).get_run("order-1")
    assert run is not None
    assert (run.status, run.history[0].value) == ("failed", "receipt 17")


async def test_a_query_is_saved_for_everyone(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    """In a query, `view:` and the name stand for the saved query."""
    await runtime.trigger(order, run_id="order-1")
    await operations.save_view("unshipped", "status:failed step:ship", by="ana")
    insights = Insights(runtime.store, clock=clock)
    assert [view.query for view in await insights.views()] == ["status:failed step:ship"]
    page = await insights.runs("view:unshipped workflow:order")
    assert [run.id for run in page.runs] == ["order-1"]


async def test_a_lost_entry_of_the_audit_trail_is_restored(
    runtime: Runtime, operations: Operations, clock: TestClock
) -> None:
    """A process that dies after a change leaves the act in the run, but not its copy."""
    await runtime.trigger(order, run_id="order-1")
    await operations.retry("order-1", by="ana", why="carrier is back")
    documents = require_search(runtime.store, "the test").documents
    for key in await documents.keys("act:*"):
        await documents.delete(key)
    assert await operations.restore_acts() == 1
    [act] = (await Insights(runtime.store, clock=clock).acts()).acts
    assert (act.run_id, act.by, act.why) == ("order-1", "ana", "carrier is back")
