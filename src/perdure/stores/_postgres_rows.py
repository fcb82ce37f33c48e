"""Rows of PostgreSQL as what they mean."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import cast

from perdure import codec
from perdure.errors import CodecError, SnapshotFormatError, StateFormatError, StoreCorrupted
from perdure.snapshot import Snapshot, merge_snapshots
from perdure.store import Message
from perdure.stores._foreign import as_snapshot


def read_run(id: str, snapshot: str, updated_at: datetime, journal: bytes | None) -> Snapshot:
    """Give a run's snapshot merged with its journal, whose entries are joined by commas."""
    try:
        base = as_snapshot(codec.loads(snapshot), updated_at)
        if journal is None:
            return base
        deltas = cast("Sequence[Mapping[str, object]]", codec.loads(b"[" + journal + b"]"))
        return merge_snapshots(base, *deltas)
    except (CodecError, SnapshotFormatError, StateFormatError) as error:
        raise StoreCorrupted(f"run {id!r} cannot be read: {error}") from error


def read_message(seq: int, name: str, payload: bytes, sent_at: datetime) -> Message:
    """Give a row of the inbox as the message it is."""
    return Message(str(seq), name, payload, sent_at)
