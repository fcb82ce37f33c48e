"""The operations on runs, as statements for a database with the SQLite schema.

An operation is a generator. It yields rounds of statements, receives their outcomes and returns the
result. It does no I/O, so files and servers share the same operations. Each round is atomic. An
operation is correct whether all of its rounds share one transaction or each is committed
separately.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias, TypeVar

import msgspec

from perdure.errors import StoreError
from perdure.store import Entry, Rest, Verdict
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.statements import Outcome, Row, Statement, Statements, Value

T = TypeVar("T")
Verb: TypeAlias = Generator[Sequence[Statement], Sequence[Outcome], T]

MICROSECOND = timedelta(microseconds=1)


def micros_or_none(time: datetime | None) -> int | None:
    """Return a datetime as microseconds since 1970, and `None` as `None`."""
    return None if time is None else to_microseconds(time)


def json_text(values: Sequence[object] | Mapping[str, object] | None) -> str | None:
    """Return a list or a dict as JSON for `json_each`, and `None` as `None`."""
    try:
        return None if values is None else msgspec.json.encode(values).decode()
    except UnicodeEncodeError as error:
        raise StoreError(f"a string cannot be stored: {error}") from error


def tags_text(tags: Sequence[str] | None) -> str | None:
    """Return tags as they are stored, and `None` as `None`."""
    return json_text(tags) if tags or tags is None else "[]"


def decode_text(data: bytes) -> str:
    """Return JSON as the text that is stored."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"a string cannot be stored: {error}") from error


def rest_columns(rest: Rest) -> tuple[str, str | None, int | None]:
    """Return the status, the awaited events and the wake time of a rest."""
    return rest.status, json_text(rest.awaits or None), micros_or_none(rest.wake_at)


def header_columns(rest: Rest) -> tuple[int | None, str | None, bytes | None]:
    """Return the version, the tags and the summary of a rest; `None` leaves one unchanged."""
    return rest.version, tags_text(rest.tags), rest.summary


def to_stamp(time: datetime) -> str:
    """Return a datetime as `updated_at` is stored."""
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_stamp(listed_at: str) -> datetime:
    """Return when a run was last updated."""
    try:
        return datetime.fromisoformat(listed_at)
    except ValueError:
        # Written by another program: a date that SQLite accepts but Python does not.
        return from_microseconds(0)


class Verbs:
    """Statements on one store's tables, for the runs whose ids begin with `prefix`.

    `now` returns the store's time in microseconds, or `None` to use the database's clock.
    """

    def __init__(self, statements: Statements, prefix: str, now: Callable[[], int | None]) -> None:
        self._statements = statements
        self._prefix = prefix
        self._now = now

    def _statement(self, template: str, **values: Value) -> Statement:
        return Statement(self._statements.sql(template), values)

    def _now_and_stamp(self) -> tuple[int, str] | tuple[None, None]:
        """Return the store's time as a number, and as `updated_at` is stored."""
        now = self._now()
        return (None, None) if now is None else (now, to_stamp(from_microseconds(now)))

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]


class RunVerbs(Verbs):
    """The operations that do not lease runs."""

    def load(self, id: str) -> Verb[tuple[Sequence[bytes], datetime] | None]:
        """Return the snapshot, the entries after it in order, and when the snapshot was written."""
        [run] = yield [self._statement(sql.LOAD, id=self._prefix + id)]
        if not run.rows:
            return None
        return [row[2] for row in run.rows], read_stamp(run.rows[0][3])

    def save(self, id: str, snapshot: bytes, workflow: str | None, rest: Rest) -> Verb[None]:
        """Replace the run."""
        key = self._prefix + id
        names = ("status", "awaits", "wake_at", "version", "tags", "summary")
        columns = (*rest_columns(rest), *header_columns(rest))
        values: dict[str, Value] = dict(zip(names, columns, strict=True))
        values |= {"snapshot": snapshot, "workflow": workflow, "now": self._now()}
        yield [
            self._statement(sql.SAVE, id=key, **values),
            self._statement(sql.DELETE_JOURNAL, id=key),
        ]

    def delete(self, id: str) -> Verb[bool]:
        """Delete the run; a trigger deletes its journal and inbox."""
        [outcome] = yield [self._statement(sql.DELETE, id=self._prefix + id)]
        return outcome.changed > 0

    def append(self, entries: Sequence[Entry]) -> Verb[Sequence[Verdict]]:
        """Write the entries and return a verdict on each."""
        if (yield from self._write_all(entries)):
            return [Verdict.ACCEPTED] * len(entries)
        places: list[Row] = [(self._prefix + entry.id, entry.epoch, entry.n) for entry in entries]
        outcomes = yield self._statements.many(sql.WRITTEN_ENTRIES, places)
        is_written = {row[:3]: bool(row[3]) for outcome in outcomes for row in outcome.rows}
        deletions = _last_deletions(entries)
        return [
            _verdict(is_written.get(place), deletes=index <= deletions.get(entry.id, -1))
            for index, (entry, place) in enumerate(zip(entries, places, strict=True))
        ]

    def record(self, entry: Entry) -> Verb[bool]:
        """Write one entry and return whether it was both accepted and new."""
        return (yield from self._write_all([entry]))

    def fence(self, id: str, epoch: int) -> Verb[Verdict]:
        """Return the verdict on a new entry of the epoch."""
        [run] = yield [self._statement(sql.FENCE, id=self._prefix + id, epoch=epoch)]
        return _verdict(run.rows[0][0] if run.rows else None)

    def _write_all(self, entries: Sequence[Entry]) -> Verb[bool]:
        """Write the entries and return whether each was both accepted and new."""
        consumed_rows: list[Row] = []
        additions: list[Row] = []
        rests: list[Row] = []
        deletions: list[Row] = []
        closed_rows: set[Row] = set()
        for entry in entries:
            epoch = (self._prefix + entry.id, entry.epoch)
            if epoch in closed_rows:
                continue
            consumed_rows += [(*epoch, message) for message in entry.consumes]
            if entry.rest is None:
                additions.append((*epoch, entry.n, decode_text(entry.data)))
                continue
            closed_rows.add(epoch)
            if entry.rest.delete:
                deletions.append(epoch)
            else:
                rest = *rest_columns(entry.rest), *header_columns(entry.rest)
                rests.append((*epoch, entry.n, decode_text(entry.data), *rest))
        # Entries are ordered by epoch and number, so they can be written in any order, except that
        # a consumed message must not wake the run that is being suspended, and a deletion comes
        # last.
        many = self._statements.many
        before = many(sql.CONSUME_DEDUPLICATED, consumed_rows) + many(sql.CONSUME, consumed_rows)
        writes = many(sql.APPEND, additions)
        after: list[Statement] = []
        if rests:
            time = self._now_and_stamp()
            writes += many(sql.REST, [(*row, *time) for row in rests])
            after = many(sql.DELETE_FOLDED, [row[:3] for row in rests])
        if deletions:
            before += many(sql.DELETE_OWNED_JOURNAL, deletions)
            writes += many(sql.DELETE_OWNED, deletions)
        outcomes = yield [*before, *writes, *after]
        write_outcomes = outcomes[len(before) : len(before) + len(writes)]
        return sum(outcome.changed for outcome in write_outcomes) == len(entries)


def _last_deletions(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return the index of the last entry that deletes its run, by the run's id."""
    return {
        entry.id: index for index, entry in enumerate(entries) if entry.rest and entry.rest.delete
    }


def _verdict(is_accepted: bool | None, *, deletes: bool = False) -> Verdict:
    """Return the verdict; `None` means that the run does not exist."""
    if is_accepted is None:
        # Deleted by this write, or by an earlier one whose reply was lost.
        return Verdict.ACCEPTED if deletes else Verdict.UNKNOWN
    return Verdict.ACCEPTED if is_accepted else Verdict.FENCED
