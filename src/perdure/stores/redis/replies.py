"""Convert between the records of the store contract and the scripts' arguments and replies."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from perdure import codec
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import (
    Delivery,
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    Receipt,
    Rest,
    RunSummary,
    SupportedVersions,
)
from perdure.stores._backend import Ownership
from perdure.stores._reading import Granted, merge_journal, read_grant, reading
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.redis.node import Value

_MAX_TIME = to_microseconds(datetime.max.replace(tzinfo=UTC))

_DELIVERIES = {
    b"D": Delivery.DELIVERED,
    b"K": Delivery.DUPLICATE,
    b"U": Delivery.UNKNOWN,
    b"O": Delivery.OVER,
}

to_json = msgspec.json.Encoder().encode
_read_texts = msgspec.json.Decoder(tuple[str, ...]).decode


def workflow_argument(workflow: str | None) -> str:
    """Return a workflow's name in a form that distinguishes none from ""."""
    return "" if workflow is None else "=" + workflow


def version_ranges(
    supports: Sequence[SupportedVersions] | None,
) -> Mapping[str, Sequence[tuple[int, int]]] | None:
    """Return ranges of versions by workflow."""
    if supports is None:
        return None
    ranges: dict[str, list[tuple[int, int]]] = {}
    for supported in supports:
        workflow = workflow_argument(supported.workflow)
        ranges.setdefault(workflow, []).append((supported.first, supported.last))
    return ranges


def time_argument(time: datetime | None) -> Value:
    """Return a time in microseconds, or "" for none."""
    return "" if time is None else to_microseconds(time)


def header_arguments(header: NewRun | LeaseRequest) -> Sequence[Value]:
    """Return the version, tags and summary of a new run."""
    return header.version, to_json(header.tags), header.summary


def rest_argument(rest: Rest) -> bytes:
    """Return a rest as JSON, and its summary."""
    return to_json(_rest_fields(rest)) + _summary_part(rest)


def _rest_fields(rest: Rest) -> Mapping[str, object]:
    """Return a rest for a script.

    Numbers are strings, so that the server does not round them. The server could not distinguish an
    empty list of tags from an object, so tags are JSON inside JSON.
    """
    fields = {
        "status": rest.status,
        "wake": None if rest.wake_at is None else str(to_microseconds(rest.wake_at)),
        "awaits": rest.awaits or None,
        "version": None if rest.version is None else str(rest.version),
        "tags": None if rest.tags is None else to_json(rest.tags).decode(),
    }
    return without_none(fields)


def without_none(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields that have a value: the server's JSON has no usable null."""
    return {name: value for name, value in fields.items() if value is not None}


def _summary_part(rest: Rest) -> bytes:
    return b"" if rest.summary is None else b"\0" + rest.summary


def entry_arguments(entry: Entry) -> Sequence[Value]:
    """Return an entry's place in the journal, its data and its effects."""
    # Of fixed length, so that places can be compared as strings.
    place = b"%016d:%010d" % (entry.epoch, entry.n)
    if not entry.consumes and entry.rest is None:
        return place, entry.data, b""
    if entry.rest is not None and entry.rest.delete:
        return place, entry.data, b"delete"
    effects: dict[str, object] = {"consumes": entry.consumes}
    if entry.rest is None:
        return place, entry.data, to_json(effects)
    effects["rest"] = _rest_fields(entry.rest)
    return place, entry.data, to_json(effects) + _summary_part(entry.rest)


def read_snapshot(id: str, content: bytes) -> Snapshot:
    """Return the merged snapshot of a run's content."""
    with reading(id):
        parts: Any = codec.loads(b"[%s]" % content)
        return merge_journal(*parts or [None])


def read_messages(reply: Sequence[bytes]) -> tuple[Message, ...]:
    """Return the messages of an inbox."""
    return tuple(map(_message, reply))


def _message(member: bytes) -> Message:
    number, length, rest = member.split(b" ", 2)
    name, payload = rest[: int(length)], rest[int(length) :]
    return Message(number.decode(), name.decode(), payload, from_microseconds(int(number)))


def read_receipts(reply: bytes) -> Sequence[Receipt]:
    """Return the receipt of each message."""
    return [Receipt(_DELIVERIES[word[:1]], int(word[1:])) for word in reply.split()]


class CreatedRun(NamedTuple):
    """The epoch of a run that was created, and when."""

    epoch: int
    now: datetime


class GrantReply(NamedTuple):
    """A grant as a script returns it: facts about the run, its content, and its messages."""

    facts: Sequence[bytes]
    content: bytes
    messages: Sequence[bytes]


def _read_grants(text: bytes) -> Iterator[GrantReply]:
    """Yield the grants of a reply."""
    strings = _read_strings(text)
    for joined_facts in strings:
        # An id contains no NUL.
        facts = joined_facts.split(b"\0")
        content = next(strings)
        yield GrantReply(facts, content, [next(strings) for _ in range(int(facts[5]))])


def _read_strings(text: bytes) -> Iterator[bytes]:
    """Yield the strings of a reply, in which each follows its length and a colon."""
    at = 0
    while at < len(text):
        start = text.index(b":", at) + 1
        at = start + int(text[at : start - 1])
        yield text[start:at]


def read_acquired(reply: Sequence[Any]) -> Sequence[Any]:
    """Return the answer to each request: `CreatedRun`, `GrantReply` or `None`."""
    time, words, grants = reply
    now, remaining = from_microseconds(int(time)), _read_grants(grants)
    answers: list[Any] = []
    for word in words.split():
        if word == b"-":
            answers.append(None)
        else:
            answers.append(next(remaining) if word == b"+" else CreatedRun(int(word), now))
    return answers


def created_grant(run: CreatedRun, request: LeaseRequest) -> Grant:
    """Return the grant of a run that was created."""
    assert request.create is not None
    lease = Lease(request.id, request.owner, run.epoch, run.now + request.ttl)
    snapshot = codec.loads(request.create)
    return Grant(lease, snapshot, run.now, created=True, version=request.version)


class HandoffReply(NamedTuple):
    """The receipts of messages, the grants of runs that await them, and whether others are due."""

    receipts: Sequence[Receipt]
    grants: Sequence[GrantReply]
    made_due: bool


def read_handoff(reply: bytes) -> HandoffReply:
    """Return the receipts and the grants of a reply."""
    words, made_due, grants = reply.split(b"\0", 2)
    return HandoffReply(read_receipts(words), [*_read_grants(grants)], bool(made_due))


class ClaimedRun(NamedTuple):
    """A claimed run: its wake time and stored id, its queue, and the reply with its grant."""

    at: int
    id: bytes
    queue: str
    reply: GrantReply


def read_claimed_runs(text: bytes) -> Sequence[ClaimedRun]:
    """Return the runs that were claimed."""
    runs: list[ClaimedRun] = []
    for reply in _read_grants(text):
        *_, at, queue, id = reply.facts
        runs.append(ClaimedRun(int(at), id, queue.decode(), reply))
    return runs


def existing_grant(reply: GrantReply, prefix: str, owner: str) -> Granted:
    """Return the grant of a run that existed."""
    epoch, now, ends, takeovers, version, _, _, queue, key = reply.facts
    id = key.decode()[len(prefix) :]
    messages = read_messages(reply.messages)
    return read_grant(
        Lease(id, owner, int(epoch), from_microseconds(int(ends)), bool(messages)),
        partial(read_snapshot, id, reply.content),
        from_microseconds(int(now)),
        messages,
        int(takeovers),
        queue=queue.decode(),
        version=int(version),
    )


def read_ownership(reply: Sequence[Any]) -> Ownership | None:
    """Return the ownership of a run, or `None` if it is missing."""
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


class DueRun(NamedTuple):
    """A due run: its wake time and stored id, and its queue."""

    at: int
    id: bytes
    queue: str


def read_due_runs(lines: Sequence[bytes]) -> Sequence[DueRun]:
    """Return the due runs of a reply."""
    runs: list[DueRun] = []
    for line in lines:
        at, queue, id = line.split(b"\0")
        runs.append(DueRun(int(at), id, queue.decode()))
    return runs


def as_due(run: DueRun, prefix: str) -> Due:
    """Return a due run without the prefix."""
    # Scores are doubles, so the latest possible times may be rounded up beyond the maximum.
    return Due(run.id.decode()[len(prefix) :], from_microseconds(min(run.at, _MAX_TIME)))


def read_summary(description: bytes, prefix: str, revision: str = "") -> RunSummary:
    """Return a run that was described."""
    fields = description.split(b"\0", 12)
    id, status, workflow, updated_at, created_at, wake_at, owner, *others = fields
    queue, version, takeovers, tags, awaits, summary = others
    return RunSummary(
        id=id.decode()[len(prefix) :],
        updated_at=from_microseconds(int(updated_at)),
        status=cast(RunStatus, status.decode()),
        workflow=workflow[1:].decode() if workflow else None,
        owner=owner.decode() or None,
        version=int(version),
        queue=queue.decode(),
        tags=_read_texts(tags),
        summary=summary,
        created_at=_read_time(created_at),
        wake_at=_read_time(wake_at),
        awaits=_read_texts(awaits),
        takeovers=int(takeovers),
        revision=revision,
    )


def read_revised_summary(answer: bytes, prefix: str) -> RunSummary:
    """Return a run that was described, with its revision."""
    revision, _, description = answer.partition(b"\0")
    return read_summary(description, prefix, revision.decode())


def _read_time(text: bytes) -> datetime | None:
    return from_microseconds(int(text)) if text else None
