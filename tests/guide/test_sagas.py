"""Undoing work: steps that can be undone, scopes, and what happens when an undo fails."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from perdure import Retry, RollbackFailed, Run, Runtime, Step, Workflow, durable, workflow
from perdure.errors import DeadlinePassed, MissingAbility, PerdureError, Refused
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import TestClock


class NoFunds(Exception):
    pass


class Agency:
    """The current bookings, and a log of everything that happened."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.keys: list[str] = []
        self.down: set[str] = set()
        self.has_funds = False

    async def book(self, what: str) -> str:
        self.events.append(f"book {what}")
        return what

    async def cancel(self, what: str) -> None:
        self.keys.append(durable.current().idempotency_key)
        if what in self.down:
            raise ConnectionError(f"{what} is unavailable")
        self.events.append(f"cancel {what}")

    async def pay(self) -> str:
        if not self.has_funds:
            raise NoFunds
        return "paid"


AGENCY = Agency()


@pytest.fixture(autouse=True)
def agency() -> Agency:
    AGENCY.__init__()  # type: ignore[misc]  # a new one for each test, seen by the workflows
    return AGENCY


@workflow("trip")
async def trip(step: Step[None]) -> str:
    await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
    await step("seat", AGENCY.book, "seat", undo=AGENCY.cancel)
    return await step("pay", AGENCY.pay)


@workflow("slow-trip", deadline="1h")
async def slow_trip(step: Step[None]) -> None:
    await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
    await step.wait_for_event("confirmed", "confirmed")


@workflow("scoped-trip")
async def scoped_trip(step: Step[None]) -> str:
    await step("guide", AGENCY.book, "guide", undo=AGENCY.cancel)
    try:
        async with step.saga("booking", undo_retry=Retry(2, delay=0)):
            await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
            await step.all(
                step("seat", AGENCY.book, "seat", undo=AGENCY.cancel),
                step("car", AGENCY.book, "car", undo=AGENCY.cancel),
            )
            return await step("pay", AGENCY.pay)
    except NoFunds:
        return await step("tell", lambda: "no funds")


@pytest.fixture
def runtime(clock: TestClock) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[trip, slow_trip, scoped_trip], clock=clock)


async def test_when_a_run_fails_its_steps_are_undone_the_last_one_first(runtime: Runtime) -> None:
    """The run then ends with its original failure."""
    run = await runtime.trigger(trip, run_id="trip-1")
    assert AGENCY.events == ["book room", "book seat", "cancel seat", "cancel room"]
    assert (run.status, type(run.error)) == ("failed", NoFunds)
    assert [step.key for step in run.history][-2:] == ["~undo:seat", "~undo:room"]
    assert run.rollback is not None
    assert (run.rollback.steps, run.rollback.undone) == (2, 2)


async def test_a_run_that_completes_undoes_nothing(runtime: Runtime) -> None:
    AGENCY.has_funds = True
    run = await runtime.trigger(trip)
    assert (run.output, run.rollback) == ("paid", None)
    assert AGENCY.events == ["book room", "book seat"]


async def test_a_cancelled_run_is_undone(runtime: Runtime) -> None:
    run = await runtime.trigger(slow_trip, run_id="trip-1")
    assert run.status == "waiting"
    run = await runtime.cancel("trip-1", reason="ill")
    assert (run.status, AGENCY.events) == ("cancelled", ["book room", "cancel room"])


async def test_a_run_can_be_cancelled_without_undoing_anything(runtime: Runtime) -> None:
    await runtime.trigger(slow_trip, run_id="trip-1")
    run = await runtime.cancel("trip-1", undo=False)
    assert (run.status, AGENCY.events) == ("cancelled", ["book room"])


async def test_cancelling_a_run_without_undos_ends_it_at_once(runtime: Runtime) -> None:
    await runtime.trigger(slow_trip, run_id="trip-1", wait=False)
    run = await runtime.cancel("trip-1", wait=False)
    assert run.status == "cancelled"


async def test_a_run_that_passes_its_deadline_is_undone(runtime: Runtime, clock: TestClock) -> None:
    """The deadline does not apply to the undos."""
    await runtime.trigger(slow_trip, run_id="trip-1")
    await clock.advance(timedelta(hours=2))
    (run,) = await runtime.sweep()
    assert isinstance(run.error, DeadlinePassed)
    assert AGENCY.events == ["book room", "cancel room"]


async def test_a_scope_is_undone_if_its_block_raises(runtime: Runtime) -> None:
    """The exception then propagates; what is outside the scope stays."""
    run = await runtime.trigger(scoped_trip)
    assert run.output == "no funds"
    assert AGENCY.events[4:] == ["cancel car", "cancel seat", "cancel room"]


async def test_a_scope_that_ended_well_is_undone_with_the_run(runtime: Runtime) -> None:
    @workflow("scope-ended")
    async def ended(step: Step[None]) -> None:
        async with step.saga("booking"):
            await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
        await step("pay", AGENCY.pay)

    await runtime.trigger(ended)
    assert AGENCY.events == ["book room", "cancel room"]


async def test_a_handled_failure_undoes_nothing(runtime: Runtime) -> None:
    @workflow("handled")
    async def handled(step: Step[None]) -> str:
        await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
        try:
            return await step("pay", AGENCY.pay)
        except NoFunds:
            return "later"

    assert (await runtime.trigger(handled)).output == "later"
    assert AGENCY.events == ["book room"]


async def test_an_undo_that_fails_does_not_stop_the_others(
    runtime: Runtime, clock: TestClock
) -> None:
    """The run ends with `RollbackFailed`, and `retry` continues the rollback, nothing else."""
    AGENCY.down = {"seat"}
    run = await clock.run(_ended(runtime, "trip-1", runtime.trigger(trip, run_id="trip-1")))
    assert isinstance(run.error, RollbackFailed)
    assert run.error.failures == {"seat": "ConnectionError: seat is unavailable"}
    assert isinstance(run.error.__cause__, NoFunds)
    assert AGENCY.events == ["book room", "book seat", "cancel room"]
    AGENCY.down.clear()
    run = await runtime.retry("trip-1")
    assert (AGENCY.events[3:], type(run.error)) == (["cancel seat"], NoFunds)


async def _ended(runtime: Runtime, run_id: str, started: Coroutine[Any, Any, Run]) -> Run:
    """Continue a run until it ends; its undos are retried for some seconds."""
    run: Run | None = await started
    while run is not None and not run.over:
        await runtime.clock.sleep(1)
        await runtime.sweep()
        run = await runtime.get_run(run_id)
    assert run is not None
    return run


async def test_each_undo_has_one_idempotency_key(runtime: Runtime, clock: TestClock) -> None:
    AGENCY.down = {"seat"}
    await clock.run(_ended(runtime, "trip-1", runtime.trigger(trip, run_id="trip-1")))
    assert len(AGENCY.keys) == 5 + 1
    assert len(set(AGENCY.keys)) == 2


async def test_a_run_that_was_undone_begins_again_when_it_is_retried(runtime: Runtime) -> None:
    """In the next generation: the record of a step that was undone is never used again."""
    await runtime.trigger(trip, run_id="trip-1")
    AGENCY.has_funds = True
    run = await runtime.retry("trip-1")
    assert (run.output, run.rollback) == ("paid", None)
    assert AGENCY.events[4:] == ["book room", "book seat"]


async def test_a_retry_repeats_the_scope_through_which_the_run_failed(runtime: Runtime) -> None:
    """Steps before the scope are not repeated."""

    @workflow("scope-failed")
    async def failed(step: Step[None]) -> str:
        await step("map", AGENCY.book, "map")
        async with step.saga("booking"):
            await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
            return await step("pay", AGENCY.pay)

    await runtime.trigger(failed, run_id="trip-1")
    AGENCY.has_funds = True
    assert (await runtime.retry("trip-1")).output == "paid"
    assert AGENCY.events == ["book map", "book room", "cancel room", "book room"]


async def test_a_rewind_or_fork_never_keeps_a_step_that_was_undone(runtime: Runtime) -> None:
    await runtime.trigger(trip, run_id="trip-1")
    act = Operations(runtime.store, clock=runtime.clock)
    for verb in (act.rewind, act.fork):
        with pytest.raises(Refused, match="'room' was undone"):
            await verb("trip-1", "seat", by="ana")
    await act.rewind("trip-1", "room", by="ana")


async def test_an_operator_can_undo_by_hand(runtime: Runtime, clock: TestClock) -> None:
    """The undo is then recorded as done, and the run ends as it would have."""
    AGENCY.down = {"seat"}
    await clock.run(_ended(runtime, "trip-1", runtime.trigger(trip, run_id="trip-1")))
    await Operations(runtime.store, clock=clock).skip_step("trip-1", "~undo:seat", by="ana")
    (run,) = await runtime.sweep()
    assert isinstance(run.error, NoFunds)
    assert "cancel seat" not in AGENCY.events


async def test_a_fork_does_not_undo_what_its_source_did(runtime: Runtime) -> None:
    AGENCY.has_funds = True
    await runtime.trigger(trip, run_id="trip-1")
    AGENCY.has_funds = False
    fork = await Operations(runtime.store, clock=runtime.clock).fork("trip-1", "pay", by="ana")
    await runtime.sweep()
    run = await runtime.get_run(fork.run_id)
    assert run is not None
    assert (run.status, AGENCY.events) == ("failed", ["book room", "book seat"])


async def test_the_items_of_a_map_are_undone(runtime: Runtime) -> None:
    @workflow("map")
    async def rooms(step: Step[None]) -> None:
        await step.map("room", ["a", "b"], AGENCY.book, undo=AGENCY.cancel)
        await step("pay", AGENCY.pay)

    await runtime.trigger(rooms)
    assert AGENCY.events == ["book a", "book b", "cancel b", "cancel a"]


async def test_a_decorated_function_has_its_undo_with_it(runtime: Runtime) -> None:
    async def give_back(what: str) -> None:
        await AGENCY.cancel(what)

    @durable.step(undo=give_back)
    async def rent(what: str) -> str:
        return await AGENCY.book(what)

    @workflow("plain")
    async def plain(step: Step[None]) -> None:
        await rent("bike")
        await step("pay", AGENCY.pay)

    await runtime.trigger(plain)
    assert AGENCY.events == ["book bike", "cancel bike"]


async def test_durable_run_undoes_too() -> None:
    async def body(step: Step[None], deps: None) -> str:
        await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
        return await step("pay", AGENCY.pay)

    store = MemoryStore()
    assert not (await durable.run(None, body, id="trip-1", store=store)).ok
    assert AGENCY.events == ["book room", "cancel room"]
    AGENCY.has_funds = True
    assert (await durable.run(None, body, id="trip-1", store=store)).unwrap() == "paid"


async def test_without_a_store_nothing_can_be_undone() -> None:
    async def body(step: Step[None]) -> None:
        await step("room", AGENCY.book, "room", undo=AGENCY.cancel)

    result = await Workflow("trip").run(body)
    assert isinstance(result.error, MissingAbility)  # type: ignore[union-attr]  # it is an Err


async def test_a_scope_cannot_be_left_by_continuing_as_new(runtime: Runtime) -> None:
    @workflow("loop")
    async def loop(step: Step[None]) -> None:
        async with step.saga("booking"):
            await step.continue_as_new()

    run = await runtime.trigger(loop)
    assert isinstance(run.error, PerdureError)
    assert "leave the block first" in str(run.error)


async def test_branches_of_a_failed_block_are_cancelled_before_it_is_undone(
    runtime: Runtime,
) -> None:
    """What they record until then is undone too."""

    @workflow("branches")
    async def branches(step: Step[None]) -> None:
        async def slow() -> None:
            await step("seat", AGENCY.book, "seat", undo=AGENCY.cancel)
            await step.wait_for_event("never", "never")

        async with step.saga("booking"):
            await asyncio.gather(slow(), step("pay", AGENCY.pay))

    run = await runtime.trigger(branches)
    assert (run.status, AGENCY.events) == ("failed", ["book seat", "cancel seat"])


async def test_the_log_says_how_many_steps_are_undone(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("stay")
    async def stay(step: Step[None]) -> str:
        await step("room", AGENCY.book, "room", undo=AGENCY.cancel)
        return await step("pay", AGENCY.pay)

    await Runtime(MemoryStore()).trigger(stay)
    await Runtime(MemoryStore()).trigger(trip)
    assert "failed at step 'pay' (attempt 1); 1 step is undone: NoFunds()" in caplog.text
    assert "failed at step 'pay' (attempt 1); 2 steps are undone: NoFunds()" in caplog.text
