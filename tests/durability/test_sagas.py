"""Programs with undos, crashed at every store call, against a model of their effects."""

import asyncio
from datetime import timedelta
from typing import NoReturn

import pytest

from perdure import Retry, RollbackFailed, RunFailed, Runtime, Step, TooLate, durable, workflow
from perdure.errors import StoreError
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock
from tests.durability.sagas.explore import explore
from tests.durability.sagas.programs import NAMED, draw

QUICK = [9, 12, 16, 24, 50]


@pytest.mark.parametrize("name", NAMED)
async def test_each_step_is_undone_once_or_reported(name: str) -> None:
    """Wherever the process crashes, nothing is forgotten and nothing is undone out of order."""
    assert await explore(NAMED[name]) > 0


@pytest.mark.parametrize("name", ["nested scopes", "branches that a failure cancels"])
async def test_each_step_is_undone_once_if_every_step_is_replayed(name: str) -> None:
    """A run that leaves memory after each step, and each undo, ends the same."""
    assert await explore(NAMED[name], always_replay=True) > 0


@pytest.mark.parametrize("seed", QUICK)
async def test_random_programs_are_undone(seed: int) -> None:
    """`python -m tests.durability.sagas.explore 0 400` runs more of them."""
    assert await explore(draw(seed)) > 0


async def test_a_step_in_doubt_is_not_undone() -> None:
    """It was cancelled before it had a record, which is what would be undone."""
    clock, store = TestClock(), MemoryStore()
    undone: list[str] = []
    began = asyncio.Event()

    async def charge() -> str:
        began.set()
        await asyncio.Event().wait()
        return "charged"

    @workflow("in-doubt")
    async def order(step: Step) -> None:
        await step("reserve", lambda: "reserved", undo=undone.append)
        await step("charge", charge, undo=undone.append)

    runtime = Runtime(store, workflows=[order], clock=clock)
    driving = asyncio.create_task(runtime.trigger(order, run_id="order-1"))
    await began.wait()
    await runtime.cancel("order-1", wait=False)
    assert (await driving).status == "cancelled"
    assert undone == ["reserved"]


async def test_a_scope_that_began_to_be_undone_is_not_entered_again() -> None:
    """A block that raised because of time might not raise again after a crash."""
    events: list[str] = []
    is_slow = True

    async def pay() -> str:
        events.append("pay")
        if is_slow:
            await asyncio.Event().wait()
        return "paid"

    async def fragile(_: str) -> None:
        events.append("undo")

    @workflow("timed")
    async def timed(step: Step) -> str:
        try:
            async with step.saga("booking"):
                await step("room", lambda: "room", undo=fragile)
                async with asyncio.timeout(0.05):
                    return await step("pay", pay)
        except TimeoutError:
            return "too late"

    inner = MemoryStore()
    # Its fourth entry is the record of the undo: the process dies before that.
    store = FaultyStore(inner, fail_at=3, verbs={"append"}, error=StoreError, stays_down=True)
    with pytest.raises(StoreError):
        await Runtime(store, workflows=[timed], lease_ttl=0.2).trigger(timed, run_id="t")
    stored = await inner.load("t")
    assert stored is not None
    assert list(stored["steps"]) == ["room", "~saga:booking"]
    is_slow = False
    await asyncio.sleep(0.3)
    run = await Runtime(inner, workflows=[timed]).resume("t")
    assert (run.output, events) == ("too late", ["pay", "undo", "undo"])


async def test_a_long_delay_between_attempts_of_an_undo_is_a_durable_wait() -> None:
    """The run leaves memory, and the rollback continues after it; a pause holds it."""
    clock = TestClock()
    tried: list[int] = []

    async def undo(_: str) -> None:
        tried.append(durable.current().attempt)
        if len(tried) < 3:
            raise ConnectionError("unavailable")

    @workflow("patient")
    async def patient(step: Step) -> None:
        async with step.saga("booking", undo_retry=Retry(5, delay="1h", max_delay="1h")):
            await step("room", lambda: "room", undo=undo)
        raise ValueError("no funds")

    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[patient], clock=clock)
    run = await runtime.trigger(patient, run_id="t")
    assert (run.status, run.pending[0].id) == ("suspended", "~undo:room")
    await Operations(store, clock=clock).pause("t", by="ana", why="wait")
    await clock.advance(timedelta(hours=2))
    assert await runtime.sweep() == []
    run = await runtime.resume("t")
    assert (run.status, tried) == ("suspended", [1, 2])
    await clock.advance(timedelta(hours=2))
    (run,) = await runtime.sweep()
    assert (str(run.error), tried) == ("no funds", [1, 2, 3])


async def test_a_child_is_undone_before_its_parent_learns_of_its_end() -> None:
    events: list[str] = []

    @workflow("undone-child")
    async def child(step: Step) -> None:
        await step("seat", lambda: "seat", undo=events.append)
        await step("pay", _fail)

    @workflow("undone-parent")
    async def parent(step: Step) -> None:
        await step("room", lambda: "room", undo=events.append)
        try:
            await step.call("child", child)
        except RunFailed:
            await step("hear", events.append, "told")
            raise

    runtime = Runtime(MemoryStore(), workflows=[parent, child])
    run = await runtime.trigger(parent, run_id="p")
    while not run.over:
        await runtime.sweep()
        run = await runtime.resume("p")
    assert (run.status, events) == ("failed", ["seat", "told", "room"])


async def _fail() -> NoReturn:
    raise ValueError("no funds")


async def test_cancelling_a_parent_undoes_its_children_too() -> None:
    events: list[str] = []

    @workflow("cancelled-child")
    async def child(step: Step) -> None:
        await step("seat", lambda: "seat", undo=events.append)
        await step.wait_for_event("never", "never")

    @workflow("cancelled-parent")
    async def parent(step: Step) -> None:
        await step("room", lambda: "room", undo=events.append)
        await step.call("child", child)

    runtime = Runtime(MemoryStore(), workflows=[parent, child])
    run = await runtime.trigger(parent, run_id="p")
    (child_id,) = run.children
    await runtime.resume(child_id)
    assert (await runtime.cancel("p")).status == "cancelled"
    assert (await runtime.resume(child_id)).status == "cancelled"
    assert events == ["room", "seat"]


async def test_a_marked_step_that_the_function_no_longer_calls_is_reported() -> None:
    """Nothing is skipped silently; with the old code a retry undoes it."""
    undone: list[str] = []
    calls_old = True

    @workflow("changed")
    async def changed(step: Step) -> None:
        if calls_old:
            await step("old", lambda: "old", undo=undone.append)
        await step("new", lambda: "new", undo=undone.append)
        await step.wait_for_event("never", "never")

    runtime = Runtime(MemoryStore(), workflows=[changed])
    await runtime.trigger(changed, run_id="t")
    calls_old = False
    run = await runtime.cancel("t")
    assert isinstance(run.error, RollbackFailed)
    assert list(run.error.failures) == ["old"]
    calls_old = True
    run = await runtime.retry("t")
    assert (run.status, undone) == ("cancelled", ["new", "old"])


async def test_a_question_is_closed_before_the_run_is_undone() -> None:
    """No answer is accepted that nothing would see; an approved step is undone like any other."""
    undone: list[str] = []

    @workflow("asking")
    async def asking(step: Step) -> None:
        await step("wire", lambda: "wired", approve="Wire?", undo=undone.append)
        await step.approval("ship", "Ship?")

    runtime = Runtime(MemoryStore(), workflows=[asking])
    run = await runtime.trigger(asking, run_id="t")
    await runtime.approve(run.pending[0].token, by="ana")
    run = await runtime.resume("t")
    token = run.pending[0].token
    assert (await runtime.cancel("t")).status == "cancelled"
    assert undone == ["wired"]
    with pytest.raises(TooLate):
        await runtime.approve(token, by="ana")


async def test_code_between_two_steps_does_not_hide_an_undo() -> None:
    """The first time, the failure cancelled a branch that had been further by then."""
    undone: list[str] = []

    async def decline() -> None:
        await asyncio.sleep(0.2)
        await _fail()

    @workflow("beside")
    async def beside(step: Step) -> None:
        async def book() -> None:
            await step("room", lambda: "room", undo=undone.append)
            await asyncio.sleep(0.05)
            await step("seat", lambda: "seat", undo=undone.append)
            await asyncio.sleep(10)

        async with asyncio.TaskGroup() as group:
            group.create_task(step("pay", decline))
            group.create_task(book())

    run = await Runtime(MemoryStore(), workflows=[beside]).trigger(beside)
    assert (run.status, undone) == ("failed", ["seat", "room"])
    assert isinstance(run.error, ExceptionGroup)


async def test_an_undo_that_is_cancelled_from_within_has_failed() -> None:
    undone: list[str] = []

    async def undo(part: str) -> None:
        if part == "seat":
            raise asyncio.CancelledError
        undone.append(part)

    @workflow("cancelling")
    async def cancelling(step: Step) -> None:
        async with step.saga("booking", undo_retry=1):
            await step("room", lambda: "room", undo=undo)
            await step("seat", lambda: "seat", undo=undo)
        await step("pay", _fail)

    run = await Runtime(MemoryStore(), workflows=[cancelling]).trigger(cancelling)
    assert isinstance(run.error, RollbackFailed)
    assert (list(run.error.failures), undone) == (["seat"], ["room"])


async def test_a_run_can_be_retried_after_the_undo_of_a_handled_scope() -> None:
    """The undo failed in the scope and worked with the run: there is nothing to start over."""
    is_down, is_rich = True, False

    async def undo(_: str) -> None:
        if is_down:
            raise ConnectionError("unavailable")

    async def pay() -> str:
        return "paid" if is_rich else await _fail()

    @workflow("scoped")
    async def scoped(step: Step) -> str:
        try:
            async with step.saga("booking", undo_retry=1):
                await step("room", lambda: "room", undo=undo)
                await step("seat", _fail)
        except Exception:  # noqa: BLE001  # before and after the retry it is not the same
            return await step("pay", pay)
        return "booked"

    runtime = Runtime(MemoryStore(), workflows=[scoped])
    assert isinstance((await runtime.trigger(scoped, run_id="t")).error, RollbackFailed)
    is_down = False
    assert isinstance((await runtime.retry("t")).error, ValueError)
    is_rich = True
    assert (await runtime.retry("t")).output == "paid"


async def test_a_replay_that_is_refused_says_why() -> None:
    undone: list[object] = []
    price = 100

    async def pay(amount: int) -> int:
        return amount

    @workflow("drifting")
    async def drifting(step: Step) -> None:
        await step("room", lambda: "room", undo=undone.append)
        await step("pay", pay, price, undo=undone.append)
        await step.wait_for_event("never", "never")

    runtime = Runtime(MemoryStore(), workflows=[drifting])
    await runtime.trigger(drifting, run_id="t")
    price = 200
    run = await runtime.cancel("t")
    assert isinstance(run.error, RollbackFailed)
    assert run.error.failures["pay"].startswith("DriftError: step 'pay' was recorded with other")
    assert undone == ["room"]


async def test_a_pause_during_the_replay_comes_before_the_first_undo() -> None:
    undone: list[str] = []
    replays, goes_on = asyncio.Event(), asyncio.Event()
    calls = 0

    @workflow("paused")
    async def paused(step: Step) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            replays.set()
            await goes_on.wait()
        await step("room", lambda: "room", undo=undone.append)
        await step("pay", _fail)

    store = MemoryStore()
    runtime = Runtime(store, workflows=[paused], lease_ttl=0.3)
    driving = asyncio.create_task(runtime.trigger(paused, run_id="t"))
    await replays.wait()
    await Operations(store).pause("t", by="ana", why="wait")
    # The owner reads its inbox when it renews the lease.
    await asyncio.sleep(0.3)
    goes_on.set()
    assert ((await driving).status, undone) == ("paused", [])
    await Operations(store).unpause("t", by="ana")
    assert ((await runtime.resume("t")).status, undone) == ("failed", ["room"])


async def test_a_branch_that_lost_keeps_no_key_from_others() -> None:
    """It is replayed for its undos, and its keyed step does not begin."""

    @workflow("keyed")
    async def keyed(step: Step) -> str:
        async def slow() -> None:
            await step("room", lambda: "room", undo=lambda _: None)
            await step("pay", asyncio.Event().wait, key="payment")

        await step.race("first", slow(), step("quick", asyncio.sleep, 0.05))
        await step.sleep("later", "1h")
        return await step("pay", lambda: "paid", key="payment")

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[keyed], clock=clock)
    assert (await runtime.trigger(keyed, run_id="t")).status == "suspended"
    await clock.advance(timedelta(hours=1))
    async with asyncio.timeout(5):
        (run,) = await runtime.sweep()
    assert run.output == "paid"


async def test_a_scope_cancels_only_branches_that_its_block_has_started() -> None:
    """Not what a branch that is older than the block starts in the meantime."""
    executed_steps: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.1)
        executed_steps.append("work")

    @workflow("older")
    async def older(step: Step) -> None:
        async def beside() -> None:
            await asyncio.sleep(0.02)
            await asyncio.gather(step("work", work))

        other = asyncio.create_task(beside())
        try:
            async with step.saga("booking"):
                await step("room", lambda: "room", undo=lambda _: executed_steps.append("undo"))
                await asyncio.sleep(0.05)
                raise ValueError("no seat")
        except ValueError:
            await other

    run = await Runtime(MemoryStore(), workflows=[older]).trigger(older)
    assert (run.status, executed_steps) == ("completed", ["undo", "work"])


async def test_scopes_in_branches_are_undone_before_the_one_around_them() -> None:
    undone: list[str] = []

    @workflow("around")
    async def around(step: Step) -> str:
        async def inner() -> None:
            async with step.saga("inner"):
                await step("seat", lambda: "seat", undo=undone.append)
                await step.sleep("wait", "1h")

        try:
            async with step.saga("outer"):
                await step("room", lambda: "room", undo=undone.append)
                await asyncio.gather(inner(), step("pay", decline))
        except ValueError:
            return "handled"
        return "paid"

    async def decline() -> None:
        await asyncio.sleep(0.05)
        await _fail()

    async with asyncio.timeout(5):
        run = await Runtime(MemoryStore(), workflows=[around]).trigger(around)
    assert (run.output, undone) == ("handled", ["seat", "room"])


async def test_a_step_that_is_recorded_while_its_block_fails_is_undone_with_it() -> None:
    """The block ends only when no branch of it can record anything."""
    undone: list[str] = []

    async def book() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            undone.append("cancelled")
            raise
        return "room"

    @workflow("slow-block")
    async def slow_block(step: Step) -> str:
        try:
            async with step.saga("booking"):
                await asyncio.gather(step("room", book, undo=undone.append), step("pay", _fail))
        except ValueError:
            undone.append("handled")
        return "done"

    run = await Runtime(MemoryStore(), workflows=[slow_block]).trigger(slow_block)
    assert (run.output, undone) == ("done", ["cancelled", "handled"])


@pytest.mark.parametrize("fails", ["step", "function"])
async def test_a_scope_that_a_failure_cancelled_is_repeated_with_it(fails: str) -> None:
    """When the run is retried, nothing cancels the scope, whose steps were undone."""
    events: list[str] = []
    is_broken, booked = True, asyncio.Event()

    async def book(what: str) -> str:
        events.append(what)
        if what == "seat" and is_broken:
            await asyncio.Event().wait()
        return what

    def pay() -> None:
        if is_broken:
            raise ValueError("declined")

    async def paying(step: Step) -> None:
        await booked.wait()
        if fails == "step":
            await step("pay", pay)
        else:
            pay()

    async def booking(step: Step) -> None:
        async with step.saga("booking"):
            await step("room", book, "room", undo=lambda room: events.append(f"no {room}"))
            booked.set()
            await step("seat", book, "seat")

    @workflow("trip")
    async def trip(step: Step) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(booking(step))
            group.create_task(paying(step))

    runtime = Runtime(MemoryStore(), workflows=[trip])
    assert (await runtime.trigger(trip, run_id="trip-1")).status == "failed"
    is_broken = False
    run = await asyncio.wait_for(runtime.retry("trip-1"), 5)
    assert run.status == "completed"
    assert events == ["room", "seat", "no room", "room", "seat"]


async def test_a_cancelled_scope_that_cannot_be_undone_stays_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The block is cancelled, not failed, and a log line says what was not undone."""
    ended_by: list[str] = []
    booked = asyncio.Event()

    def cancel_room(_: str) -> None:
        raise ConnectionError("the hotel does not answer")

    async def booking(step: Step) -> None:
        try:
            async with step.saga("booking", undo_retry=Retry(1)):
                await step("room", lambda: "room", undo=cancel_room)
                booked.set()
                await step("seat", asyncio.Event().wait)
        except BaseException as error:
            ended_by.append(type(error).__name__)
            raise

    @workflow("trip")
    async def trip(step: Step) -> str:
        task = asyncio.create_task(booking(step))
        await booked.wait()
        task.cancel()
        await asyncio.wait([task])
        return "stayed at home"

    runtime = Runtime(MemoryStore(), workflows=[trip])
    assert (await runtime.trigger(trip)).output == "stayed at home"
    assert ended_by == ["CancelledError"]
    assert "could not be undone" in caplog.text


@pytest.mark.parametrize("is_last", [True, False], ids=["returns", "continues as new"])
async def test_a_scope_is_undone_although_the_function_does_not_wait_for_it(is_last: bool) -> None:
    """Its rollback is recorded; a run that has completed would never be undone."""
    undone: list[str] = []
    began = asyncio.Event()

    async def undo(value: str) -> None:
        began.set()
        await asyncio.sleep(0.01)
        undone.append(value)

    async def book(step: Step) -> NoReturn:
        async with step.saga("booking"):
            await step("room", lambda: "room", undo=undo)
            await step("car", lambda: "car", undo=undo)
            raise RuntimeError("no flight")

    @workflow("left-behind")
    async def trip(step: Step, n: int = 0) -> str:
        if n:
            return "done"
        left = asyncio.create_task(book(step))
        left.add_done_callback(lambda task: task.cancelled() or task.exception())
        await began.wait()
        if not is_last:
            await step.continue_as_new(1)
        return "done"

    runtime = Runtime(MemoryStore(), workflows=[trip])
    run = await runtime.trigger(trip, 0, run_id="t")
    assert (run.output, undone) == ("done", ["car", "room"])


async def test_a_scope_that_the_function_does_not_wait_for_is_undone_after_a_crash() -> None:
    """When the run is continued, the function returns before its branch comes to its scope."""
    store, clock = MemoryStore(), TestClock()
    undone: list[str] = []
    began = asyncio.Event()
    hangs = True

    async def undo(value: str) -> None:
        began.set()
        if hangs:
            await asyncio.Event().wait()
        undone.append(value)

    async def book(step: Step) -> NoReturn:
        async with step.saga("booking"):
            await step("room", lambda: "room", undo=undo)
            try:
                await step("flight", _fail)
            finally:
                await asyncio.sleep(0.05)
        raise AssertionError

    @workflow("left-behind")
    async def trip(step: Step) -> str:
        left = asyncio.create_task(book(step))
        left.add_done_callback(lambda task: task.cancelled() or task.exception())
        if hangs:
            await began.wait()
        return "done"

    runtime = Runtime(store, workflows=[trip], clock=clock)
    driving = asyncio.create_task(runtime.trigger(trip, run_id="t"))
    await began.wait()
    driving.cancel()
    await asyncio.wait([driving])
    hangs = False
    run = await runtime.resume("t")
    assert (run.output, undone) == ("done", ["room"])


async def test_a_scope_that_no_code_can_undo_is_reported_and_the_run_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process died while the scope was undone, and the new code no longer has its steps."""
    store = MemoryStore()
    began = asyncio.Event()
    is_new = False

    async def undo(_: str) -> None:
        began.set()
        await asyncio.Event().wait()

    async def book(step: Step) -> NoReturn:
        async with step.saga("booking"):
            await step("room", lambda: "room", undo=undo)
            raise RuntimeError("no flight")

    @workflow("left-behind")
    async def trip(step: Step) -> str:
        if not is_new:
            left = asyncio.create_task(book(step))
            left.add_done_callback(lambda task: task.cancelled() or task.exception())
            await began.wait()
        return "done"

    runtime = Runtime(store, workflows=[trip])
    driving = asyncio.create_task(runtime.trigger(trip, run_id="t"))
    await began.wait()
    driving.cancel()
    await asyncio.wait([driving])
    is_new = True
    assert (await runtime.resume("t")).output == "done"
    assert "steps of a scope could not be undone: {'room': " in caplog.text


@pytest.mark.parametrize("comes_back", [False, True], ids=["hangs", "comes late"])
async def test_a_scope_that_was_half_undone_does_not_keep_its_run_open(comes_back: bool) -> None:
    """After a crash its branch may never come to it again, or only while it is being undone."""
    undone: list[str] = []
    began = asyncio.Event()
    is_first = True

    async def undo(value: str) -> None:
        began.set()
        if is_first:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        undone.append(value)

    async def book(step: Step) -> NoReturn:
        async with step.saga("booking"):
            await step("room", lambda: "room", undo=undo)
            if not is_first:
                await (asyncio.sleep(0.02) if comes_back else asyncio.Event().wait())
            raise RuntimeError("no flight")

    @workflow("left-behind")
    async def trip(step: Step) -> str:
        left = asyncio.create_task(book(step))
        left.add_done_callback(lambda task: task.cancelled() or task.exception())
        if is_first:
            await began.wait()
        return "done"

    runtime = Runtime(MemoryStore(), workflows=[trip])
    driving = asyncio.create_task(runtime.trigger(trip, run_id="t"))
    await began.wait()
    driving.cancel()
    await asyncio.wait([driving])
    is_first = False
    run = await asyncio.wait_for(runtime.resume("t"), 5)
    assert (run.output, undone) == ("done", ["room"])
