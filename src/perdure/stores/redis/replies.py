"""Arguments and replies of the scripts, from and to the records of the store contract."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Due, Entry, Grant, Lease, LeaseRequest, Message, Rest
from perdure.stores._reading import Granted, merged, read_grant, reading
from perdure.stores._shell import Ownership, Row
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.redis.node import Value

_MAX_TIME = to_microseconds(datetime.max.replace(tzinfo=UTC))

to_json = msgspec.json.Encoder().encode


def workflow_argument(workflow: str | None) -> str:
    """Return a workflow's name in a form that distinguishes none from ""."""
    return "" if workflow is None else "=" + workflow


def time_argument(time: datetime | None) -> Value:
    """Return a time in microseconds, or "" for none."""
    return "" if time is None else to_microseconds(time)


def rest_argument(rest: Rest) -> dict[str, object]:
    """Return a rest without missing values: the server's JSON has no usable null."""
    fields: dict[str, object] = {"status": rest.status}
    if rest.wake_at is not None:
        fields["wake"] = to_microseconds(rest.wake_at)
    if rest.awaits:
        fields["awaits"] = rest.awaits
    return fields


def entry_arguments(entry: Entry) -> Sequence[Value]:
    """Return an entry's place in the journal, its data and its effects."""
    # Of fixed length, so that places can be compared as strings.
    place = b"%016d:%010d" % (entry.epoch, entry.n)
    if not entry.consumes and entry.rest is None:
        return place, entry.data, b""
    if entry.rest is not None and entry.rest.delete:
        return place, entry.data, b"delete"
    effects: dict[str, object] = {"consumes": entry.consumes}
    if entry.rest is not None:
        effects["rest"] = rest_argument(entry.rest)
    return place, entry.data, to_json(effects)


def read_snapshot(id: str, content: bytes) -> Snapshot:
    """Return the merged snapshot of a run's content."""
    with reading(id):
        parts: Any = codec.loads(b"[%s]" % content)
        return merged(*parts or [None])


def read_messages(reply: Sequence[bytes]) -> tuple[Message, ...]:
    """Return the messages of an inbox's hash, in the order they were sent."""
    messages = zip(reply[::2], reply[1::2], strict=True)
    return tuple(_message(field.decode(), payload) for field, payload in sorted(messages))


def _message(field: str, payload: bytes) -> Message:
    number, _, name = field.partition(" ")
    return Message(field, name, payload, from_microseconds(int(number)))


class Created(NamedTuple):
    """The epoch of a run that was created, and when."""

    epoch: int
    now: datetime


def read_acquired(reply: Sequence[Any]) -> Sequence[Any]:
    """Return the answer to each request: `Created`, the reply of a grant, or `None`."""
    time, words, grants = reply
    now, remaining = from_microseconds(int(time)), iter(grants)
    answers: list[Any] = []
    for word in words.split():
        if word == b"-":
            answers.append(None)
        else:
            answers.append(next(remaining) if word == b"+" else Created(int(word), now))
    return answers


def created_grant(created: Created, request: LeaseRequest) -> Grant:
    """Return the grant of a run that was created."""
    assert request.create is not None
    lease = Lease(request.id, request.owner, created.epoch, created.now + request.ttl)
    return Grant(lease, codec.loads(request.create), created.now, created=True)


def existing_grant(reply: Sequence[Any], prefix: str, owner: str) -> Granted:
    """Return the grant of a run that existed."""
    facts, content, *inbox = reply
    epoch, now, ends, takeovers, _, key = facts.split(b" ", 5)
    id = key.decode()[len(prefix) :]
    messages = read_messages(*inbox) if inbox else ()
    lease = Lease(id, owner, int(epoch), from_microseconds(int(ends)), bool(messages))
    read = partial(read_snapshot, id, content)
    return read_grant(lease, read, from_microseconds(int(now)), messages, int(takeovers))


def grant_order(reply: Sequence[Any]) -> tuple[int, bytes]:
    """Return the sort key of a claimed run: its wake time, then its stored id."""
    *_, at, key = reply[0].split(b" ", 5)
    return int(at), key


def read_ownership(reply: Sequence[Any]) -> Ownership | None:
    """Return who has the lease of a run, or `None` if it is missing."""
    status, owner, wake = reply
    if owner is None:
        # The wake time of an unowned run is not the end of a lease.
        return None if status is None else Ownership(None, None)
    return Ownership(owner.decode(), from_microseconds(int(wake)))


def renewed_lease(reply: Sequence[Any], lease: Lease) -> Lease:
    """Return a lease with its new end."""
    ends, has_messages = reply
    expires_at = from_microseconds(int(ends))
    return Lease(lease.id, lease.owner, lease.epoch, expires_at, has_messages == 1)


def read_due(line: bytes, prefix: str) -> Due:
    """Return a due run."""
    at, key = due_order(line)
    # Scores are doubles: the last times there are may be rounded up beyond the last.
    return Due(key.decode()[len(prefix) :], from_microseconds(min(at, _MAX_TIME)))


def due_order(line: bytes) -> tuple[int, bytes]:
    """Return the sort key of a due run: its wake time, then its stored id."""
    at, _, key = line.partition(b" ")
    return int(at), key


def read_row(line: bytes, prefix: str, statuses: Sequence[RunStatus]) -> Row:
    """Return a listed run; the number of its list tells its status."""
    number, at, rest = line.split(b" ", 2)
    owner, _, member = rest.partition(b"\0")
    key, zero, workflow = member.partition(b"\0")
    return Row(
        key.decode()[len(prefix) :],
        from_microseconds(int(at)),
        statuses[(int(number) - 1) % len(statuses)],
        workflow.decode() if zero else None,
        owner.decode() or None,
    )


def list_order(line: bytes) -> tuple[int, bytes]:
    """Return the sort key of a listed run: its time, then its stored id."""
    _, at, rest = line.split(b" ", 2)
    return int(at), rest.split(b"\0", 2)[1]
