"""Convert MySQL's rows to records of the contract, and split rows to write into chunks."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import Message
from perdure.stores._reading import merge_journal, reading
from perdure.stores.mysql.literals import read_datetime

R = TypeVar("R", bound=Sequence[Any])

# Larger statements are not faster, and cost memory on both sides.
MAX_STATEMENT_SIZE = 1024 * 1024
_ROW_OVERHEAD = 1024
_SIZED_TYPES = (str, bytes)


def read_run(id: str, snapshot: bytes | None, journal: Sequence[bytes] = ()) -> Snapshot:
    """Return a run's snapshot merged with its journal."""
    with reading(id):
        deltas: Any = codec.loads(b"[%s]" % b",".join(journal))
        return merge_journal(codec.loads(snapshot or b""), *deltas)


def read_journals(rows: Iterable[Sequence[Any]]) -> dict[str, list[bytes]]:
    """Return the entries of each run, in order."""
    entries: dict[str, list[bytes]] = defaultdict(list)
    for key, _, data in rows:
        entries[key].append(data)
    return entries


def read_inboxes(rows: Iterable[Sequence[Any]]) -> dict[str, list[Message]]:
    """Return the messages of each run, in order."""
    messages: dict[str, list[Message]] = defaultdict(list)
    for key, seq, name, payload, sent_at in rows:
        messages[key].append(Message(str(seq), name, payload, read_datetime(sent_at)))
    return messages


def names_as_json(names: Sequence[str]) -> bytes | None:
    """Return names of events as a JSON array, or `None` if there are none."""
    return codec.dumps(list(names)) if names else None


def tags_as_json(tags: Sequence[str] | None) -> bytes | None:
    """Return tags as a JSON array, or `None` if they are not known."""
    return None if tags is None else codec.dumps(list(tags))


def read_names(array: str | None) -> tuple[str, ...]:
    """Return the strings in a JSON array."""
    names: Any = codec.loads(array) if array else ()
    return tuple(names)


def chunks(rows: Iterable[R]) -> list[list[R]]:
    """Split the rows into lists that each fit in one statement, unless a single row is larger."""
    lists: list[list[R]] = []
    room = 0
    for row in rows:
        size = row_size(row)
        if size > room:
            lists.append([])
            room = MAX_STATEMENT_SIZE
        lists[-1].append(row)
        room -= size
    return lists


def row_size(row: Sequence[Any]) -> int:
    """Return the approximate size of a row in a statement, in bytes."""
    return _ROW_OVERHEAD + sum([len(value) for value in row if isinstance(value, _SIZED_TYPES)])
