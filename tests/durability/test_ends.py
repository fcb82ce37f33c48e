"""A run that is over stays over, and a retry is not lost, despite crashes and concurrent calls."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import StoreError
from perdure.runtime.definition import Definition
from perdure.store import Grant, LeaseRequest
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

TTL = timedelta(seconds=30)


class Overtaken(FaultyStore):
    """A store that calls a function right after one call of a verb has returned."""

    def __init__(
        self, store: MemoryStore, verb: str, happens: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(store)
        self._verb = verb
        self._happens: Callable[[], Awaitable[Any]] | None = happens

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        answer = await super()._pass(verb, *arguments, **options)
        if verb == self._verb and (happens := self._happens) is not None:
            self._happens = None
            await happens()
        return answer


@pytest.fixture
def calls() -> list[str]:
    """Return a list with an item for each call of the function."""
    return []


@pytest.fixture
def napping(calls: list[str]) -> Definition[Any, Any]:
    @workflow("napping")
    async def napping(step: Step) -> str:
        calls.append("called")
        await step.sleep("nap", "1h")
        return "rested"

    return napping


Make = Callable[..., Runtime]


@pytest.fixture
def make(store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]) -> Make:
    def make(on: Any = store, *more: Definition[Any, Any], **options: Any) -> Runtime:
        workflows = [napping, *more]
        return Runtime(on, workflows=workflows, clock=clock, lease_ttl=TTL, **options)

    return make


async def test_a_cancel_does_not_undo_a_run_that_has_just_completed(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    """The run was not over when it was read, and is when the lease is acquired."""
    await make().trigger(napping, run_id="run")
    await clock.advance("1h")
    runtime = make(Overtaken(store, "load", lambda: make().resume("run")))
    run = await runtime.cancel("run", reason="too late")
    assert (run.status, run.output) == ("completed", "rested")


async def test_a_resume_does_not_revive_a_run_that_was_just_cancelled(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    await make().trigger(napping, run_id="run")
    await clock.advance("1h")
    runtime = make(Overtaken(store, "load", lambda: make().cancel("run", reason="enough")))
    assert (await runtime.resume("run")).status == "cancelled"
    stored = await make().get_run("run")
    assert stored is not None
    assert (stored.status, stored.error.reason) == ("cancelled", "enough")
    assert list(await store.due(clock.now() + TTL * 10, 10)) == []


async def test_a_sweep_does_not_execute_a_run_that_another_process_has_ended(
    make: Make,
    store: MemoryStore,
    clock: TestClock,
    napping: Definition[Any, Any],
    calls: list[str],
) -> None:
    """Two concurrent sweeps see the same due runs; each run is executed by one of them."""
    await make().trigger(napping, run_id="run")
    await clock.advance("1h")
    runtime = make(Overtaken(store, "due", lambda: make().sweep()))
    await runtime.sweep()
    assert calls == ["called", "called"]
    (line,) = await store.list()
    assert line.status == "completed"


async def test_a_run_that_is_over_does_not_change_when_its_owner_crashes(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    """A process that acquired it needlessly and crashed changes nothing."""
    runtime = make()
    await runtime.trigger(napping, run_id="run")
    await runtime.cancel("run")
    before = await store.load("run")
    dying = FaultyStore(store, fail_at=1, verbs={"append"}, error=StoreError, stays_down=True)
    (grant,) = await store.acquire([runtime.driver.request("run")])
    assert isinstance(grant, Grant)
    async with make(dying).session() as session:
        with pytest.raises(StoreError):
            await make(dying).driver.continue_run(session, grant)
    await clock.advance(TTL)
    await runtime.sweep()
    assert await store.load("run") == before
    assert list(await store.due(clock.now() + TTL * 10, 10)) == []


async def test_a_lease_is_not_renewed_after_a_failed_write(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    """A run that could not be settled becomes available when its lease expires, even while the
    process continues.
    """
    runtime = make()
    await runtime.trigger(napping, run_id="run")
    faulty = FaultyStore(store, fail_at=1, verbs={"append"}, error=StoreError)
    shaky = make(faulty)
    async with shaky.session():
        with pytest.raises(StoreError):
            await shaky.cancel("run")
        await clock.advance(TTL * 3)
        assert (await runtime.cancel("run")).status == "cancelled"


async def test_a_cancel_that_arrives_while_a_run_is_suspended_is_seen(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    """The owner suspends the run without having read the message; the run is then due at once."""
    canceller = make()
    cancellations: list[asyncio.Future[Any]] = []

    class Resting(FaultyStore):
        async def append(self, entries: Any, /) -> Any:
            if entries[0].rest is not None and not cancellations:
                cancellations.append(
                    asyncio.ensure_future(canceller.cancel("run", reason="enough"))
                )
                await cancellations[0]
            return await self._pass("append", entries)

    run = await make(Resting(store)).trigger(napping, run_id="run")
    assert run.status == "suspended"
    (run,) = await make().sweep()
    assert run.status == "cancelled"


async def test_a_cancel_that_loses_its_lease_leaves_a_request_for_the_new_owner(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    """A process is paused between acquiring the run and writing."""
    await make().trigger(napping, run_id="run")

    async def oversleep() -> None:
        await clock.advance(TTL)
        await store.acquire([LeaseRequest("run", "another", TTL)])

    runtime = make(Overtaken(store, "acquire", oversleep))
    assert (await runtime.cancel("run", reason="enough")).status == "running"
    await clock.advance(TTL)
    (run,) = await make().sweep()
    assert run.status == "cancelled"


@pytest.fixture
def effects() -> list[str]:
    return []


@pytest.fixture
def shaky(effects: list[str]) -> Definition[Any, Any]:
    """Return a workflow that handles one failure, fails with another, and succeeds when retried."""

    async def note(text: str) -> str:
        effects.append(text)
        return text

    async def refuse() -> None:
        effects.append("refuse")
        raise ValueError("no")

    async def late() -> str:
        effects.append("late")
        if effects.count("late") == 1:
            raise ConnectionError("down")
        return "up"

    @workflow("shaky")
    async def shaky(step: Step) -> str:
        await step("first", note, "first")
        try:
            await step("refused", refuse)
        except ValueError:
            await step("instead", note, "instead")
        value = await step("late", late)
        await step("last", note, "last")
        return value

    return shaky


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_retry_survives_a_crash_at_any_store_call(
    clock: TestClock, shaky: Definition[Any, Any], effects: list[str], how: How
) -> None:
    """Once the retry is stored it continues; recorded steps do not run again, and the handled
    failure stays recorded.
    """
    for call in range(1, 100):
        effects.clear()
        store = MemoryStore(clock=clock)
        runtime = Runtime(store, workflows=[shaky], clock=clock, lease_ttl=TTL)
        assert (await runtime.trigger(shaky, run_id="run")).status == "failed"
        dying = FaultyStore(store, fail_at=call, how=how, error=StoreError, stays_down=True)
        crashed = await outcome(
            Runtime(dying, workflows=[shaky], clock=clock, lease_ttl=TTL).retry("run")
        )
        if not dying.failed:
            break
        await clock.advance(TTL)
        await runtime.sweep()
        run = await runtime.retry("run")
        assert (run.status, run.output) == ("completed", "up"), crashed
        assert [effects.count(name) for name in ("first", "refuse", "instead")] == [1, 1, 1]
    assert call > 5


async def outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except StoreError as error:
        return error


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_migration_survives_a_crash_at_any_store_call(
    clock: TestClock, effects: list[str], how: How
) -> None:
    """It is applied once: what the new version records is never migrated as if it were old."""

    async def note(text: str) -> str:
        effects.append(text)
        return text

    @workflow("moved", version=1)
    async def old(step: Step) -> None:
        await step("one", note, "one")
        await step.sleep("nap", "1h")

    def migrate(snapshot: Any, version: int) -> Any:
        assert list(snapshot["steps"]) == ["one"], "migrated a second time"
        steps = {"uno": snapshot["steps"]["one"]}
        return {**snapshot, "steps": steps}

    @workflow("moved", version=2, migrate=migrate)
    async def new(step: Step) -> str:
        await step("uno", note, "one")
        await step("dos", note, "dos")
        await step.sleep("nap", "1h")
        return await step("tres", note, "tres")

    for call in range(1, 100):
        effects.clear()
        store = MemoryStore(clock=clock)
        options: Any = {"clock": clock, "lease_ttl": TTL}
        await Runtime(store, workflows=[old], **options).trigger(old, run_id="run")
        await clock.advance("1h")
        dying = FaultyStore(store, fail_at=call, how=how, error=StoreError, stays_down=True)
        await outcome(Runtime(dying, workflows=[new], **options).resume("run"))
        if not dying.failed:
            break
        await clock.advance(TTL)
        runtime = Runtime(store, workflows=[new], **options)
        await runtime.sweep()
        run = await runtime.resume("run")
        assert (run.status, run.version, run.output) == ("completed", 2, "tres")
        assert effects.count("one") == 1
    assert call > 5


async def test_a_cancel_before_a_retry_does_not_end_the_retry(
    make: Make, store: MemoryStore, clock: TestClock, shaky: Definition[Any, Any]
) -> None:
    """A request that was sent before the run failed does not cancel its retry."""
    runtime = make(store, shaky)

    class Asked(FaultyStore):
        async def append(self, entries: Any, /) -> Any:
            if entries[0].step == "late":
                await runtime.cancel("run")
            return await self._pass("append", entries)

    run = await make(Asked(store), shaky).trigger(shaky, run_id="run")
    assert run.status == "failed"
    assert (await runtime.retry("run")).status == "completed"


async def test_a_second_cancel_is_not_dropped_as_a_duplicate(
    make: Make, store: MemoryStore, clock: TestClock, napping: Definition[Any, Any]
) -> None:
    gate = asyncio.Event()

    @workflow("gated")
    async def gated(step: Step) -> None:
        await step("gate", gate.wait)

    elsewhere = make(MemoryStore(clock=clock, shares=store), gated)
    driving = asyncio.ensure_future(make(store, gated).trigger(gated, run_id="run"))
    await clock.advance(0)
    for _ in range(2):
        assert (await elsewhere.cancel("run")).status == "running"
    await clock.advance(TTL / 3)
    assert (await driving).status == "cancelled"
