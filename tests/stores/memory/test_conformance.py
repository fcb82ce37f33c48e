"""MemoryStore passes the conformance kit and has a few properties of its own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta, timezone

import pytest

from perdure.errors import CodecError, InvalidArgument, StoreClosed, StoreCorrupted
from perdure.store import Entry, LeaseRequest, NewRun, Refusal, Rest, Store
from perdure.stores.memory import MemoryStore, MemoryTransaction
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import (
    acquire_run,
    append_entries,
    send_one,
    step,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.faults import FaultyStore
from tests.stores.kit_parts import ClockConformance

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class TestMemoryStore(StoreConformance):
    """With a clock that the checks advance."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        self.clock = TestClock()
        async with MemoryStore(clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MemoryStore:
        assert isinstance(store, MemoryStore)
        assert self.clock is not None
        return MemoryStore(prefix=prefix, clock=self.clock, shares=store)

    async def crashing(self, store: Store, writes: int) -> Store:
        return FaultyStore(store, fail_at=writes + 1, verbs={"append"})

    async def user_write(self, connection: MemoryTransaction, note: str) -> None:
        connection[note] = True

    async def user_notes(self, store: Store) -> Sequence[str]:
        assert isinstance(store, MemoryStore)
        return list(store.table)


class TestMemoryStoreInRealTime(ClockConformance):
    """With the system clock."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        async with MemoryStore() as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MemoryStore:
        assert isinstance(store, MemoryStore)
        return MemoryStore(prefix=prefix, shares=store)


async def test_a_value_that_is_not_json_is_refused() -> None:
    """It fails as with a database, and the stored run does not change."""
    store = MemoryStore()
    await store.save("run", snapshot("a"))
    with pytest.raises(CodecError):
        await store.save("run", snapshot(b=object()))
    assert await store.load("run") == snapshot("a")


async def test_every_method_of_a_closed_store_raises_store_closed() -> None:
    """No method works after `close`."""
    store = MemoryStore()
    grant = await acquire_run(store)
    await store.close()
    calls = [
        store.save("run", snapshot()),
        store.load("run"),
        store.delete("run"),
        store.list(),
        store.append([step(grant, 1, "a")]),
        store.acquire([LeaseRequest("run", "ana", MINUTE)]),
        store.renew([grant.lease], MINUTE),
        store.release([grant.lease]),
        store.enqueue([NewRun("b", "order", as_json(snapshot()))]),
        store.due(NOON, 1),
        store.claim("ana", MINUTE, 1),
        send_one(store, "run", "paid", b"1"),
        store.inbox("run"),
        store.prune(MINUTE),
        store.stats(),
        anext(store.notifications()),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            await call


async def test_closing_a_store_keeps_the_others_that_share_its_runs() -> None:
    """Shared runs belong to all of the stores."""
    one = MemoryStore()
    two = MemoryStore(shares=one)
    await one.save("run", snapshot("a"))
    await one.close()
    assert await two.load("run") == snapshot("a")


async def test_an_unreadable_run_is_named_and_can_be_deleted() -> None:
    """The error names the run, which cannot be leased."""
    store = MemoryStore()
    await store.enqueue([NewRun("bad", "order", b"{not json")])
    with pytest.raises(StoreCorrupted, match="bad"):
        await store.load("bad")
    [refusal] = await store.acquire([LeaseRequest("bad", "ana", MINUTE)])
    assert isinstance(refusal, Refusal)
    assert "bad" in refusal.error
    assert await store.delete("bad")


async def test_a_naive_datetime_is_refused() -> None:
    """Without a time zone it would be a different time on another machine."""
    store = MemoryStore()
    grant = await acquire_run(store)
    naive = datetime(2030, 1, 1)
    with pytest.raises(InvalidArgument):
        await store.due(naive, 1)
    with pytest.raises(InvalidArgument):
        await store.release([grant.lease], wake_at=naive)
    with pytest.raises(InvalidArgument):
        await store.enqueue([NewRun("new", "order", as_json(snapshot()), naive)])
    with pytest.raises(InvalidArgument):
        await write_rest(store, grant, Rest("suspended", naive), "a")
    assert await store.load("new") is None
    assert await store.load("run") == snapshot()


async def test_wake_times_are_returned_in_utc() -> None:
    """Whatever the time zone in which they were passed."""
    store = MemoryStore(clock=(clock := TestClock()))
    wake_at = clock.now().astimezone(timezone(timedelta(hours=2)))
    await store.enqueue([NewRun("new", "order", as_json(snapshot()), wake_at)])
    await write_rest(store, await acquire_run(store), Rest("suspended", wake_at))
    due = await store.due(clock.now(), 10)
    assert [(run.wake_at, run.wake_at.tzinfo) for run in due] == [(clock.now(), UTC)] * 2


async def test_an_invalid_cursor_is_refused() -> None:
    """`after` must be the cursor of a listed run."""
    with pytest.raises(InvalidArgument, match="after"):
        await MemoryStore().list(after="page 2")


async def next_notification(notifications: AsyncIterator[None]) -> "asyncio.Task[None]":
    """Return a task that waits for the next notification."""

    async def wait() -> None:
        await anext(notifications)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return waiting


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_listener_that_leaves_is_forgotten(how: str) -> None:
    """Whether its task is cancelled or its iterator is closed, nothing is left in the store."""
    store = MemoryStore()
    notifications = store.notifications()
    waiting = await next_notification(notifications)
    await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
    await waiting
    if how == "cancelled":
        waiting = await next_notification(notifications)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    else:
        assert isinstance(notifications, AsyncGenerator)
        await notifications.aclose()
    assert not store._backend.runs.listeners


async def test_notifications_end_when_the_store_is_closed() -> None:
    """Those of another store with the same runs continue."""
    one = MemoryStore()
    two = MemoryStore(shares=one)
    ended = await next_notification(one.notifications())
    continued = two.notifications()
    waiting = await next_notification(continued)
    await one.close()
    with pytest.raises(StopAsyncIteration):
        await ended
    await asyncio.wait([waiting], timeout=1)
    waiting = await next_notification(continued)
    await two.enqueue([NewRun("run", "order", as_json(snapshot()))])
    await asyncio.wait_for(waiting, 1)


async def test_notifications_are_sent_for_due_runs_and_not_for_sleeping_ones() -> None:
    """A release and a rest with a past wake time notify; one with a later wake time does not."""
    store = MemoryStore(clock=(clock := TestClock()))
    notifications = store.notifications()
    for is_due in (True, False, True):
        waiting = await next_notification(notifications)
        wake_at = clock.now() if is_due else clock.now() + MINUTE
        await write_rest(store, await acquire_run(store), Rest("suspended", wake_at))
        await asyncio.sleep(0)
        assert waiting.done() == is_due
        if not is_due:
            await store.release([(await acquire_run(store)).lease])
        await waiting


async def test_an_append_does_not_touch_previous_entries() -> None:
    """An append costs the same however long the run is."""
    store = MemoryStore()
    grant = await acquire_run(store)
    await append_entries(store, *(step(grant, n, f"{n}") for n in range(5_000)))
    run = store._backend.runs.get("run")
    assert run is not None
    before = {position: id(data) for position, data in run.journal.items()}
    await store.append([Entry("run", grant.lease.epoch, 5_000, as_json(snapshot("last")))])
    assert len(run.journal) == 5_001
    assert all(id(run.journal[position]) == data_id for position, data_id in before.items())
