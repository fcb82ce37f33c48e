"""A retry repeats the scopes that ended the run, also those that it ended through a race."""

import asyncio

import pytest

from perdure import Retry, Run, Runtime, Step, workflow
from perdure.errors import Refused, StoreError
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore


class World:
    """What the steps of a test do while something is broken, and what was done and undone."""

    def __init__(self) -> None:
        self.is_broken = True
        self.events: list[str] = []

    def book(self, what: str) -> str:
        self.events.append(what)
        return what

    def cancel(self, what: str) -> None:
        self.events.append(f"no {what}")

    def cancel_when_mended(self, what: str) -> None:
        if self.is_broken:
            raise ConnectionError("the hotel does not answer")
        self.cancel(what)

    def pay(self) -> str:
        if self.is_broken:
            raise ValueError("declined")
        return "paid"


@pytest.fixture
def world() -> World:
    return World()


async def to_the_end(runtime: Runtime, run: Run) -> Run:
    """Continue a run that leaves memory after each of its steps."""
    async with asyncio.timeout(5):
        while not run.over:
            run = await runtime.resume(run.id)
    return run


async def test_a_scope_that_made_a_race_fail_is_repeated_with_it(world: World) -> None:
    """The record of the race says so: a replay raises it and does not come to the scope."""

    @workflow("trip")
    async def trip(step: Step) -> str:
        async def book() -> str:
            async with step.saga("booking"):
                await step("room", world.book, "room", undo=world.cancel)
                return await step("pay", world.pay)

        _, paid = await step.race("first", book(), step.sleep("late", "1d"))
        return str(paid)

    runtime = Runtime(MemoryStore(), workflows=[trip], always_replay=True)
    run = await to_the_end(runtime, await runtime.trigger(trip, run_id="t"))
    assert (run.status, world.events) == ("failed", ["room", "no room"])
    world.is_broken = False
    run = await to_the_end(runtime, await runtime.retry("t"))
    assert (run.output, world.events) == ("paid", ["room", "no room", "room"])


async def test_a_scope_in_a_race_is_repeated_after_its_undo_has_failed(world: World) -> None:
    """One retry continues the rollback of the run, the next one repeats what was undone."""

    @workflow("trip")
    async def trip(step: Step) -> str:
        async def book() -> str:
            async with step.saga("booking", undo_retry=Retry(1)):
                await step("room", world.book, "room", undo=world.cancel_when_mended)
                return await step("pay", world.pay)

        _, paid = await step.race("first", book(), step.sleep("late", "1d"))
        return str(paid)

    runtime = Runtime(MemoryStore(), workflows=[trip], always_replay=True)
    run = await to_the_end(runtime, await runtime.trigger(trip, run_id="t"))
    assert (run.status, world.events) == ("failed", ["room"])
    world.is_broken = False
    run = await to_the_end(runtime, await runtime.retry("t"))
    assert (run.status, world.events) == ("failed", ["room", "no room"])
    run = await to_the_end(runtime, await runtime.retry("t"))
    assert (run.output, world.events) == ("paid", ["room", "no room", "room"])


@pytest.mark.parametrize("fails", ["step", "function"])
async def test_a_scope_that_a_failed_race_cancelled_is_repeated_with_it(
    world: World, fails: str
) -> None:
    """It may win when the race is decided again; a scope that stays closed never ends."""
    booked = asyncio.Event()

    async def pay() -> str:
        if world.is_broken:
            return world.pay()
        await asyncio.Event().wait()
        raise AssertionError

    @workflow("trip")
    async def trip(step: Step) -> str:
        async def book() -> str:
            async with step.saga("booking"):
                await step("room", world.book, "room", undo=world.cancel)
                booked.set()
                if world.is_broken:
                    await asyncio.Event().wait()
                return await step("seat", world.book, "seat")

        async def charge() -> str:
            await booked.wait()
            return await (step("pay", pay) if fails == "step" else pay())

        _, first = await step.race("first", book(), charge())
        return first

    runtime = Runtime(MemoryStore(), workflows=[trip])
    assert (await runtime.trigger(trip, run_id="t")).status == "failed"
    world.is_broken = False
    run = await asyncio.wait_for(runtime.retry("t"), 5)
    assert (run.output, world.events) == ("seat", ["room", "no room", "room", "seat"])


async def test_a_scope_inside_another_is_repeated_although_a_replay_fails_elsewhere(
    world: World,
) -> None:
    """The record of the outer scope names it: what the replay raises did not pass through it."""

    async def until_interrupted(what: str) -> str:
        try:
            await (asyncio.Event().wait() if world.is_broken else asyncio.sleep(0))
        except asyncio.CancelledError:
            if what == "seat":
                raise KeyError(what) from None
        return world.book(what)

    @workflow("trip")
    async def trip(step: Step) -> list[str]:
        async def inner() -> str:
            async with step.saga("inner"):
                room = await step("room", world.book, "room", undo=world.cancel)
                await asyncio.sleep(0.05)
                world.pay()
                return room

        async with step.saga("outer"):
            seat, car = (
                step("seat", until_interrupted, "seat"),
                step("car", until_interrupted, "car", undo=world.cancel),
            )
            return list(await asyncio.gather(inner(), seat, car))

    store = MemoryStore()
    # The process dies when it records that the car was undone.
    dying = FaultyStore(store, fail_at=7, verbs={"append"}, error=StoreError, stays_down=True)
    with pytest.raises(StoreError):
        await Runtime(dying, workflows=[trip], lease_ttl=0.2).trigger(trip, run_id="t")
    stored = await store.load("t")
    assert stored is not None
    assert [*stored["steps"]] == [
        "room", "~saga:inner", "~undo:room", "seat", "car", "~saga:outer",
    ]  # fmt: skip
    await asyncio.sleep(0.3)
    runtime = Runtime(store, workflows=[trip])
    assert str((await runtime.resume("t")).error) == "declined"
    world.is_broken = False
    run = await asyncio.wait_for(runtime.retry("t"), 5)
    assert run.output == ["room", "seat", "car"]
    assert world.events[:5] == ["room", "no room", "car", "no car", "no car"]
    assert sorted(world.events[5:]) == ["car", "room", "seat"]


@pytest.mark.parametrize("verb", ["retry_step", "skip_step"])
async def test_a_step_whose_failure_ended_a_scope_cannot_be_changed_alone(
    world: World, verb: str
) -> None:
    """The scope stays closed: the run would fail again with the recorded error."""

    @workflow("trip")
    async def trip(step: Step) -> str:
        async with step.saga("booking"):
            await step("room", world.book, "room", undo=world.cancel)
            return await step("pay", world.pay)

    store = MemoryStore()
    runtime = Runtime(store, workflows=[trip])
    await runtime.trigger(trip, run_id="t")
    world.is_broken = False
    with pytest.raises(Refused, match="rewind the run to that step, or retry the run"):
        await getattr(Operations(store), verb)("t", "pay", by="ana")
    await Operations(store).rewind("t", "room", by="ana")
    run = await runtime.resume("t")
    assert (run.output, world.events) == ("paid", ["room", "no room", "room"])
