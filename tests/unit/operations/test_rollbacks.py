"""What operators see of a rollback, and what they can do about it."""

from datetime import timedelta

import pytest

from perdure import Retry, Runtime, Step, workflow
from perdure.errors import Refused
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.dashboard.visitor import Visitor, dashboard

undone: list[str] = []
down: set[str] = set()


class PaymentDeclined(Exception):
    pass


async def undo(name: str) -> None:
    if name in down:
        raise ConnectionError(f"{name} is down")
    undone.append(name)


async def decline() -> None:
    raise PaymentDeclined("no funds")


@workflow("trip")
async def trip(step: Step, fails: bool) -> None:
    async with step.saga("booking", undo_retry=Retry(2, delay="1h", max_delay="1h", jitter=False)):
        await step("room", lambda: "room", undo=undo)
        await step("seat", lambda: "seat", undo=undo)
    if fails:
        await step("pay", decline)
    await step.wait_for_event("go", "go")


@pytest.fixture
def clock() -> TestClock:
    undone.clear()
    down.clear()
    return TestClock()


@pytest.fixture
def runtime(clock: TestClock) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[trip], clock=clock)


@pytest.fixture
def act(runtime: Runtime, clock: TestClock) -> Operations:
    return Operations(runtime.store, clock=clock)


async def why(runtime: Runtime) -> str:
    return (await Insights(runtime.store, clock=runtime.clock).why("t")).sentence


async def test_why_says_how_far_a_rollback_is(runtime: Runtime) -> None:
    down.add("room")
    await runtime.trigger(trip, True, run_id="t")
    assert await why(runtime) == (
        'Rolling back after PaymentDeclined: 1 of 2 steps undone. Step "undo of room" failed '
        "1 attempt (ConnectionError: room is down); the next one starts in 1 h."
    )


async def test_why_says_what_could_not_be_undone(runtime: Runtime, clock: TestClock) -> None:
    down.add("room")
    await runtime.trigger(trip, True, run_id="t")
    await clock.advance(timedelta(hours=2))
    await runtime.sweep()
    assert (await why(runtime)).startswith(
        'Rollback failed: step "room" could not be undone (ConnectionError: room is down). The run '
        "was rolled back after PaymentDeclined."
    )
    facts = await Insights(runtime.store, clock=clock).run("t")
    assert facts.rollback is not None
    assert facts.rollback.not_undone == {"room": "ConnectionError: room is down"}


async def test_why_says_that_a_run_was_undone(runtime: Runtime) -> None:
    await runtime.trigger(trip, True, run_id="t")
    assert "failed with PaymentDeclined: no funds. 2 steps were undone." in await why(runtime)


async def test_cancel_says_what_will_be_undone(runtime: Runtime, act: Operations) -> None:
    await runtime.trigger(trip, False, run_id="t")
    outcome = await act.cancel("t", by="ana")
    assert (outcome.status, outcome.sentence) == (
        "queued",
        "Cancelled. A worker will undo 2 steps first.",
    )
    await runtime.sweep()
    assert (undone, (await runtime.get_run("t")).status) == (["seat", "room"], "cancelled")  # type: ignore[union-attr]  # it exists


async def test_cancel_without_undo_ends_a_rollback(runtime: Runtime, act: Operations) -> None:
    down.add("room")
    await runtime.trigger(trip, True, run_id="t")
    with pytest.raises(Refused, match="being undone"):
        await act.cancel("t", by="ana")
    assert (await act.cancel("t", undo=False, by="ana")).status == "cancelled"
    assert undone == ["seat"]


async def test_a_run_that_is_being_undone_is_not_rewound_or_signalled(
    runtime: Runtime, act: Operations
) -> None:
    down.add("room")
    await runtime.trigger(trip, True, run_id="t")
    with pytest.raises(Refused, match="being undone"):
        await act.rewind("t", "room", by="ana")
    with pytest.raises(Refused, match="being undone"):
        await act.signal("t", "go", by="ana")
    with pytest.raises(Refused, match="its steps were undone"):
        await act.complete_step("t", "pay", None, by="ana")


async def test_an_undo_that_is_not_due_is_not_skipped(runtime: Runtime, act: Operations) -> None:
    """Otherwise the step would count as undone, and stay as it is when the run fails."""
    await runtime.trigger(trip, False, run_id="t")
    with pytest.raises(Refused, match="'room' is not being undone"):
        await act.skip_step("t", "~undo:room", by="ana")
    await runtime.cancel("t")
    assert undone == ["seat", "room"]


async def test_wake_starts_the_next_attempt_of_an_undo(runtime: Runtime, act: Operations) -> None:
    down.add("room")
    await runtime.trigger(trip, True, run_id="t")
    down.clear()
    await act.wake("t", by="ana")
    (run,) = await runtime.sweep()
    assert (run.status, undone) == ("failed", ["seat", "room"])


async def test_the_page_of_a_run_names_undos(runtime: Runtime) -> None:
    await runtime.trigger(trip, True, run_id="t")
    page = await Visitor(dashboard(runtime.store)).get("/runs/t")
    assert "undo of room" in page.text
    assert "2 steps were undone" in page.text


async def test_the_form_of_the_dashboard_can_leave_steps_as_they_are(runtime: Runtime) -> None:
    await runtime.trigger(trip, False, run_id="t")
    await Visitor(dashboard(runtime.store)).post("/runs/t/do/cancel", {"undo": "no"})
    run = await runtime.get_run("t")
    assert run is not None
    assert (run.status, undone) == ("cancelled", [])


async def test_bulk_can_leave_steps_as_they_are(runtime: Runtime, act: Operations) -> None:
    await runtime.trigger(trip, False, run_id="t")
    async for _ in act.bulk("workflow:trip", "cancel", by="ana", undo=False):
        pass
    assert undone == []
