"""What the scripts take and give, as the contract's records."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Due, Entry, Grant, Lease, LeaseRequest, Message, Rest, RunSummary
from perdure.stores._reading import Granted, merged, read_grant, reading
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.redis.node import Value

_LAST = to_microseconds(datetime.max.replace(tzinfo=UTC))

to_json = msgspec.json.Encoder().encode


def workflow_argument(workflow: str | None) -> str:
    """Give a workflow's name so that none and "" differ."""
    return "" if workflow is None else "=" + workflow


def time_argument(moment: datetime | None, parameter: str) -> Value:
    """Give a time as a script wants it, and "" for none."""
    return "" if moment is None else to_microseconds(moment, parameter)


def rest_argument(rest: Rest) -> dict[str, object]:
    """Give a rest without what it does not say: the server's JSON has no good nothing."""
    told: dict[str, object] = {"status": rest.status}
    if rest.wake_at is not None:
        told["wake"] = to_microseconds(rest.wake_at)
    if rest.awaits:
        told["awaits"] = rest.awaits
    return told


def entry_values(entry: Entry) -> Sequence[Value]:
    """Give place in the journal, data, and what else the entry does."""
    # Digits in equal number, so that places can be compared as texts.
    place = b"%016d:%010d" % (entry.epoch, entry.n)
    if not entry.consumes and entry.rest is None:
        return place, entry.data, b""
    if entry.rest is not None and entry.rest.delete:
        return place, entry.data, b"gone"
    more: dict[str, object] = {"takes": entry.consumes}
    if entry.rest is not None:
        more["rest"] = rest_argument(entry.rest)
    return place, entry.data, to_json(more)


def snapshot_of(id: str, content: bytes) -> Snapshot:
    """Give the merged snapshot of a run's content."""
    with reading(id):
        parts: Any = codec.loads(b"[%s]" % content)
        return merged(*parts or [None])


def messages_of(mail: Sequence[bytes]) -> tuple[Message, ...]:
    """Give the messages of an inbox's hash, in the order they were sent."""
    messages = zip(mail[::2], mail[1::2], strict=True)
    return tuple(_message(field.decode(), payload) for field, payload in sorted(messages))


def _message(field: str, payload: bytes) -> Message:
    number, _, name = field.partition(" ")
    return Message(field, name, payload, from_microseconds(int(number)))


class Created(NamedTuple):
    """The epoch of a run that was created, and when."""

    epoch: int
    now: datetime


def acquired_of(reply: Sequence[Any]) -> Sequence[Any]:
    """Give what became of each want: `Created`, the reply of a grant, or None."""
    now, words, grants = reply
    moment, left = from_microseconds(int(now)), iter(grants)
    answers: list[Any] = []
    for word in words.split():
        if word == b"-":
            answers.append(None)
        else:
            answers.append(next(left) if word == b"+" else Created(int(word), moment))
    return answers


def new_grant(created: Created, request: LeaseRequest) -> Grant:
    """Give the grant of a run that was created as wanted."""
    assert request.create is not None
    lease = Lease(request.id, request.owner, created.epoch, created.now + request.ttl)
    return Grant(lease, codec.loads(request.create), created.now, created=True)


def grant_of(reply: Sequence[Any], prefix: str, owner: str) -> Granted:
    """Give the grant of a run that was there."""
    facts, content, *mail = reply
    epoch, now, ends, takeovers, _, key = facts.split(b" ", 5)
    id = key.decode()[len(prefix) :]
    inbox = messages_of(*mail) if mail else ()
    lease = Lease(id, owner, int(epoch), from_microseconds(int(ends)), bool(inbox))
    read = partial(snapshot_of, id, content)
    return read_grant(lease, read, from_microseconds(int(now)), inbox, int(takeovers))


def wake_time_of(reply: Sequence[Any]) -> tuple[int, bytes]:
    """Give the wake time of a run that was claimed, and its id to tell it from others."""
    *_, at, key = reply[0].split(b" ", 5)
    return int(at), key


def renewed_of(reply: Sequence[Any], lease: Lease) -> Lease:
    """Give a lease with its new end."""
    ends, mail = reply
    return Lease(lease.id, lease.owner, lease.epoch, from_microseconds(int(ends)), mail == 1)


def due_of(line: bytes, prefix: str) -> Due:
    """Give a due run."""
    at, _, key = line.partition(b" ")
    # The server rounds a time that far away, and may round it beyond the last one there is.
    return Due(key.decode()[len(prefix) :], from_microseconds(min(int(at), _LAST)))


def due_place(line: bytes) -> tuple[int, bytes]:
    """Give what due runs are ordered by: their time, then their stored id."""
    at, _, key = line.partition(b" ")
    return int(at), key


def listed_of(line: bytes, prefix: str, statuses: Sequence[RunStatus]) -> RunSummary:
    """Give a run of the list; its place there tells the status."""
    number, at, member = line.split(b" ", 2)
    key, zero, workflow = member.partition(b"\0")
    id = key.decode()[len(prefix) :]
    updated_at = isoformat(from_microseconds(int(at)))
    status = statuses[(int(number) - 1) % len(statuses)]
    return RunSummary(
        id, updated_at, status, workflow.decode() if zero else None, f"{int(at)} {id}"
    )


def list_place(line: bytes) -> tuple[int, bytes]:
    """Give what runs are listed by: their time, then their stored id."""
    _, at, member = line.split(b" ", 2)
    return int(at), member.partition(b"\0")[0]


def mark_of(cursor: str | None, prefix: str) -> tuple[Value, Value]:
    """Give the time and the stored id that a page comes after."""
    if cursor is None:
        return "", ""
    at, space, id = cursor.partition(" ")
    if not (space and at.removeprefix("-").isdecimal()):
        raise InvalidArgument("after", cursor, "the cursor of a line that list() gave")
    return at, prefix + id
