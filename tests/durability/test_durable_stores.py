"""`durable.run` on stores with few capabilities, and the functions that manage stored runs."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
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
    """A minimal store, as a user would write it. It declares no capabilities."""

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
        return loads(self.runs[id]) if id in self.runs else None

    async def delete(self, id: str, /) -> None:
        self.runs.pop(id, None)

    async def list(self, *, prefix: str = "", limit: int = 100) -> Sequence[RunSummary]:
        ids = [id for id in reversed(self.runs) if id.startswith(prefix)]
        return [RunSummary(id, datetime(2030, 1, 1, tzinfo=UTC)) for id in ids[:limit]]

    async def close(self) -> None: ...


@pytest.fixture
def five() -> Any:
    """Return the store, untyped: its `list` takes two options only."""
    return FiveMethods()


async def double(n: int) -> int:
    return n * 2


async def test_five_methods_are_enough(five: Any) -> None:
    """Steps are saved when they end; a failed run can be continued, a finished one is deleted."""
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
    """After a crash at any point, finished steps are in the store."""
    observations: list[list[str]] = []

    async def look() -> None:
        snapshot = await five.load("order")
        observations.append(list(snapshot["steps"]))

    async def body(step: Step) -> None:
        for n in range(3):
            await step(f"step {n}", look)

    await durable.run({}, body, id="order", store=five)
    assert observations == [[], ["step 0"], ["step 0", "step 1"]]


async def test_parallel_steps_share_saves_and_lose_none(five: Any) -> None:
    """Saves do not overtake each other, and steps that end during one are part of the next."""

    async def body(step: Step) -> list[int]:
        return await asyncio.gather(*(step(f"n{n}", double, n) for n in range(50)))

    result = await durable.run({}, body, id="order", store=five, keep=True)
    assert result == Ok([n * 2 for n in range(50)])
    assert len((await five.load("order"))["steps"]) == 50
    assert five.saves < 10


async def test_a_sleep_is_spent_in_memory(five: Any, clock: TestClock) -> None:
    """Waiting needs no schedule; the deadline is saved."""

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


async def test_a_missing_capability_is_an_error(five: Any) -> None:
    """Events need an inbox, and transactions a database: the error names what is missing."""

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
async def test_an_exception_of_a_store_is_returned_as_a_store_error(five: Any, verb: str) -> None:
    """The error says what the store was doing. A delete that fails after the work is done does not
    undo it.
    """

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
    """A run that failed has state; one that never existed has none."""
    await failed_run("order", any_store)
    assert await durable.has_state(any_store, "order")
    assert not await durable.has_state(any_store, "other")


async def test_delete_state(any_store: Any) -> None:
    """The run is deleted, and the function returns whether there was one."""
    await failed_run("order", any_store)
    assert await durable.delete_state(any_store, "order")
    assert not await durable.delete_state(any_store, "order")
    assert not await durable.has_state(any_store, "order")


async def test_delete_states(any_store: Any) -> None:
    """Many runs are deleted at once, and no error is returned."""
    for n in range(25):
        await failed_run(f"order-{n}", any_store)
    delete = [f"order-{n}" for n in range(20)]
    assert await durable.delete_states(any_store, [*delete, "unknown"], concurrency=3) == {}
    pending_ids = {line.id for line in await durable.list_pending(any_store)}
    assert pending_ids == {f"order-{n}" for n in range(20, 25)}


async def test_delete_states_returns_the_errors() -> None:
    """One failure does not keep the others from being deleted."""
    store = MemoryStore()
    for id in ("a", "b", "c"):
        await failed_run(id, store)
    faulty: Any = FaultyStore(store, fail_at=2, verbs={"delete"})
    failed = await durable.delete_states(faulty, ["a", "b", "c"], concurrency=1)
    assert [(id, type(error)) for id, error in failed.items()] == [("b", StoreUnavailable)]
    assert [line.id for line in await store.list()] == ["b"]


async def test_list_pending(any_store: Any) -> None:
    """It returns runs that can be continued: neither finished ones nor the records of keys."""

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


async def test_list_pending_skips_any_number_of_finished_runs() -> None:
    store = MemoryStore()
    await failed_run("waits", store)

    async def fine(step: Step) -> None: ...

    for n in range(250):
        await durable.run({}, fine, id=f"done-{n}", store=store, keep=True)
    assert [line.id for line in await durable.list_pending(store, limit=10)] == ["waits"]


async def test_clear_state(any_store: Any) -> None:
    """All runs are deleted, whatever their status."""
    for n in range(120):
        await failed_run(f"order-{n}", any_store)
    assert await durable.clear_state(any_store) == 120
    assert list(await any_store.list()) == []


async def test_clear_state_deletes_only_runs_with_the_prefix_of_the_store() -> None:
    whole = MemoryStore()
    await failed_run("mine:1", whole)
    await failed_run("theirs:1", whole)
    assert await durable.clear_state(MemoryStore(prefix="mine:", shares=whole)) == 1
    assert [line.id for line in await whole.list()] == ["theirs:1"]
