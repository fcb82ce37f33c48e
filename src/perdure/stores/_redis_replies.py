"""What the scripts take and give, as the contract's records."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import CodecError, InvalidArgument, SnapshotFormatError, StoreCorrupted
from perdure.snapshot import RunStatus, Snapshot, merge_snapshots
from perdure.store import Due, Entry, Grant, Lease, Listed, Message, Rest
from perdure.stores._redis_links import Value
from perdure.stores._times import micros, moment_of

to_json = msgspec.json.Encoder().encode


def workflow_argument(workflow: str | None) -> str:
    """Give a workflow's name so that none and "" differ."""
    return "" if workflow is None else "=" + workflow


def time_argument(moment: datetime | None, parameter: str) -> Value:
    """Give a time as a script wants it, and "" for none."""
    return "" if moment is None else micros(moment, parameter)


def rest_argument(rest: Rest) -> dict[str, object]:
    """Give a rest without what it does not say: the server's JSON has no good nothing."""
    told: dict[str, object] = {"status": rest.status}
    if rest.wake_at is not None:
        told["wake"] = micros(rest.wake_at)
    if rest.awaits:
        told["awaits"] = rest.awaits
    if rest.gone:
        told["gone"] = True
    return told


def entry_values(entry: Entry) -> Sequence[Value]:
    """Give epoch, place in the journal, data, and what else the entry does."""
    more: dict[str, object] = {}
    if entry.takes:
        more["takes"] = entry.takes
    if entry.rest is not None:
        more["rest"] = rest_argument(entry.rest)
    # Digits in equal number, so that places can be compared as texts.
    place = b"%016d:%010d" % (entry.epoch, entry.n)
    return entry.epoch, place, entry.data, to_json(more) if more else b""


def snapshot_of(id: str, run: Sequence[bytes]) -> Snapshot | None:
    """Give the merged snapshot of a run's hash, or None when there is no such run."""
    if not run:
        return None
    fields = dict(_pairs(run))
    journal = sorted(field for field in fields if field[:1].isdigit())
    try:
        snapshot: Snapshot = codec.loads(fields[b"snapshot"])
        if not journal:
            return snapshot
        deltas = b",".join([fields[place] for place in journal])
        return merge_snapshots(snapshot, *codec.loads(b"[%s]" % deltas))
    except (CodecError, SnapshotFormatError, KeyError) as error:
        raise StoreCorrupted(f"run {id!r} cannot be read: {error}") from error


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def messages_of(mail: Sequence[bytes]) -> tuple[Message, ...]:
    """Give the messages of an inbox's hash, in the order they were sent."""
    return tuple(_message(field.decode(), payload) for field, payload in sorted(_pairs(mail)))


def _message(field: str, payload: bytes) -> Message:
    number, _, name = field.partition(" ")
    return Message(field, name, payload, moment_of(int(number)))


def grant_of(reply: Sequence[Any], prefix: str, owner: str, *, created: bool = False) -> Grant:
    """Give the grant that a script gave."""
    key, epoch, now, ends, takeovers, run, mail = reply
    id = key.decode()[len(prefix) :]
    snapshot = snapshot_of(id, run)
    assert snapshot is not None, "a run that was granted is there"
    inbox = messages_of(mail)
    lease = Lease(id, owner, int(epoch), moment_of(int(ends)), bool(inbox))
    return Grant(lease, snapshot, moment_of(int(now)), inbox, int(takeovers), created)


def renewed_of(reply: Sequence[Any], lease: Lease) -> Lease:
    """Give a lease with its new end."""
    ends, mail = reply
    return Lease(lease.id, lease.owner, lease.epoch, moment_of(int(ends)), mail == 1)


def due_of(reply: Sequence[Any], prefix: str) -> Due:
    """Give a due run."""
    _, key, at = reply
    return Due(key.decode()[len(prefix) :], moment_of(int(at)))


def listed_of(
    reply: Sequence[Any], prefix: str, statuses: Sequence[RunStatus]
) -> tuple[tuple[int, bytes], Listed]:
    """Give a line of the list, and its place among others."""
    number, line, at = reply
    key, zero, workflow = line.partition(b"\0")
    id = key.decode()[len(prefix) :]
    updated_at = isoformat(moment_of(int(at)))
    status = statuses[(number - 1) % len(statuses)]
    name = workflow.decode() if zero else None
    return (int(at), key), Listed(id, updated_at, status, name, f"{int(at)} {id}")


def mark_of(cursor: str | None, prefix: str) -> tuple[Value, Value]:
    """Give the time and the stored id that a page comes after."""
    if cursor is None:
        return "", ""
    at, space, id = cursor.partition(" ")
    if not (space and at.removeprefix("-").isdecimal()):
        raise InvalidArgument("after", cursor, "the cursor of a line that list() gave")
    return at, prefix + id
