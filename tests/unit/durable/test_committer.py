"""The group committer: writes are batched, ordered, isolated, bounded and drained."""

import asyncio
import gc
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import pytest

from perdure.durable.committer import BatchQueue, Committer
from perdure.engine.tasks import Interrupted
from perdure.errors import (
    StoreClosed,
    StoreError,
    StoreNotOpened,
    StoreUnavailable,
    ValueTooLarge,
)
from perdure.store import Entry, Grant, LeaseRequest, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

NOW = b'"2030-01-01T00:00:00.000Z"'
RUNNING = b'{"status":"running","lastUpdated":%b}' % NOW
FIRST = b'{"formatVersion":1,"steps":{},"execution":%b}' % RUNNING
MINUTE = timedelta(minutes=1)


def delta(key: str) -> bytes:
    steps = b'{"%b":{"ok":true,"value":1,"at":%b}}' % (key.encode(), NOW)
    return b'{"formatVersion":1,"steps":%b,"execution":%b}' % (steps, RUNNING)


def append(committer: Committer, entry: Entry) -> Coroutine[Any, Any, Verdict]:
    return committer.queue_of(entry.id).finish(entry)


def in_memory(kind: type) -> int:
    """Return how many objects of a class are in memory."""
    gc.collect()
    # By their types: `isinstance` asks proxies of other libraries, whose objects may be gone.
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


class Gate:
    """A sender that records its batches and answers while it is open."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, requests: Sequence[int]) -> list[int]:
        self.batches.append(list(requests))
        await self.open.wait()
        return [request * 10 for request in requests]


async def test_requests_that_arrive_during_a_write_are_written_together_in_order() -> None:
    """One write is in flight at a time; the next one takes all queued requests, in order."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    waiting = [asyncio.ensure_future(queue.finish(n)) for n in range(6)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(queue.finish(n)) for n in range(6, 9)]
    gate.open.set()
    assert await asyncio.gather(*waiting, *late) == [n * 10 for n in range(9)]
    assert [n for batch in gate.batches for n in batch] == list(range(9))
    assert len(gate.batches) <= 3
    await queue.close()


async def test_the_first_of_several_requests_joins_their_batch() -> None:
    """After a shared batch, it does not make the others wait; a single request is written alone."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    asyncio.get_running_loop().call_later(0.01, gate.open.set)
    for requests in ((1, 2, 3), (4, 5, 6), (7,), (8, 9)):
        await asyncio.gather(*(queue.finish(n) for n in requests))
    assert gate.batches == [[1], [2, 3], [4, 5, 6], [7], [8], [9]]
    await queue.close()


async def test_the_request_of_a_cancelled_caller_is_written_in_its_place() -> None:
    """Cancelling the caller does not withdraw the request."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    first, second, third = (asyncio.ensure_future(queue.finish(n)) for n in (1, 2, 3))
    await asyncio.sleep(0)
    second.cancel()
    gate.open.set()
    assert (await first, await third) == (10, 30)
    await queue.close()
    assert [n for batch in gate.batches for n in batch] == [1, 2, 3]


@pytest.mark.parametrize("cancelled_at", ["begin", "reply", "begin, reply", "begin, begin, reply"])
async def test_a_cancelled_caller_gets_the_reply(cancelled_at: str) -> None:
    """When it is cancelled while it waits, when its reply has just come, or again and again."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())

    async def cancel_another() -> None:
        # Its reply comes in the same batch, so the other caller has its own but has not continued.
        await queue.finish(2)
        if "reply" in cancelled_at:
            cancelled.cancel()

    async def interruption() -> Interrupted:
        with pytest.raises(Interrupted) as interrupted:
            await queue.finish(3)
        return interrupted.value

    writer, other = asyncio.ensure_future(queue.finish(1)), asyncio.ensure_future(cancel_another())
    cancelled = asyncio.ensure_future(interruption())
    for _ in range(1 + cancelled_at.count("begin")):
        await asyncio.sleep(0)
        if "begin" in cancelled_at:
            cancelled.cancel()
    gate.open.set()
    assert (await cancelled).answer == 30
    await asyncio.gather(writer, other)
    await queue.close()


async def test_cancelling_a_caller_again_and_again_takes_no_memory() -> None:
    """A cancelled scope of anyio does that in each iteration, until the store replies."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    writer, waiting = (asyncio.ensure_future(queue.finish(n)) for n in (1, 2))
    await asyncio.sleep(0)
    futures = [in_memory(asyncio.Future)]
    for _ in range(100):
        waiting.cancel()
        await asyncio.sleep(0)
    futures.append(in_memory(asyncio.Future))
    gate.open.set()
    await asyncio.wait([writer, waiting])
    await queue.close()
    assert futures[1] <= futures[0] + 2


async def test_an_entry_that_cannot_be_written_does_not_fail_its_batch() -> None:
    """A batch that fails is written again one by one."""
    store = MemoryStore(max_value_size=400)
    committer = Committer(store, store, store.send)
    grants = await asyncio.gather(
        *(committer.acquire(LeaseRequest(f"run{n}", "me", MINUTE, create=FIRST)) for n in range(3))
    )
    sizes = [b"a" * 10, b"b" * 1000, b"c" * 10]
    entries = [
        Entry(grant.lease.id, grant.lease.epoch, 1, delta(data.decode()), step="big")
        for grant, data in zip(grants, sizes, strict=True)
        if isinstance(grant, Grant)
    ]
    good, bad, fine = await asyncio.gather(
        *(append(committer, entry) for entry in entries), return_exceptions=True
    )
    assert good is fine is Verdict.ACCEPTED
    assert isinstance(bad, ValueTooLarge)
    assert "'big'" in str(bad)
    await committer.close()


async def test_each_caller_gets_the_verdict_of_its_own_entry() -> None:
    """A stale epoch in a batch is fenced; the other entries are accepted."""
    store = MemoryStore()
    committer = Committer(store, store, store.send)
    grant = await committer.acquire(LeaseRequest("run", "me", MINUTE, create=FIRST))
    assert isinstance(grant, Grant)
    epoch = grant.lease.epoch
    verdicts = await asyncio.gather(
        append(committer, Entry("run", epoch, 1, delta("a"))),
        append(committer, Entry("run", epoch - 1, 1, delta("b"))),
        append(committer, Entry("unknown", epoch, 1, delta("c"))),
    )
    assert [*verdicts] == [Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN]
    await committer.close()


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_write_whose_answer_was_lost_is_written_once(how: How) -> None:
    """It is sent again, and the store knows whether it had been written."""
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at=1, how=how, verbs={"append"})
    committer = Committer(store, inner, inner.send)
    grant = await committer.acquire(LeaseRequest("run", "me", MINUTE, create=FIRST))
    assert isinstance(grant, Grant)
    for n, key in enumerate("ab", 1):
        entry = Entry("run", grant.lease.epoch, n, delta(key))
        assert await append(committer, entry) is Verdict.ACCEPTED
    snapshot = await inner.load("run")
    assert snapshot is not None
    assert list(snapshot["steps"]) == ["a", "b"]
    await committer.close()


async def test_a_store_that_stays_unavailable_is_an_error() -> None:
    """After `max_outage` the caller gets the store's own error."""
    clock = TestClock()

    async def unavailable(requests: Sequence[int]) -> list[int]:
        raise StoreUnavailable("no connection")

    queue: BatchQueue[int, int] = BatchQueue(
        unavailable, clock=clock, max_outage=timedelta(seconds=5)
    )
    waiting = asyncio.ensure_future(queue.finish(1))
    await clock.advance(20)
    with pytest.raises(StoreUnavailable, match="no connection"):
        await waiting
    await queue.close()


async def test_a_store_that_was_never_reached_is_not_asked_again() -> None:
    """It has retried itself, and its address may be wrong."""
    attempts = 0

    async def unreachable(requests: Sequence[int]) -> list[int]:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise StoreNotOpened("no connection")

    queue: BatchQueue[int, int] = BatchQueue(unreachable, clock=TestClock())
    callers = [asyncio.ensure_future(queue.finish(n)) for n in range(3)]
    for caller in callers:
        with pytest.raises(StoreNotOpened, match="no connection"):
            await caller
    assert attempts == 2  # the first request alone, and those that arrived in the meantime
    await queue.close()


async def test_no_request_overtakes_another_however_many_there_are() -> None:
    """A store mistakes an entry that comes after a later one of its run for a repetition."""
    gate = Gate()
    gate.open.clear()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())

    async def submit_two(number: int) -> None:
        await queue.finish(number)
        await queue.finish(10_100 + number)

    waiting = [asyncio.ensure_future(submit_two(number)) for number in range(10_100)]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.wait(waiting)
    assert [n for batch in gate.batches for n in batch] == list(range(20_200))
    await queue.close()


async def test_a_caller_gets_its_reply_before_others_write_without_waiting() -> None:
    """A store that answers at once could otherwise show a later entry to the function first."""
    order: list[int] = []
    callers: list[asyncio.Task[None]] = []

    def start(number: int) -> None:
        callers.append(asyncio.ensure_future(call(number)))

    async def call(number: int) -> None:
        await queue.finish(number)
        order.append(number)

    async def send(requests: Sequence[int]) -> list[int]:
        if requests == [1]:
            await asyncio.sleep(0)
        if requests == [2]:
            start(3)
        return list(requests)

    queue: BatchQueue[int, int] = BatchQueue(send, clock=TestClock())
    start(1)
    start(2)
    while len(order) < 3:
        await asyncio.sleep(0)
    assert order == [1, 2, 3]
    await asyncio.wait(callers)
    await queue.close()


async def test_close_writes_queued_requests_and_refuses_later_ones() -> None:
    """Nothing that was submitted before is lost."""
    gate = Gate()
    queue: BatchQueue[int, int] = BatchQueue(gate.send, clock=TestClock())
    waiting = [asyncio.ensure_future(queue.finish(n)) for n in range(5)]
    await asyncio.sleep(0)
    await queue.close()
    assert await asyncio.gather(*waiting) == [0, 10, 20, 30, 40]
    with pytest.raises(StoreClosed):
        await queue.finish(6)


async def test_an_error_is_raised_to_its_caller() -> None:
    """A write that failed alone is not retried unless the store was unavailable."""

    async def broken(requests: Sequence[int]) -> list[int]:
        raise StoreError("no")

    queue: BatchQueue[int, int] = BatchQueue(broken, clock=TestClock())
    with pytest.raises(StoreError, match="no"):
        await queue.finish(1)
    await queue.close()


async def test_callers_of_a_cancelled_batch_are_cancelled() -> None:
    """An event loop that ends cancels every task; no caller waits for one of them forever."""
    first = True

    async def hang_after_the_first(requests: Sequence[int]) -> list[int]:
        nonlocal first
        if not first:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        first = False
        return list(requests)

    queue: BatchQueue[int, int] = BatchQueue(hang_after_the_first, clock=TestClock())
    writer, batched = (asyncio.ensure_future(queue.finish(n)) for n in (1, 2))
    assert await writer == 1
    await asyncio.sleep(0)
    assert queue._task is not None
    queue._task.cancel()
    await asyncio.wait([batched], timeout=5)
    assert batched.cancelled()
    await queue.close()


async def test_callers_of_a_batch_that_was_cancelled_before_it_began_are_cancelled() -> None:
    """An event loop that ends cancels every task at once: the callers, and one that is new."""

    async def send(requests: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(requests)

    queue: BatchQueue[int, int] = BatchQueue(send, clock=TestClock())
    callers = [asyncio.ensure_future(queue.finish(n)) for n in range(3)]

    async def cancel_all() -> None:
        while queue._task is None:
            await asyncio.sleep(0)
        assert len(queue._queue) == 2, "the task has not begun"
        for task in (queue._task, *callers):
            task.cancel()

    await asyncio.ensure_future(cancel_all())
    await asyncio.wait(callers, timeout=5)
    assert [caller.cancelled() for caller in callers] == [False, True, True]
    await queue.close()


async def test_callers_get_the_error_of_a_store_that_answers_too_few_requests() -> None:
    """Both those of the batch and those behind it, instead of waiting forever."""

    async def answer_one(requests: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(requests[:1])

    queue: BatchQueue[int, int] = BatchQueue(answer_one, clock=TestClock())
    callers = [asyncio.ensure_future(queue.finish(n)) for n in range(3)]
    await asyncio.wait(callers, timeout=5)
    assert [caller.done() and type(caller.exception()) for caller in callers] == [
        type(None),
        type(None),
        ValueError,
    ]
    await queue.close()
