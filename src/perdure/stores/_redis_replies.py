"""What the scripts take and give, as the contract's records."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import CodecError, InvalidArgument, SnapshotFormatError, StoreCorrupted
from perdure.snapshot import RunStatus, Snapshot, merge_snapshots
from perdure.store import Due, Entry, Grant, Lease, Listed, Message, Rest
from perdure.stores._redis_links import Value
from perdure.stores._times import micros, moment_of

_LAST = micros(datetime.max.replace(tzinfo=UTC))

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


def snapshot_of(id: str, content: Sequence[bytes]) -> Snapshot:
    """Give the merged snapshot of a run's content."""
    whole, journal = content
    try:
        snapshot: Snapshot = codec.loads(whole)
        if not journal:
            return snapshot
        return merge_snapshots(snapshot, *codec.loads(b"[%s]" % journal))
    except (CodecError, SnapshotFormatError) as error:
        raise StoreCorrupted(f"run {id!r} cannot be read: {error}") from error


def messages_of(mail: Sequence[bytes]) -> tuple[Message, ...]:
    """Give the messages of an inbox's hash, in the order they were sent."""
    messages = zip(mail[::2], mail[1::2], strict=True)
    return tuple(_message(field.decode(), payload) for field, payload in sorted(messages))


def _message(field: str, payload: bytes) -> Message:
    number, _, name = field.partition(" ")
    return Message(field, name, payload, moment_of(int(number)))


def grant_of(reply: Sequence[Any], prefix: str, owner: str, *, is_claim: bool = False) -> Grant:
    """Give the grant that a script gave; that of a claim has its wake time for a last fact."""
    key, facts, snapshot, journal, mail = reply
    epoch, now, ends, takeovers, last = map(int, facts.split())
    id = key.decode()[len(prefix) :]
    inbox = messages_of(mail)
    lease = Lease(id, owner, epoch, moment_of(ends), bool(inbox))
    whole = snapshot_of(id, (snapshot, journal))
    return Grant(lease, whole, moment_of(now), inbox, takeovers, bool(last) and not is_claim)


def wake_time_of(reply: Sequence[Any]) -> tuple[int, bytes]:
    """Give the wake time of a run that was claimed, and its id to tell it from others."""
    return int(reply[1].split()[-1]), reply[0]


def renewed_of(reply: Sequence[Any], lease: Lease) -> Lease:
    """Give a lease with its new end."""
    ends, mail = reply
    return Lease(lease.id, lease.owner, lease.epoch, moment_of(int(ends)), mail == 1)


def due_of(line: bytes, prefix: str) -> Due:
    """Give a due run."""
    at, _, key = line.partition(b" ")
    # The server rounds a time that far away, and may round it beyond the last one there is.
    return Due(key.decode()[len(prefix) :], moment_of(min(int(at), _LAST)))


def due_place(line: bytes) -> tuple[int, bytes]:
    """Give what due runs are ordered by: their time, then their stored id."""
    at, _, key = line.partition(b" ")
    return int(at), key


def listed_of(line: bytes, prefix: str, statuses: Sequence[RunStatus]) -> Listed:
    """Give a run of the list; its place there tells the status."""
    number, at, member = line.split(b" ", 2)
    key, zero, workflow = member.partition(b"\0")
    id = key.decode()[len(prefix) :]
    updated_at = isoformat(moment_of(int(at)))
    status = statuses[(int(number) - 1) % len(statuses)]
    return Listed(id, updated_at, status, workflow.decode() if zero else None, f"{int(at)} {id}")


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
