"""Checks of what is written; `limit` is the maximum size of a value in bytes."""

from collections.abc import Sequence

from perdure.clock import as_utc
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.store import LeaseRequest, NewMessage, NewRun, check_header, check_rest
from perdure.validation import check_id, check_prefix

_LAST_MESSAGE = 2**63 - 1


def check_size(what: str, data: bytes, limit: int) -> None:
    """Raise `ValueTooLarge` if the data has more than `limit` bytes."""
    if len(data) > limit:
        raise ValueTooLarge(what, len(data), limit)


def check_workflow(workflow: str | None) -> str | None:
    """Return the name of a workflow, if there is one, or raise `InvalidArgument`."""
    return None if workflow is None else check_id(workflow, "workflow")


def check_request(request: LeaseRequest, limit: int) -> None:
    """Raise if a lease cannot be requested like this."""
    check_id(request.id)
    check_id(request.owner, "owner")
    check_workflow(request.workflow)
    check_header(request.version, request.tags, request.summary)
    check_size(f"the snapshot of run {request.id!r}", request.create or b"", limit)
    if request.instead_of is not None:
        check_id(request.instead_of, "instead_of")


def check_new_run(run: NewRun, limit: int) -> None:
    """Raise if a run cannot be created like this."""
    check_id(run.id)
    check_id(run.workflow, "workflow")
    check_prefix(run.queue, "queue")
    check_header(run.version, run.tags, run.summary)
    if run.wake_at is not None:
        as_utc(run.wake_at, "wake_at")
    if run.rest is not None:
        check_rest(run.rest)
    check_size(f"the snapshot of run {run.id!r}", run.snapshot, limit)


def check_messages(messages: Sequence[NewMessage], limit: int) -> None:
    """Raise if one of the messages cannot be sent."""
    for message in messages:
        check_id(message.to, "to")
        what = f"the event {message.name!r} for run {message.to!r}"
        check_size(what, message.payload, limit)


def message_number(id: str) -> int | None:
    """Return the number that is the id of a message, or `None` if the id is not valid."""
    # Python refuses to read numbers of thousands of digits, and databases those of more than 64
    # bits.
    if not (id.isascii() and id.isdecimal()) or len(id) > len(str(_LAST_MESSAGE)):
        return None
    number = int(id)
    return number if number <= _LAST_MESSAGE else None


def number_after(after: str | None) -> int:
    """Return the number of the message that a page follows, or 0 for the first page."""
    number = 0 if after is None else message_number(after)
    if number is None:
        raise InvalidArgument("after", after, "the id of a message")
    return number
