"""Batches of entries as the columns of one statement, and the verdicts on them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores._checks import message_number


class Needs(NamedTuple):
    """What a batch writes: journal entries, rests, tags, deletions, consumed messages."""

    journal: bool
    rests: bool
    tags: bool
    deletes: bool
    consumes: bool


JOURNAL_ONLY = Needs(journal=True, rests=False, tags=False, deletes=False, consumes=False)


class Batch:
    """The entries of one call as columns, ordered by id so that all batches lock in the same order.

    Entries before a rest of their run are not written: the rest contains them, and they share its
    verdict. Entries after a rest, or before one that is refused, are left to another statement.
    """

    def __init__(self, entries: Sequence[Entry], prefix: str) -> None:
        self.entries = entries
        self.needs = _needs_of(entries)
        self._prefix = prefix
        self._deciding = _deciding_entries(entries)
        ids = [entry.id for entry in entries]
        indexes: Sequence[int] = range(len(ids))
        if self._deciding is not None:
            indexes = [index for index, deciding in enumerate(self._deciding) if deciding == index]
        self._sent_indexes = sorted(indexes, key=ids.__getitem__)

    def columns(self) -> list[list[Any]]:
        """Return the columns that every entry has."""
        entries = [self.entries[index] for index in self._sent_indexes]
        return [
            [self._prefix + entry.id for entry in entries],
            [entry.epoch for entry in entries],
            [entry.n for entry in entries],
            [entry.data for entry in entries],
        ]

    def rest_columns(self) -> list[list[Any]]:
        """Return the columns of rests."""
        rests = [_columns_of(self.entries[index].rest) for index in self._sent_indexes]
        return [list(column) for column in zip(*rests, strict=True)]

    def consume_columns(self) -> list[list[Any]]:
        """Return the columns of consumed messages."""
        consumes = list(self._consumes())
        return [[position for position, _ in consumes], [seq for _, seq in consumes]]

    def verdicts(self, row: Any) -> list[Verdict | None]:
        """Return a verdict on each entry; `None` if it needs another statement."""
        accepted, fenced = row
        verdicts: list[Verdict | None] = [Verdict.UNKNOWN] * len(self.entries)
        for verdict, positions in ((Verdict.ACCEPTED, accepted), (Verdict.FENCED, fenced)):
            for position in positions or ():
                verdicts[self._sent_indexes[position - 1]] = verdict
        for index, deciding in enumerate(self._deciding or ()):
            if deciding != index:
                is_contained = deciding > index and verdicts[deciding] is Verdict.ACCEPTED
                verdicts[index] = Verdict.ACCEPTED if is_contained else None
        return verdicts

    def _consumes(self) -> Iterator[tuple[int, int]]:
        positions = {index: position for position, index in enumerate(self._sent_indexes, 1)}
        for index, entry in enumerate(self.entries):
            deciding = index if self._deciding is None else self._deciding[index]
            if deciding >= index:
                yield from ((positions[deciding], seq) for seq in sequence_numbers(entry))


def _deciding_entries(entries: Sequence[Entry]) -> list[int] | None:
    """Return the index of the deciding entry for each: its run's first rest, or itself.

    `None` means that there is no rest, so each entry decides for itself.
    """
    rests: dict[tuple[str, int], int] = {}
    for index, entry in enumerate(entries):
        if entry.rest is not None:
            rests.setdefault((entry.id, entry.epoch), index)
    if not rests:
        return None
    return [rests.get((entry.id, entry.epoch), index) for index, entry in enumerate(entries)]


def _needs_of(entries: Sequence[Entry]) -> Needs:
    rests = [entry.rest for entry in entries if entry.rest is not None]
    stored_rests = [rest for rest in rests if not rest.delete]
    return Needs(
        journal=len(rests) < len(entries),
        rests=bool(stored_rests),
        tags=any(rest.tags is not None for rest in stored_rests),
        deletes=len(stored_rests) < len(rests),
        consumes=any(entry.consumes for entry in entries),
    )


def sequence_numbers(entry: Entry) -> list[int]:
    """Return the numbers of the messages that an entry consumes; invalid ids are ignored."""
    numbers = map(message_number, entry.consumes)
    return [number for number in numbers if number is not None]


def _columns_of(rest: Rest | None) -> tuple[object, ...]:
    if rest is None:
        return None, None, None, None, None, None, False
    return *rest_columns(rest), rest.delete


def rest_columns(rest: Rest) -> tuple[object, ...]:
    """Return the columns of a run that a rest replaces; `None` leaves a column unchanged."""
    tags = None if rest.tags is None else as_json(rest.tags)
    awaits = as_json(rest.awaits)
    return rest.status, rest.wake_at, awaits, rest.version, tags, rest.summary


def as_json(names: Sequence[str]) -> str:
    """Return names of events, or tags, as a JSON array."""
    return codec.dumps(list(names)).decode() if names else "[]"
