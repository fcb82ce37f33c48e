"""Checks of what is written; `limit` is the maximum size of a value in bytes."""

from collections.abc import Sequence

from perdure.clock import as_utc
from perdure.errors import ValueTooLarge
from perdure.store import LeaseRequest, NewMessage, NewRun, check_header, check_rest
from perdure.validation import check_id, check_prefix


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
