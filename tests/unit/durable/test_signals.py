"""Signals of one process: sent together, never twice, each with its own outcome."""

import asyncio
from collections.abc import Sequence

import pytest

from perdure.durable.signals import Signals
from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.store import Delivery, NewMessage, Receipt


class Inboxes:
    """A store that records its batches, and finishes as many writes as a test allows."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self._allowed = asyncio.Semaphore(0)
        self.failure: Exception | None = None

    def allow(self, writes: int = 9) -> None:
        for _ in range(writes):
            self._allowed.release()

    async def send(self, messages: Sequence[NewMessage], /) -> list[Receipt]:
        self.batches.append([message.name for message in messages])
        await self._allowed.acquire()
        if self.failure is not None:
            raise self.failure
        if any(message.name == "bad" for message in messages):
            raise InvalidArgument("to", "bad", "a shorter id")
        return [Receipt(Delivery.DELIVERED, number) for number, _ in enumerate(messages)]


async def begin(signals: Signals, *names: str) -> list[asyncio.Task[Receipt]]:
    """Send messages from tasks of their own, and let them reach the store."""
    messages = [NewMessage("run", name, b"null") for name in names]
    tasks = [asyncio.ensure_future(signals.send(message)) for message in messages]
    await asyncio.sleep(0)
    return tasks


async def test_messages_that_arrive_during_a_write_are_written_together_in_order() -> None:
    """The first is sent at once, the others with the next write; each gets its own receipt."""
    inboxes = Inboxes()
    tasks = await begin(Signals(inboxes.send), "first", "a", "b", "c")
    inboxes.allow()
    receipts = await asyncio.gather(*tasks)
    assert inboxes.batches == [["first"], ["a", "b", "c"]]
    assert [receipt.unconsumed for receipt in receipts] == [0, 0, 1, 2]


async def test_a_thousand_signals_are_three_writes() -> None:
    """A write has at most 500 messages."""
    inboxes = Inboxes()
    tasks = await begin(Signals(inboxes.send), *map(str, range(1000)))
    inboxes.allow()
    await asyncio.gather(*tasks)
    assert [len(batch) for batch in inboxes.batches] == [1, 500, 499]


async def test_large_messages_are_not_written_together() -> None:
    """A write has at most 8 MiB, or one message."""
    inboxes = Inboxes()
    signals = Signals(inboxes.send)
    tasks = await begin(signals, "first")
    large = [NewMessage("run", name, b"x" * 5_000_000) for name in "ab"]
    tasks += [asyncio.ensure_future(signals.send(message)) for message in large]
    await asyncio.sleep(0)
    inboxes.allow()
    await asyncio.gather(*tasks)
    assert inboxes.batches == [["first"], ["a"], ["b"]]


async def test_a_message_whose_answer_was_lost_is_not_sent_again() -> None:
    """All callers of the write learn that its outcome is unknown."""
    inboxes = Inboxes()
    inboxes.failure = StoreUnavailable("lost")
    tasks = await begin(Signals(inboxes.send), "first", "a", "b")
    inboxes.allow()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
    assert inboxes.batches == [["first"], ["a", "b"]]


async def test_a_message_that_is_refused_does_not_affect_the_others() -> None:
    """A store checks its arguments before it writes: then the messages are sent one by one."""
    inboxes = Inboxes()
    tasks = await begin(Signals(inboxes.send), "first", "a", "bad", "b")
    inboxes.allow()
    first, a, bad, b = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(bad, InvalidArgument)
    assert all(isinstance(each, Receipt) for each in (first, a, b))
    assert inboxes.batches[2:] == [["a"], ["bad"], ["b"]]


async def test_a_cancelled_caller_withdraws_a_message_that_is_not_being_written() -> None:
    """It is cancelled at once, however long the store takes."""
    inboxes = Inboxes()
    tasks = await begin(Signals(inboxes.send), "first", "a", "b")
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    inboxes.allow()
    await asyncio.gather(tasks[0], tasks[2])
    assert inboxes.batches == [["first"], ["b"]]


async def test_a_cancelled_caller_does_not_hold_up_the_others() -> None:
    """Whether its own message was written is unknown, as with any write that was cancelled."""
    inboxes = Inboxes()
    first, second = await begin(Signals(inboxes.send), "first", "second")
    first.cancel()
    await asyncio.wait([first])
    inboxes.allow()
    assert first.cancelled()
    assert await second == Receipt(Delivery.DELIVERED, 0)


async def test_the_caller_of_a_batch_that_is_being_written_is_cancelled_at_once() -> None:
    """The others of the batch get their receipts."""
    inboxes = Inboxes()
    tasks = await begin(Signals(inboxes.send), "first", "a", "b")
    inboxes.allow(writes=1)
    while len(inboxes.batches) < 2:
        await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    inboxes.allow()
    assert await tasks[2] == Receipt(Delivery.DELIVERED, 1)
