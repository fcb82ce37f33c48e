"""MemoryStore keeps the whole contract, and a few promises of its own."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from perdure.errors import CodecError, InvalidArgument, StoreClosed, StoreCorrupted
from perdure.store import Entry, LeaseRequest, NewRun, Rest, Store
from perdure.stores.memory import MemoryStore
from perdure.stores.memory.due_index import Agenda, Planned
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import appended, granted, rested, step
from perdure.testing.conformance.samples import as_json, snapshot
from perdure.testing.faults import FaultyStore

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


class TestMemoryStore(StoreConformance):
    """On a clock that the checks move."""

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


class TestMemoryStoreInRealTime(StoreConformance):
    """On the clock of this machine."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        async with MemoryStore() as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MemoryStore:
        assert isinstance(store, MemoryStore)
        return MemoryStore(prefix=prefix, shares=store)


async def test_what_json_cannot_hold_is_refused() -> None:
    """It fails where a database would, and what was there stays."""
    store = MemoryStore()
    await store.save("run", snapshot("a"))
    with pytest.raises(CodecError):
        await store.save("run", snapshot(b=object()))
    assert await store.load("run") == snapshot("a")


async def test_every_verb_says_that_the_store_is_closed() -> None:
    """A closed store answers nothing."""
    store = MemoryStore()
    grant = await granted(store)
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
        store.send("run", "paid", b"1"),
        store.inbox("run"),
        store.prune(MINUTE),
        store.stats(),
        anext(store.notifications()),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            await call


async def test_stores_that_share_go_on_when_one_is_closed() -> None:
    """What is shared belongs to all of them."""
    one = MemoryStore()
    two = MemoryStore(shares=one)
    await one.save("run", snapshot("a"))
    await one.close()
    assert await two.load("run") == snapshot("a")


async def test_a_run_that_cannot_be_read_says_which_it_is() -> None:
    """And it stays as it is: nobody gets a lease for it."""
    store = MemoryStore()
    await store.enqueue([NewRun("bad", "order", b"{not json")])
    for attempt in (store.load("bad"), store.acquire([LeaseRequest("bad", "ana", MINUTE)])):
        with pytest.raises(StoreCorrupted, match="bad"):
            await attempt
    await store.delete("bad")


async def test_a_naive_time_is_refused() -> None:
    """Times are aware: one without a zone would be another moment elsewhere."""
    store = MemoryStore()
    grant = await granted(store)
    naive = datetime(2030, 1, 1)
    with pytest.raises(InvalidArgument):
        await store.due(naive, 1)
    with pytest.raises(InvalidArgument):
        await store.release([grant.lease], wake_at=naive)
    with pytest.raises(InvalidArgument):
        await store.enqueue([NewRun("new", "order", as_json(snapshot()), naive)])
    assert await store.load("new") is None


async def test_a_cursor_that_is_none_is_refused() -> None:
    """`after` is the cursor of a line, and nothing else."""
    with pytest.raises(InvalidArgument, match="after"):
        await MemoryStore().list(after="page 2")


async def test_a_listener_that_leaves_is_forgotten() -> None:
    """Each `notifications()` hears of what comes while it listens, and leaves nothing behind."""
    store = MemoryStore()
    hints = store.notifications()
    waiting = asyncio.ensure_future(anext(hints))
    await asyncio.sleep(0)
    await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
    await waiting
    waiting = asyncio.ensure_future(anext(hints))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not store._shelf.listeners


async def test_hints_come_for_what_is_due_and_not_for_what_sleeps() -> None:
    """A release, an awaited event and a rest that is runnable are hints; a sleep is none."""
    store = MemoryStore(clock=(clock := TestClock()))
    hints = store.notifications()
    for wakes in (True, False, True):
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        wake_at = clock.now() if wakes else clock.now() + MINUTE
        await rested(store, await granted(store), Rest("suspended", wake_at))
        await asyncio.sleep(0)
        assert waiting.done() == wakes
        if not wakes:
            await store.release([(await granted(store)).lease])
        await waiting


def test_the_agenda_stays_as_small_as_what_is_on_it() -> None:
    """Runs that are filed again and again leave no lines behind, though nobody asks what is due."""
    agenda: Agenda[Planned] = Agenda()
    runs = [Planned(id=f"{number}") for number in range(10)]
    for turn in range(10_000):
        run = runs[turn % 10]
        run.wake_at = NOON + turn * MINUTE
        agenda.put(run)
    (lane,) = agenda._lanes.values()
    assert len(lane._lines) <= 64
    due = agenda.due(NOON + 20_000 * MINUTE, 100, None, "")
    assert [run.id for run in due] == [f"{number}" for number in range(10)]


def test_the_agenda_forgets_what_is_dropped() -> None:
    """A run that is dropped, or that never wakes, is not due."""
    agenda: Agenda[Planned] = Agenda()
    dropped, patient = Planned(id="a", wake_at=NOON), Planned(id="b", wake_at=NOON)
    agenda.put(dropped)
    agenda.put(patient)
    agenda.drop(dropped)
    patient.wake_at = None
    agenda.put(patient)
    assert agenda.due(NOON, 10, None, "") == []


async def test_an_append_costs_the_same_however_long_the_run_is() -> None:
    """One entry more is one entry more: what was there is not touched."""
    store = MemoryStore()
    grant = await granted(store)
    await appended(store, *(step(grant, n, f"{n}") for n in range(5_000)))
    journal = store._runs["run"].journal
    before = {place: id(data) for place, data in journal.items()}
    await store.append([Entry("run", grant.lease.epoch, 5_000, as_json(snapshot("last")))])
    assert len(journal) == 5_001
    assert all(id(journal[place]) == seen for place, seen in before.items())
