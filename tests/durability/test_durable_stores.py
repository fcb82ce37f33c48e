"""`durable.run` on stores that can little, and the helpers that look after stored runs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Ok, Runtime, Step, durable
from perdure.codec import dumps, loads
from perdure.errors import MissingAbility, StoreError, StoreUnavailable
from perdure.snapshot import Snapshot
from perdure.store import RunSummary
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore


class FiveMethods:
    """A store as a user would write it in ten minutes: it declares nothing."""

    def __init__(self) -> None:
        self.runs: dict[str, bytes] = {}
        self.saving = 0
        self.saves = 0

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        self.saving += 1
        self.saves += 1
        assert self.saving == 1, "two saves of one run at once may overtake each other"
        for _ in range(3):
            await asyncio.sleep(0)
        self.runs[id] = dumps(snapshot)
        self.saving -= 1

    async def load(self, id: str, /) -> Snapshot | None:
        return loads(self.runs[id]) if id in self.runs else None  # type: ignore[no-any-return]

    async def delete(self, id: str, /) -> None:
        self.runs.pop(id, None)

    async def list(self, *, prefix: str = "", limit: int = 100) -> Sequence[RunSummary]:
        ids = [id for id in reversed(self.runs) if id.startswith(prefix)]
        return [RunSummary(id, "2030-01-01T00:00:00.000Z") for id in ids[:limit]]

    async def close(self) -> None: ...


@pytest.fixture
def five() -> Any:
    """Untyped: the store is the user's, and its `list` knows two options only."""
    return FiveMethods()


async def double(n: int) -> int:
    return n * 2


async def test_five_methods_are_enough(five: Any) -> None:
    """Steps are saved as they end; a failed run is gone on with, a finished one deleted."""
    broken = True
    ran: list[str] = []

    async def first() -> int:
        ran.append("first")
        return 1

    async def second(n: int) -> int:
        ran.append("second")
        if broken:
            raise ConnectionError
        return n + 1

    async def body(step: Step) -> int:
        return await step("second", second, await step("first", first))

    assert not (await durable.run({}, body, id="order", store=five)).ok
    broken = False
    assert await durable.run({}, body, id="order", store=five) == Ok(2)
    assert ran == ["first", "second", "second"]
    assert five.runs == {}


async def test_every_step_is_saved_before_the_next_begins(five: Any) -> None:
    """A kill at any point finds what was finished in the store."""
    seen: list[list[str]] = []

    async def look() -> None:
        snapshot = await five.load("order")
        seen.append(list(snapshot["steps"]))

    async def body(step: Step) -> None:
        for n in range(3):
            await step(f"step {n}", look)

    await durable.run({}, body, id="order", store=five)
    assert seen == [[], ["step 0"], ["step 0", "step 1"]]


async def test_parallel_steps_share_saves_and_lose_none(five: Any) -> None:
    """Saves never overtake each other, and what ended meanwhile goes with the next one."""

    async def body(step: Step) -> list[int]:
        return await asyncio.gather(*(step(f"n{n}", double, n) for n in range(50)))

    result = await durable.run({}, body, id="order", store=five, keep=True)
    assert result == Ok([n * 2 for n in range(50)])
    assert len((await five.load("order"))["steps"]) == 50
    assert five.saves < 10


async def test_a_sleep_is_spent_in_memory(five: Any, clock: TestClock) -> None:
    """No schedule is needed to wait; the deadline is saved."""

    async def body(step: Step) -> str:
        await step.sleep("nap", "1h")
        return "rested"

    options: Any = {"id": "order", "store": five, "clock": clock}
    first = asyncio.ensure_future(durable.run({}, body, **options))
    await clock.advance("50m")
    first.cancel()
    await asyncio.wait([first])
    again = asyncio.ensure_future(durable.run({}, body, **options))
    await clock.advance("10m")
    assert await again == Ok("rested")


async def test_what_a_store_cannot_do_fails_at_once(five: Any) -> None:
    """Events need an inbox and transactions a database: the error names ability and need."""

    async def waits(step: Step) -> Any:
        return await step.wait_for_event("approval", "approved")

    async def transacts(step: Step) -> Any:
        return await step.transaction("move", double)

    for body, ability in ((waits, "inbox"), (transacts, "transaction")):
        result: Any = await durable.run({}, body, id=ability, store=five)
        assert isinstance(result.error, MissingAbility)
        assert result.error.ability == ability
    with pytest.raises(
        MissingAbility, match=r"FiveMethods has no 'journal' ability, which Runtime"
    ):
        Runtime(five)


@pytest.mark.parametrize("verb", ["save", "load", "delete"])
async def test_a_failing_store_is_an_outcome(five: Any, verb: str) -> None:
    """What a user's store raises comes as `StoreError` that says what was being done; a delete
    after the work is done does not undo it."""

    async def fail(*_: object) -> None:
        raise OSError("disk full")

    async def body(step: Step) -> int:
        return await step("double", double, 2)

    setattr(five, verb, fail)
    result: Any = await durable.run({}, body, id="order", store=five)
    if verb == "delete":
        assert result == Ok(4)
        return
    assert isinstance(result.error, StoreError)
    assert str(result.error) == f"FiveMethods could not {verb} run 'order': disk full"


async def failed_run(id: str, store: Any) -> None:
    async def body(step: Step) -> None:
        await step("one", double, 1)
        raise RuntimeError("later")

    await durable.run({}, body, id=id, store=store)


@pytest.fixture(params=["memory", "five methods"])
def any_store(request: pytest.FixtureRequest) -> Any:
    return MemoryStore() if request.param == "memory" else FiveMethods()


async def test_has_state(any_store: Any) -> None:
    """A run that failed is there, one that never was is not."""
    await failed_run("order", any_store)
    assert await durable.has_state(any_store, "order")
    assert not await durable.has_state(any_store, "other")


async def test_delete_state(any_store: Any) -> None:
    """The run is gone; the answer says whether there was one."""
    await failed_run("order", any_store)
    assert await durable.delete_state(any_store, "order")
    assert not await durable.delete_state(any_store, "order")
    assert not await durable.has_state(any_store, "order")


async def test_delete_states(any_store: Any) -> None:
    """Many at once; nothing is told where nothing went wrong."""
    for n in range(25):
        await failed_run(f"order-{n}", any_store)
    delete = [f"order-{n}" for n in range(20)]
    assert await durable.delete_states(any_store, [*delete, "unknown"], concurrency=3) == {}
    left = {line.id for line in await durable.list_pending(any_store)}
    assert left == {f"order-{n}" for n in range(20, 25)}


async def test_delete_states_tells_what_could_not_be_deleted() -> None:
    """One failure keeps no other from being deleted."""
    store = MemoryStore()
    for id in ("a", "b", "c"):
        await failed_run(id, store)
    faulty: Any = FaultyStore(store, fail_at=2, verbs={"delete"})
    failed = await durable.delete_states(faulty, ["a", "b", "c"], concurrency=1)
    assert [(id, type(error)) for id, error in failed.items()] == [("b", StoreUnavailable)]
    assert [line.id for line in await store.list()] == ["b"]


async def test_list_pending(any_store: Any) -> None:
    """Runs that wait to be gone on with: not finished ones, not records of keys."""

    async def fine(step: Step) -> int:
        return await step("one", double, 1)

    await failed_run("orders:1", any_store)
    await failed_run("orders:2", any_store)
    await failed_run("other", any_store)
    await durable.run({}, fine, id="kept", store=any_store, keep=True)
    await durable.run({}, fine, id="keyed", store=any_store, idempotency_key="k")
    ids = [line.id for line in await durable.list_pending(any_store)]
    assert ids == ["other", "orders:2", "orders:1"]
    orders = await durable.list_pending(any_store, prefix="orders:", limit=1)
    assert [line.id for line in orders] == ["orders:2"]


async def test_list_pending_looks_past_finished_runs() -> None:
    """However many finished runs are newer, the one that waits is found."""
    store = MemoryStore()
    await failed_run("waits", store)

    async def fine(step: Step) -> None: ...

    for n in range(250):
        await durable.run({}, fine, id=f"done-{n}", store=store, keep=True)
    assert [line.id for line in await durable.list_pending(store, limit=10)] == ["waits"]


async def test_clear_state(any_store: Any) -> None:
    """Everything goes, whatever became of it."""
    for n in range(120):
        await failed_run(f"order-{n}", any_store)
    assert await durable.clear_state(any_store) == 120
    assert list(await any_store.list()) == []


async def test_clear_state_keeps_to_the_stores_prefix() -> None:
    """A store with a prefix clears its own runs and nobody else's."""
    whole = MemoryStore()
    await failed_run("mine:1", whole)
    await failed_run("theirs:1", whole)
    assert await durable.clear_state(MemoryStore(prefix="mine:", shares=whole)) == 1
    assert [line.id for line in await whole.list()] == ["theirs:1"]
