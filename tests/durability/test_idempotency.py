"""One idempotency key has one result, across ids, processes, failures and crashes."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from perdure import Ok, Step, durable
from perdure.errors import AlreadyRunning, IdempotencyConflict, StoreError
from perdure.snapshot import Snapshot
from perdure.store import LeaseRequest
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

MINUTE = timedelta(minutes=1)
Call = Callable[..., Awaitable[Any]]


@pytest.fixture
def charges() -> list[str]:
    """Return a list with an item for each charge."""
    return []


@pytest.fixture
def pay(store: MemoryStore, clock: TestClock, charges: list[str]) -> Call:
    """Return a function that pays under the key `k`; `fail` makes the provider refuse, `slow` takes
    some time.
    """

    def call(*, fail: bool = False, slow: float = 0, **options: Any) -> Awaitable[Any]:
        async def charge() -> str:
            await clock.sleep(slow)
            charges.append("charge")
            if fail:
                raise ConnectionError("refused")
            return f"receipt {len(charges)}"

        async def body(step: Step) -> str:
            return await step("charge", charge)

        defaults: dict[str, Any] = {"id": "a", "store": store, "clock": clock}
        return durable.run({}, body, **{**defaults, "idempotency_key": "k", **options})

    return call


async def test_another_id_gets_the_same_result(pay: Call, charges: list[str]) -> None:
    """This holds even when the first run is deleted."""
    assert await pay(id="a") == await pay(id="b") == Ok("receipt 1")
    assert charges == ["charge"]


async def test_only_the_key_remains_in_the_store(pay: Call, store: MemoryStore) -> None:
    """The run is deleted as usual; with `keep=True` it is kept."""
    await pay(id="a")
    assert await store.load("a") is None
    await pay(id="b", idempotency_key="other", keep=True)
    assert await store.load("b") is not None


async def test_another_key_is_another_result(pay: Call) -> None:
    """Keys do not affect each other, however long they are."""
    long = "x" * 500
    assert await pay(idempotency_key=f"{long}1") == Ok("receipt 1")
    assert await pay(idempotency_key=f"{long}2") == Ok("receipt 2")


async def test_another_input_is_a_conflict(pay: Call, charges: list[str]) -> None:
    """Using a key with another input is a mistake of the caller."""
    await pay(input={"amount": 1})
    refused = await pay(input={"amount": 2})
    assert isinstance(refused.error, IdempotencyConflict)
    assert refused.error.key == "k"
    assert await pay(input={"amount": 1}) == await pay() == Ok("receipt 1")
    assert charges == ["charge"]


async def test_a_failure_does_not_block_the_key(pay: Call) -> None:
    """The next call with the key runs."""
    assert isinstance((await pay(fail=True)).error, ConnectionError)
    assert await pay() == Ok("receipt 2")
    assert await pay(id="b") == Ok("receipt 2")


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_crash_does_not_block_the_key_and_charges_once(
    store: MemoryStore, clock: TestClock, pay: Call, charges: list[str], how: How
) -> None:
    """After a crash at any store call, the same call returns a result, and recorded steps do not
    run again, even if the crash occurred between the end of the run and the record of the key.
    """
    for call in range(1, 100):
        charges.clear()
        options: Any = {"id": f"run {call}", "idempotency_key": f"key {call}"}
        dying = FaultyStore(store, fail_at=call, how=how, error=StoreError, stays_down=True)
        crashed = await pay(store=dying, **options)
        if not dying.failed:
            break
        recorded = await is_recorded(store, **options)
        await clock.advance(MINUTE)
        again = await pay(**options)
        assert again.ok
        assert not crashed.ok or again == crashed
        assert len(charges) <= (1 if recorded else 2)
    assert call > 6


async def is_recorded(store: MemoryStore, id: str, idempotency_key: str) -> bool:
    """Return whether the run's only step, or its result under the key, is stored."""
    run, key = await store.load(id), await store.load(f"idem:{idempotency_key}")
    completed = key is not None and key["execution"]["status"] == "completed"
    return completed or (run is not None and "charge" in run["steps"])


async def test_concurrent_calls_in_one_process_get_the_same_result(
    pay: Call, clock: TestClock, charges: list[str]
) -> None:
    """Calls that arrive while the first one runs wait for it."""
    calls = [asyncio.ensure_future(pay(id=id, slow=5)) for id in "abc"]
    await clock.advance(5)
    assert await asyncio.gather(*calls) == [Ok("receipt 1")] * 3
    assert charges == ["charge"]


async def test_a_concurrent_call_with_another_input_is_refused(pay: Call, clock: TestClock) -> None:
    first = asyncio.ensure_future(pay(slow=5, input=1))
    second = asyncio.ensure_future(pay(id="b", input=2))
    await clock.advance(5)
    assert await first == Ok("receipt 1")
    assert isinstance((await second).error, IdempotencyConflict)


async def test_the_next_waiting_call_runs_when_the_first_is_refused(
    pay: Call, store: MemoryStore, clock: TestClock
) -> None:
    await store.save("a", {"formatVersion": 1, "steps": {}, "execution": {
        "status": "running", "lastUpdated": "2030-01-01T00:00:00.000Z"}})  # fmt: skip
    await store.acquire([LeaseRequest("a", "another process", MINUTE)])
    refused, served = await asyncio.gather(pay(id="a"), pay(id="b"))
    assert isinstance(refused.error, AlreadyRunning)
    assert served == Ok("receipt 1")


async def test_cancelling_the_first_call_lets_the_next_one_run(
    pay: Call, clock: TestClock, charges: list[str]
) -> None:
    first = asyncio.ensure_future(pay(slow=5))
    second = asyncio.ensure_future(pay(id="b"))
    await clock.advance(1)
    first.cancel()
    assert await second == Ok("receipt 1")
    with pytest.raises(asyncio.CancelledError):
        await first
    assert charges == ["charge"]


async def test_a_key_that_another_process_uses_is_refused(
    pay: Call, store: MemoryStore, clock: TestClock, charges: list[str]
) -> None:
    """Calls do not wait for other processes: the error says that the work is done elsewhere."""
    elsewhere = MemoryStore(clock=clock, shares=store)
    first = asyncio.ensure_future(pay(slow=5))
    await clock.advance(0)
    refused = await pay(id="b", store=elsewhere)
    assert isinstance(refused.error, AlreadyRunning)
    assert refused.error.where == "elsewhere"
    await clock.advance(5)
    assert await pay(id="b", store=elsewhere) == await first == Ok("receipt 1")
    assert charges == ["charge"]


async def test_the_key_is_leased_while_the_run_is_executed(
    pay: Call, store: MemoryStore, clock: TestClock
) -> None:
    """Its lease is renewed with that of the run."""
    first = asyncio.ensure_future(pay(slow=600))
    await clock.advance(500)
    refused = await pay(id="b", store=MemoryStore(clock=clock, shares=store))
    assert isinstance(refused.error, AlreadyRunning)
    await clock.advance(100)
    assert (await first).ok


async def test_the_key_of_a_killed_process_is_free_when_its_lease_expires(
    pay: Call, store: MemoryStore, clock: TestClock
) -> None:
    marker = (b'{"formatVersion":1,"steps":{},"execution":{"status":"running",'
              b'"lastUpdated":"2030-01-01T00:00:00.000Z"}}')  # fmt: skip
    await store.acquire([LeaseRequest("idem:k", "killed", MINUTE, create=marker)])
    assert isinstance((await pay()).error, AlreadyRunning)
    await clock.advance(MINUTE)
    assert await pay() == Ok("receipt 1")


class FiveMethods:
    """A minimal store."""

    def __init__(self) -> None:
        self.runs: dict[str, Snapshot] = {}

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        self.runs[id] = snapshot

    async def load(self, id: str, /) -> Snapshot | None:
        return self.runs.get(id)

    async def delete(self, id: str, /) -> None:
        self.runs.pop(id, None)

    async def list(self, **options: Any) -> list[Any]:
        return []

    async def close(self) -> None: ...


async def test_five_methods_are_enough_for_a_key(pay: Call, charges: list[str]) -> None:
    """Without leases, a key is exclusive within the process, and its result is stored."""
    store = FiveMethods()
    first, second = await asyncio.gather(pay(store=store), pay(id="b", store=store))
    assert first == second == await pay(id="c", store=store) == Ok("receipt 1")
    assert list(store.runs) == ["idem:k"]
    assert charges == ["charge"]
