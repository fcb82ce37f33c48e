"""End a wait with a token: the first message under its name counts, from any sender.

A person answers, the time runs out, or the run no longer needs the answer: each of these sends a
message to the run's inbox with the same deduplication id, and the store accepts only the first. So
the run and all callers that tried to answer agree on the outcome, whichever process dies when.

A wait that is dropped is closed this way before the write that drops it. If the process dies in
between, the next owner finds the wait and the message that closed it. If the function waits again,
it reopens the wait with another token: an old token never answers a new question.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure import codec
from perdure.clock import isoformat
from perdure.durable.outbox import send_messages
from perdure.durable.session import Session
from perdure.durable.suspension import Answer, as_received
from perdure.engine.host import Received
from perdure.snapshot import PendingWait
from perdure.store import NewMessage

CLOSED: Final[Mapping[str, Any]] = {"closed": True}
"""The message that a run sends itself when it no longer needs an answer."""


async def conclude(
    session: Session, run_id: str, waits: Sequence[PendingWait], outcome: Mapping[str, Any]
) -> list[Answer]:
    """Send the outcome of waits to the run itself; return the first message for each of them.

    It is `None` if the message was consumed: another owner has recorded it.
    """
    payload, events = codec.dumps(outcome), [wait.get("event", "") for wait in waits]
    # The event's name is also the deduplication id, so the store keeps whichever message came
    # first.
    await send_messages(session, [NewMessage(run_id, event, payload, event) for event in events])
    inbox = {message.name: message for message in await session.read_inbox(run_id)}
    messages = (inbox.get(event) for event in events)
    return [None if message is None else as_received(message) for message in messages]


def unseen_act(wait: PendingWait, answer: Received) -> dict[str, Any] | None:
    """Return an act for an answer that was accepted just before its wait was dropped."""
    facts: Mapping[str, Any] = answer.payload
    act = {
        "at": isoformat(answer.sent_at),
        "by": facts.get("by", ""),
        "via": facts.get("via", ""),
        "verb": "answer",
        "step": wait["id"],
        "why": facts.get("note", ""),
        "was": "the run ended or began again before its code received the answer",
        "answers": wait.get("event", ""),
    }
    is_answer = "closed" not in facts and "expired" not in facts
    return {name: fact for name, fact in act.items() if fact} if is_answer else None
