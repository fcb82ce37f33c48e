"""The verbs on runs: which statements they send to a database with the SQLite schema.

A verb is a generator. It yields rounds of statements, receives their outcomes and returns the
result. It does no I/O, so a file and a server share the same verbs. Each round is atomic. A verb
is correct whether all of its rounds share one transaction or each is committed by itself.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias, TypeVar, cast

import msgspec

from perdure.errors import StoreError
from perdure.snapshot import RunStatus
from perdure.store import Delivery, Entry, Message, Rest, Stats, Verdict
from perdure.stores import _shell as shell
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.statements import Outcome, Row, Statement, Statements, Value

T = TypeVar("T")
Verb: TypeAlias = Generator[Sequence[Statement], Sequence[Outcome], T]

MICROSECOND = timedelta(microseconds=1)

# Sorts after every time, so that the first page begins with the newest run.
_AFTER_ALL_TIMES = "~"


def micros_or_none(time: datetime | None) -> int | None:
    """Return a datetime as microseconds since 1970, and `None` as `None`."""
    return None if time is None else to_microseconds(time)


def json_text(values: Sequence[object] | None) -> str | None:
    """Return a list as JSON for `json_each`, and `None` as `None`."""
    try:
        return None if values is None else msgspec.json.encode(values).decode()
    except UnicodeEncodeError as error:
        raise StoreError(f"a string cannot be stored: {error}") from error


def decode_text(data: bytes) -> str:
    """Return JSON as the text that is stored."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"a string cannot be stored: {error}") from error


def read_message(seq: int, name: str, payload: bytes, sent_at: int) -> Message:
    """Return the message in a row of the inbox."""
    return Message(str(seq), name, payload, from_microseconds(sent_at))


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
        return (None, None) if now is None else (now, _stamp(from_microseconds(now)))

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]


class RunVerbs(Verbs):
    """The verbs that do not lease runs."""

    def load(self, id: str) -> Verb[tuple[Sequence[bytes], datetime] | None]:
        """Return the snapshot, the entries after it in order, and when the former was written."""
        [run] = yield [self._statement(sql.LOAD, id=self._prefix + id)]
        if not run.rows:
            return None
        return [row[2] for row in run.rows], _read_stamp(run.rows[0][3])

    def save(self, id: str, snapshot: bytes, workflow: str | None, rest: Rest) -> Verb[None]:
        """Replace the run."""
        key = self._prefix + id
        status, awaits, wake_at = _rest_columns(rest)
        yield [
            self._statement(
                sql.SAVE,
                id=key,
                snapshot=snapshot,
                workflow=workflow,
                status=status,
                awaits=awaits,
                wake_at=wake_at,
                now=self._now(),
            ),
            self._statement(sql.DELETE_JOURNAL, id=key),
        ]

    def delete(self, id: str) -> Verb[bool]:
        """Delete the run; a trigger deletes its journal and inbox."""
        [deleted] = yield [self._statement(sql.DELETE, id=self._prefix + id)]
        return deleted.changed > 0

    def list(self, query: shell.Query) -> Verb[Sequence[shell.Row]]:
        """Return a page of runs, the most recently updated first."""
        after, after_id = _AFTER_ALL_TIMES, ""
        if query.after is not None:
            after, after_id = _stamp(query.after[0]), self._prefix + query.after[1]
        [page] = yield [
            self._statement(
                sql.LIST,
                prefix=self._prefix + query.prefix,
                limit=query.limit,
                status=query.status,
                workflow=query.workflow,
                after=after,
                after_id=after_id,
            )
        ]
        return [
            shell.Row(self._id(key), _read_stamp(listed_at), status, workflow, owner)
            for key, listed_at, status, workflow, owner in page.rows
        ]

    def append(self, entries: Sequence[Entry]) -> Verb[Sequence[Verdict]]:
        """Write the entries and return a verdict on each."""
        if (yield from self._write_all(entries)):
            return [Verdict.ACCEPTED] * len(entries)
        places: list[Row] = [(self._prefix + entry.id, entry.epoch, entry.n) for entry in entries]
        outcomes = yield self._statements.many(sql.WRITTEN, places)
        written = {row[:3]: bool(row[3]) for outcome in outcomes for row in outcome.rows}
        deletions = _last_deletions(entries)
        return [
            _verdict(written.get(place), deletes=index <= deletions.get(entry.id, -1))
            for index, (entry, place) in enumerate(zip(entries, places, strict=True))
        ]

    def record(self, entry: Entry) -> Verb[bool]:
        """Write one entry and return whether it was both allowed and new."""
        return (yield from self._write_all([entry]))

    def fence(self, id: str, epoch: int) -> Verb[Verdict]:
        """Return the verdict on a new entry of the epoch."""
        [run] = yield [self._statement(sql.FENCE, id=self._prefix + id, epoch=epoch)]
        return _verdict(run.rows[0][0] if run.rows else None)

    def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Verb[Delivery]:
        """Put a message in the run's inbox and wake a run that waits for it."""
        key, now = self._prefix + id, self._now()
        sent, _, reason = yield [
            self._statement(
                sql.SEND, id=key, name=name, payload=payload, dedup_id=dedup_id, now=now
            ),
            self._statement(sql.WAKE_IF_MESSAGE, id=key, name=name, now=now),
            self._statement(sql.EXPLAIN_SEND, id=key, dedup_id=dedup_id),
        ]
        if sent.changed:
            return Delivery.DELIVERED
        if not reason.rows:
            return Delivery.UNKNOWN
        return Delivery.DUPLICATE if reason.rows[0][0] else Delivery.OVER

    def inbox(self, id: str) -> Verb[Sequence[Message]]:
        """Return the run's messages that were not consumed."""
        [messages] = yield [self._statement(sql.INBOX, id=self._prefix + id)]
        return [read_message(*row) for row in messages.rows]

    def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> Verb[int]:
        """Delete old runs of these statuses; return how many."""
        [pruned] = yield [
            self._statement(
                sql.PRUNE,
                older_than=older_than // MICROSECOND,
                statuses=json_text(statuses),
                limit=limit,
                prefix=self._prefix,
                now=self._now(),
            )
        ]
        return pruned.changed

    def stats(self) -> Verb[Stats]:
        """Count the runs by status and find the oldest due one."""
        counts, oldest = yield [
            self._statement(sql.COUNT, prefix=self._prefix),
            self._statement(sql.OLDEST_DUE, prefix=self._prefix, now=self._now()),
        ]
        by_status = dict(cast("Sequence[tuple[str, int]]", counts.rows))
        return Stats(by_status, from_microseconds(oldest.rows[0][0]) if oldest.rows else None)

    def _write_all(self, entries: Sequence[Entry]) -> Verb[bool]:
        """Write the entries and return whether each was both allowed and new."""
        consumed: list[Row] = []
        additions: list[Row] = []
        rests: list[Row] = []
        deletions: list[Row] = []
        closed: set[Row] = set()
        for entry in entries:
            epoch = (self._prefix + entry.id, entry.epoch)
            if epoch in closed:
                continue
            consumed += [(*epoch, message) for message in entry.consumes]
            if entry.rest is None:
                additions.append((*epoch, entry.n, decode_text(entry.data)))
                continue
            closed.add(epoch)
            if entry.rest.delete:
                deletions.append(epoch)
            else:
                rests.append((*epoch, entry.n, decode_text(entry.data), *_rest_columns(entry.rest)))
        # An entry has its place by epoch and number, so the order of writing is free, except that
        # a consumed message must not wake the run it suspends, and a deletion comes last.
        many = self._statements.many
        before = many(sql.CONSUME_DEDUPLICATED, consumed) + many(sql.CONSUME, consumed)
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
        written = outcomes[len(before) : len(before) + len(writes)]
        return sum(outcome.changed for outcome in written) == len(entries)


def _last_deletions(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return the index of the last entry that deletes its run, by the run's id."""
    return {
        entry.id: index for index, entry in enumerate(entries) if entry.rest and entry.rest.delete
    }


def _verdict(is_accepted: bool | None, *, deletes: bool = False) -> Verdict:
    """Return the verdict; `None` means that the run does not exist."""
    if is_accepted is None:
        # Deleted by this write, or by an earlier one whose answer was lost.
        return Verdict.ACCEPTED if deletes else Verdict.UNKNOWN
    return Verdict.ACCEPTED if is_accepted else Verdict.FENCED


def _rest_columns(rest: Rest) -> tuple[str, str | None, int | None]:
    return rest.status, json_text(rest.awaits or None), micros_or_none(rest.wake_at)


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _read_stamp(listed_at: str) -> datetime:
    try:
        return datetime.fromisoformat(listed_at)
    except ValueError:
        # Written by another program: a date that SQLite accepts and Python does not.
        return from_microseconds(0)
