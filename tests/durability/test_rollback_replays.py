"""A replay finds how each recorded step is undone, whatever made its call the first time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import anyio
import pytest

from perdure import Run, Runtime, Step, workflow
from perdure.errors import StoreError
from perdure.store import Entry, Verdict
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore


class World:
    """What the steps of a test did, and which of them were undone."""

    def __init__(self) -> None:
        self.undone: list[str] = []
        self.is_broken = True

    async def fail(self) -> NoReturn:
        raise ValueError("no funds")

    async def fail_while_broken(self) -> str:
        return "mended" if not self.is_broken else await self.fail()

    def undo(self, part: str) -> None:
        self.undone.append(part)


@pytest.fixture
def world() -> World:
    return World()


async def run_and_fail(function: Any) -> Run:
    return await Runtime(MemoryStore(), workflows=[function]).trigger(function, run_id="t")


async def hang() -> None:
    await asyncio.Event().wait()


async def test_time_that_the_function_waits_passes_at_once(world: World) -> None:
    """The first time, a minute of its own code was between the two steps."""
    is_first = True

    @workflow("slow")
    async def slow(step: Step) -> None:
        await step("room", lambda: "room", undo=world.undo)
        await asyncio.sleep(0 if is_first else 60)
        await step("seat", lambda: "seat", undo=world.undo)
        await step.wait_for_event("never", "never")

    runtime = Runtime(MemoryStore(), workflows=[slow])
    await runtime.trigger(slow, run_id="t")
    is_first = False
    async with asyncio.timeout(30):
        run = await runtime.cancel("t")
    assert (run.status, world.undone) == ("cancelled", ["seat", "room"])


@pytest.mark.parametrize("timeout", [asyncio.timeout, anyio.move_on_after])
async def test_a_step_after_a_timeout_is_found(world: World, timeout: Callable[..., Any]) -> None:
    """A call that was cut off has no record, so that it takes the timeout to continue."""
    limit = 0.01

    @workflow("timed")
    async def timed(step: Step) -> None:
        try:
            scope = timeout(limit)
            if isinstance(scope, anyio.CancelScope):
                with scope:
                    await step("slow", hang)
            else:
                async with scope:
                    await step("slow", hang)
        except TimeoutError:
            pass
        await step("room", lambda: "room", undo=world.undo)
        await step.wait_for_event("never", "never")

    runtime = Runtime(MemoryStore(), workflows=[timed])
    await runtime.trigger(timed, run_id="t")
    limit = 60
    async with asyncio.timeout(30):
        run = await runtime.cancel("t")
    assert (run.status, world.undone) == ("cancelled", ["room"])


async def test_a_timeout_comes_before_the_failure_of_a_sibling(world: World) -> None:
    """The failure cancels the branch, which the first time had been past its timeout."""
    limit = 0.01

    async def decline() -> None:
        nonlocal limit
        await asyncio.sleep(0.1)
        limit = 60
        await world.fail()

    @workflow("beside")
    async def beside(step: Step) -> None:
        async def book() -> None:
            try:
                async with asyncio.timeout(limit):
                    await step("slow", hang)
            except TimeoutError:
                await step("room", lambda: "room", undo=world.undo)
            await step("wait", hang)

        async with asyncio.TaskGroup() as group:
            group.create_task(step("pay", decline))
            group.create_task(book())

    run = await run_and_fail(beside)
    assert isinstance(run.error, ExceptionGroup)
    assert world.undone == ["room"]


async def test_a_step_behind_a_call_that_something_outside_cut_off_is_found(world: World) -> None:
    """Nothing in the run says what did that, and the call has no record."""
    stop, began = asyncio.Event(), asyncio.Event()

    async def begin() -> None:
        began.set()
        await hang()

    @workflow("stopped")
    async def stopped(step: Step) -> None:
        async def book() -> None:
            try:
                await step("slow", begin)
            finally:
                await step("room", lambda: "room", undo=world.undo)

        booking = asyncio.create_task(book())
        await stop.wait()
        booking.cancel()
        await asyncio.wait([booking])
        stop.clear()
        await step("pay", world.fail)

    driving = asyncio.create_task(run_and_fail(stopped))
    await began.wait()
    stop.set()
    assert (str((await driving).error), world.undone) == ("no funds", ["room"])


async def test_own_exceptions_do_not_hide_what_follows_a_failure(world: World) -> None:
    """A success lets one branch raise; another had handled a failure before that."""
    order: list[str] = []

    async def later() -> str:
        await asyncio.sleep(0.05)
        return "later"

    @workflow("raising")
    async def raising(step: Step) -> None:
        async def handle() -> None:
            try:
                await step("pay", world.fail)
            except ValueError:
                await step("room", lambda: "room", undo=world.undo)
                await step("wait", hang)

        async def give_up() -> None:
            order.append(await step("later", later))
            raise KeyError("own")

        async with asyncio.TaskGroup() as group:
            group.create_task(handle())
            group.create_task(give_up())

    run = await run_and_fail(raising)
    assert isinstance(run.error, ExceptionGroup)
    assert world.undone == ["room"]


async def test_the_handler_of_a_cancelled_branch_is_found(world: World) -> None:
    """A branch that lost a race has recorded a step when it was cancelled."""

    @workflow("racing")
    async def racing(step: Step) -> None:
        async def lose() -> None:
            try:
                await step("slow", hang)
            finally:
                await step("room", lambda: "room", undo=world.undo)

        await step.race("first", lose(), step("fast", asyncio.sleep, 0))
        await step("pay", world.fail)

    assert str((await run_and_fail(racing)).error) == "no funds"
    assert world.undone == ["room"]


async def test_a_closed_scope_raises_what_it_raised_the_first_time(world: World) -> None:
    """Of two branches that failed, another is first when the block is replayed."""

    async def fail_if_interrupted() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            raise KeyError("interrupted") from None

    @workflow("two")
    async def two(step: Step) -> str:
        try:
            async with step.saga("booking"):
                await step("room", lambda: "room", undo=world.undo)
                await asyncio.gather(step("seat", fail_if_interrupted), step("pay", world.fail))
        except (KeyError, ValueError) as error:
            return repr(error)
        return "booked"

    inner = MemoryStore()
    # The process dies when it records the undo, which is after the scope was closed.
    store = FaultyStore(inner, fail_at=5, verbs={"append"}, error=StoreError, stays_down=True)
    with pytest.raises(StoreError):
        await Runtime(store, workflows=[two], lease_ttl=0.2).trigger(two, run_id="t")
    stored = await inner.load("t")
    assert stored is not None
    assert list(stored["steps"]) == ["room", "pay", "seat", "~saga:booking"]
    await asyncio.sleep(0.3)
    run = await Runtime(inner, workflows=[two]).resume("t")
    assert (run.output, world.undone[-1]) == ("ValueError('no funds')", "room")


async def test_scopes_of_one_name_in_two_branches_are_retried_together(world: World) -> None:
    """Which scope a failure went through is known by its record, not by its name."""

    @workflow("twins")
    async def twins(step: Step) -> str:
        async def book() -> None:
            async with step.saga("booking"):
                await step("room", lambda: "room", undo=world.undo)
                await step("pay", world.fail_while_broken)

        first, second = await asyncio.gather(book(), book(), return_exceptions=True)
        if error := first or second:
            raise error
        return "booked"

    runtime = Runtime(MemoryStore(), workflows=[twins], always_replay=True)
    run = await runtime.trigger(twins, run_id="t")
    while not run.over:
        (run,) = await runtime.sweep()
    assert (str(run.error), world.undone) == ("no funds", ["room", "room"])
    world.is_broken = False
    run = await runtime.retry("t")
    while not run.over:
        run = await runtime.resume("t")
    assert run.output == "booked"


class SlowReplies(MemoryStore):
    """A store with transactions whose replies take long."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        [verdict] = await self.append([await work(None)])
        await asyncio.sleep(0.1)
        return verdict


async def test_records_have_one_order_in_memory_and_in_the_store(world: World) -> None:
    """A step that began after a transaction was stored is undone before it."""

    async def write(_: object) -> str:
        return "row"

    async def book() -> str:
        await asyncio.sleep(0.05)
        return "room"

    @workflow("writing")
    async def writing(step: Step) -> None:
        await asyncio.gather(
            step.transaction("row", write, undo=world.undo),
            step("room", book, undo=world.undo),
        )
        await step("pay", world.fail)

    store = SlowReplies()
    run = await Runtime(store, workflows=[writing]).trigger(writing, run_id="t")
    assert isinstance(run.error, ValueError)
    assert [each.key for each in run.history][:2] == ["row", "room"]
    assert world.undone == ["room", "row"]
