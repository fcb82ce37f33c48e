"""Requests to runs: a verb, with the operator and the reason.

A run at rest is changed by the process that got the request. A run that another process owns
receives the request as a message, and its owner applies it, so that a crash of either process
neither loses nor repeats it. The act (who did what, and why) is part of the write that changes the
run.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from perdure import codec
from perdure.store import Message

OPERATOR = "~operator"
"""The name of messages that contain a request."""

WATCH = "~watch"
"""The name of messages that ask a run to report its end to another run."""

Verb: TypeAlias = Literal[
    "cancel",
    "pause",
    "unpause",
    "retry",
    "wake",
    "signal",
    "complete_step",
    "skip_step",
    "fail_step",
    "retry_step",
    "rewind",
    "edit_payload",
]


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verb for one run.

    `id` is unique. `by` is empty if the request does not come from an operator; then no act is
    recorded. `step` is the key of a record, the id of a wait or the name of an event; `value` is
    JSON. With `undo`, the steps of a cancelled run are undone.
    """

    id: str
    verb: Verb
    by: str = ""
    via: str = ""
    why: str = ""
    step: str = ""
    value: Any = None
    undo: bool = True


class ReceivedRequest(NamedTuple):
    """A request in a run's inbox; the write that applies it consumes `message_id`."""

    message_id: str
    request: Request


_decoder = msgspec.json.Decoder(Request)


def encode_request(request: Request) -> bytes:
    """Encode a request as the payload of a message."""
    return codec.dumps(request)


def requests_in(messages: Iterable[Message]) -> list[ReceivedRequest]:
    """Return the requests among the messages of a run, in the order they were sent."""
    return [
        ReceivedRequest(message.id, _decoder.decode(message.payload))
        for message in messages
        if message.name == OPERATOR
    ]


def cancel_in(requests: Sequence[ReceivedRequest], rollback: object = None) -> Request | None:
    """Return the first request that does not wait for the end of a step, if there is one.

    A run that is being rolled back is not cancelled again, except to stop the rollback.
    """
    cancels = (each.request for each in requests if each.request.verb == "cancel")
    return next((each for each in cancels if rollback is None or not each.undo), None)
