"""Convert PostgreSQL's rows to records of the contract."""

from datetime import datetime
from typing import Any

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import Message
from perdure.stores._awaitly import as_snapshot
from perdure.stores._reading import merge_journal, reading


def read_run(id: str, snapshot: str, updated_at: datetime, journal: bytes | None) -> Snapshot:
    """Return a run's snapshot merged with its journal, whose entries are joined by commas."""
    with reading(id):
        deltas: Any = codec.loads(b"[%b]" % (journal or b""))
        return merge_journal(as_snapshot(codec.loads(snapshot), updated_at), *deltas)


def read_message(seq: int, name: str, payload: bytes, sent_at: datetime) -> Message:
    """Return the message in a row of the inbox."""
    return Message(str(seq), name, payload, sent_at)
