"""The messages of a run that no wait has received: each is handed out once, in order."""

from datetime import UTC, datetime, timedelta

from perdure.durable.inbox import Inbox
from perdure.store import Message
from perdure.testing.clock import TestClock

START = datetime(2030, 1, 1, tzinfo=UTC)


def message(n: int, id: str = "") -> Message:
    return Message(id or f"m{n}", "go", b"1", START + timedelta(seconds=n))


def inbox_of(*stored: Message) -> Inbox:
    async def read() -> list[Message]:
        return list(stored)

    return Inbox(read, TestClock(), list(stored), START)


def ids(inbox: Inbox) -> list[str]:
    return [message.id for message in inbox]


async def test_a_message_that_was_handed_out_is_not_read_again() -> None:
    """The store still has it until the record that consumes it is accepted."""
    inbox = inbox_of(message(1), message(2))
    inbox.hand_out(message(1))
    await inbox.refresh()
    assert ids(inbox) == ["m2"]


async def test_messages_that_are_put_back_keep_their_order() -> None:
    """The order in which their waits were cancelled does not matter."""
    inbox = inbox_of(message(1), message(2), message(3))
    inbox.hand_out(message(1))
    inbox.hand_out(message(2))
    inbox.put_back(message(1))
    inbox.put_back(message(2))
    assert ids(inbox) == ["m1", "m2", "m3"]


async def test_local_messages_come_first_and_survive_a_read() -> None:
    """They were received before every message that the store still has."""
    inbox = inbox_of(message(1))
    inbox.add_local(message(5, "record:a"))
    inbox.add_local(message(6, "record:b"))
    await inbox.refresh()
    assert ids(inbox) == ["record:a", "record:b", "m1"]
