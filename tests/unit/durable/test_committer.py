"""The group committer: gathered, ordered, isolated, bounded, drained."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from perdure.durable.committer import BatchQueue, Committer
from perdure.errors import StoreClosed, StoreError, StoreUnavailable, ValueTooLarge
from perdure.store import Entry, LeaseRequest, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore

NOW = b'"2030-01-01T00:00:00.000Z"'
RUNNING = b'{"status":"running","lastUpdated":%b}' % NOW
FIRST = b'{"formatVersion":1,"steps":{},"execution":%b}' % RUNNING
MINUTE = timedelta(minutes=1)


def delta(key: str) -> bytes:
    steps = b'{"%b":{"ok":true,"value":1,"at":%b}}' % (key.encode(), NOW)
    return b'{"formatVersion":1,"steps":%b,"execution":%b}' % (steps, RUNNING)


class Gate:
    """A sender that notes its batches and answers when let."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, requests: Sequence[int]) -> list[int]:
        self.batches.append(list(requests))
        await self.open.wait()
        return [request * 10 for request in requests]


async def test_what_comes_while_a_write_is_in_flight_goes_out_together_in_order() -> None:
    """One write is in flight at a time; the next takes all that gathered, in order."""
    gate = Gate()
    gate.open.clear()
    lane: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    waiting = [asyncio.ensure_future(lane.submit(n)) for n in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(lane.submit(n)) for n in range(6, 9)]
    gate.open.set()
    assert await asyncio.gather(*waiting, *late) == [n * 10 for n in range(9)]
    assert [n for batch in gate.batches for n in batch] == list(range(9))
    assert len(gate.batches) <= 3
    await lane.close()


async def test_a_cancelled_waiter_leaves_no_hole() -> None:
    """Who gave up waiting has written all the same, in its place."""
    gate = Gate()
    gate.open.clear()
    lane: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    first, second, third = (asyncio.ensure_future(lane.submit(n)) for n in (1, 2, 3))
    await asyncio.sleep(0)
    second.cancel()
    gate.open.set()
    assert (await first, await third) == (10, 30)
    await lane.close()
    assert [n for batch in gate.batches for n in batch] == [1, 2, 3]


async def test_one_poisonous_entry_harms_only_itself() -> None:
    """A batch that fails is tried one by one."""
    store = MemoryStore(max_value_size=400)
    committer = Committer(store, store)
    grants = await asyncio.gather(
        *(committer.acquire(LeaseRequest(f"run{n}", "me", MINUTE, create=FIRST)) for n in range(3))
    )
    sizes = [b"a" * 10, b"b" * 1000, b"c" * 10]
    entries = [
        Entry(grant.lease.id, grant.lease.epoch, 1, delta(data.decode()), step="big")
        for grant, data in zip(grants, sizes, strict=True)
        if grant is not None
    ]
    good, bad, fine = await asyncio.gather(
        *(committer.append(entry) for entry in entries), return_exceptions=True
    )
    assert good is fine is Verdict.ACCEPTED
    assert isinstance(bad, ValueTooLarge)
    assert "'big'" in str(bad)
    await committer.close()


async def test_each_waiter_gets_its_own_verdict() -> None:
    """A stale epoch in a batch is fenced; its neighbours are accepted."""
    store = MemoryStore()
    committer = Committer(store, store)
    grant = await committer.acquire(LeaseRequest("run", "me", MINUTE, create=FIRST))
    assert grant is not None
    epoch = grant.lease.epoch
    verdicts = await asyncio.gather(
        committer.append(Entry("run", epoch, 1, delta("a"))),
        committer.append(Entry("run", epoch - 1, 1, delta("b"))),
        committer.append(Entry("nobody", epoch, 1, delta("c"))),
    )
    assert verdicts == [Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN]
    await committer.close()


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_lost_answer_neither_loses_nor_doubles(how: str) -> None:
    """An answer that was lost is asked for again, and the store tells what it had written."""
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=1, how=how, verbs={"append"})  # type: ignore[arg-type]
    committer = Committer(store, inner)  # type: ignore[arg-type]
    grant = await committer.acquire(LeaseRequest("run", "me", MINUTE, create=FIRST))
    assert grant is not None
    for n, key in enumerate("ab", 1):
        entry = Entry("run", grant.lease.epoch, n, delta(key))
        assert await committer.append(entry) is Verdict.ACCEPTED
    snapshot = await inner.load("run")
    assert snapshot is not None
    assert list(snapshot["steps"]) == ["a", "b"]
    await committer.close()


async def test_a_store_that_stays_away_is_told_after_a_while() -> None:
    """Patience ends, with the store's own error."""
    clock = TestClock()

    async def away(requests: Sequence[int]) -> list[int]:
        raise StoreUnavailable("nobody at home")

    lane: BatchQueue[int, int] = BatchQueue(away, clock=clock, max_outage=timedelta(seconds=5))
    waiting = asyncio.ensure_future(lane.submit(1))
    await clock.advance(20)
    with pytest.raises(StoreUnavailable, match="nobody at home"):
        await waiting
    await lane.close()


async def test_waiting_requests_are_bounded() -> None:
    """A slow store slows its writers down instead of filling the memory."""
    gate = Gate()
    gate.open.clear()
    lane: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock(), max_waiting=10)
    waiting = [asyncio.ensure_future(lane.submit(n)) for n in range(100)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(lane) <= 10
    gate.open.set()
    assert await asyncio.gather(*waiting) == [n * 10 for n in range(100)]
    await lane.close()


async def test_close_drains_and_then_refuses() -> None:
    """What waits is written; what comes later is refused."""
    gate = Gate()
    lane: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    waiting = [asyncio.ensure_future(lane.submit(n)) for n in range(5)]
    await asyncio.sleep(0)
    await lane.close()
    assert await asyncio.gather(*waiting) == [0, 10, 20, 30, 40]
    with pytest.raises(StoreClosed):
        await lane.submit(6)


async def test_an_error_reaches_the_one_who_asked() -> None:
    """A lone failure is not retried unless the store was away."""

    async def broken(requests: Sequence[int]) -> list[int]:
        raise StoreError("no")

    lane: BatchQueue[int, int] = BatchQueue(broken, clock=TestClock())
    with pytest.raises(StoreError, match="no"):
        await lane.submit(1)
    await lane.close()


async def test_nobody_waits_for_a_lane_that_was_cancelled() -> None:
    """An event loop that ends cancels every task: those who wait for a batch end with it."""
    first = True

    async def hang_after_the_first(requests: Sequence[int]) -> list[int]:
        nonlocal first
        if not first:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        first = False
        return list(requests)

    lane: BatchQueue[int, int] = BatchQueue(hang_after_the_first, clock=TestClock())
    led, gathered = (asyncio.ensure_future(lane.submit(n)) for n in (1, 2))
    assert await led == 1
    await asyncio.sleep(0)
    assert lane._task is not None
    lane._task.cancel()
    await asyncio.wait([gathered], timeout=5)
    assert gathered.cancelled()
    await lane.close()
