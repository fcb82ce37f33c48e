"""Rows of MySQL as what they mean, and rows to be written in lists that fit in a statement."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import Message
from perdure.stores._reading import merged, reading
from perdure.stores.mysql.literals import read_moment

Row = TypeVar("Row", bound=Sequence[Any])

# A statement of more is not worth its memory, on either side.
LARGEST_STATEMENT = 1024 * 1024
_ROW_OVERHEAD = 1024
_SIZED = (str, bytes)


def read_run(id: str, snapshot: bytes | None, journal: Sequence[bytes] = ()) -> Snapshot:
    """Give a run's snapshot merged with its journal."""
    with reading(id):
        deltas: Any = codec.loads(b"[%s]" % b",".join(journal))
        return merged(codec.loads(snapshot or b""), *deltas)


def read_journals(rows: Iterable[Sequence[Any]]) -> dict[str, list[bytes]]:
    """Give the entries of each run, in order."""
    entries: dict[str, list[bytes]] = defaultdict(list)
    for key, _, data in rows:
        entries[key].append(data)
    return entries


def read_inboxes(rows: Iterable[Sequence[Any]]) -> dict[str, list[Message]]:
    """Give the messages of each run, in order."""
    messages: dict[str, list[Message]] = defaultdict(list)
    for key, seq, name, payload, sent_at in rows:
        messages[key].append(Message(str(seq), name, payload, read_moment(sent_at)))
    return messages


def names_as_json(names: Sequence[str]) -> bytes | None:
    """Give the names of events as a JSON array, and no names as None."""
    return codec.dumps(list(names)) if names else None


def chunks(rows: Iterable[Row]) -> list[list[Row]]:
    """Give rows in lists, each short enough for one statement unless it is a single row."""
    found: list[list[Row]] = []
    room = 0
    for row in rows:
        size = row_size(row)
        if size > room:
            found.append([])
            room = LARGEST_STATEMENT
        found[-1].append(row)
        room -= size
    return found


def row_size(row: Sequence[Any]) -> int:
    """Give about how many bytes a row takes in a statement."""
    return _ROW_OVERHEAD + sum([len(value) for value in row if isinstance(value, _SIZED)])
