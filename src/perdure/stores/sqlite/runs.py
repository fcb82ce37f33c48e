"""What each verb on runs says to a database with the SQLite schema, and what it reads from it.

A verb is a generator: it yields rounds of statements, gets their outcomes and returns the answer.
It does no I/O, so a file and a server are driven by the same verbs. Each round is atomic, and a
verb is right whether all of its rounds share one transaction or each is committed by itself.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias, TypeVar, cast

import msgspec

from perdure.clock import isoformat
from perdure.errors import InvalidArgument, StoreError
from perdure.snapshot import RunStatus
from perdure.store import Delivery, Entry, Message, Rest, RunSummary, Stats, Verdict
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import statements as sql
from perdure.stores.sqlite.statements import Outcome, Row, Statement, Tables, Value

T = TypeVar("T")
Verb: TypeAlias = Generator[Sequence[Statement], Sequence[Outcome], T]

MICROSECOND = timedelta(microseconds=1)

# Sorts after every time, so that the first page begins with the newest.
_AFTER_ALL_TIMES = "~"


def micros_or_none(moment: datetime | None) -> int | None:
    """Give a moment as microseconds since 1970, and None as None."""
    return None if moment is None else to_microseconds(moment)


def json_text(values: Sequence[object] | None) -> str | None:
    """Give a list as JSON for `json_each`, and None as None."""
    try:
        return None if values is None else msgspec.json.encode(values).decode()
    except UnicodeEncodeError as error:
        raise StoreError(f"a text cannot be stored: {error}") from error


def text_of(data: bytes) -> str:
    """Give JSON as the text that lies in the database."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"a text cannot be stored: {error}") from error


def message_of(seq: int, name: str, payload: bytes, sent_at: int) -> Message:
    """Give the message of a row of the inbox."""
    return Message(str(seq), name, payload, from_microseconds(sent_at))


class Verbs:
    """Statements on the tables of one name, for the runs whose ids begin with `prefix`.

    `now` gives the store's time in microseconds, or None where the database's clock counts.
    """

    def __init__(self, tables: Tables, prefix: str, now: Callable[[], int | None]) -> None:
        self._tables = tables
        self._prefix = prefix
        self._now = now

    def _on(self, statement: str, **values: Value) -> Statement:
        return Statement(self._tables[statement], values)

    def _moment(self) -> tuple[int, str] | tuple[None, None]:
        """Give the store's time, also as it is listed."""
        now = self._now()
        return (None, None) if now is None else (now, _stamp(now))

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]


class RunVerbs(Verbs):
    """The verbs of the contract that need no lease of their own."""

    def load(self, id: str) -> Verb[tuple[Sequence[bytes], datetime] | None]:
        """Give the snapshot and the journal after it, in order, and when the former was written."""
        [found] = yield [self._on(sql.LOAD, id=self._prefix + id)]
        if not found.rows:
            return None
        updated_at = _moment_in(found.rows[0][3]) or from_microseconds(0)
        return [row[2] for row in found.rows], updated_at

    def save(self, id: str, snapshot: bytes, workflow: str | None, rest: Rest) -> Verb[None]:
        """Replace the run."""
        key = self._prefix + id
        status, awaits, wake_at = _lying(rest)
        yield [
            self._on(
                sql.SAVE,
                id=key,
                snapshot=snapshot,
                workflow=workflow,
                status=status,
                awaits=awaits,
                wake_at=wake_at,
                now=self._now(),
            ),
            self._on(sql.FORGET_JOURNAL, id=key),
        ]

    def delete(self, id: str) -> Verb[bool]:
        """Remove the run; a trigger removes what belongs to it."""
        [deleted] = yield [self._on(sql.DELETE, id=self._prefix + id)]
        return deleted.changed > 0

    def page(
        self,
        prefix: str,
        limit: int,
        status: RunStatus | None,
        workflow: str | None,
        after: str | None,
    ) -> Verb[Sequence[RunSummary]]:
        """Give a page of runs, newest first."""
        mark, mark_id = (_AFTER_ALL_TIMES, "") if after is None else self._mark(after)
        [page] = yield [
            self._on(
                sql.LIST,
                prefix=self._prefix + prefix,
                limit=limit,
                status=status,
                workflow=workflow,
                mark=mark,
                mark_id=mark_id,
            )
        ]
        return [self._listed(*row) for row in page.rows]

    def append(self, entries: Sequence[Entry]) -> Verb[Sequence[Verdict]]:
        """Write the entries and give a verdict for each."""
        if (yield from self._all_new(entries)):
            return [Verdict.ACCEPTED] * len(entries)
        places: list[Row] = [(self._prefix + entry.id, entry.epoch, entry.n) for entry in entries]
        outcomes = yield self._tables.over(sql.WRITTEN, places)
        written = {row[:3]: bool(row[3]) for outcome in outcomes for row in outcome.rows}
        leaving = _leaving(entries)
        return [
            _verdict(written.get(place), leaves=at <= leaving.get(entry.id, -1))
            for at, (entry, place) in enumerate(zip(entries, places, strict=True))
        ]

    def record(self, entry: Entry) -> Verb[bool]:
        """Write one entry and tell whether it was both allowed and new."""
        return (yield from self._all_new([entry]))

    def fence(self, id: str, epoch: int) -> Verb[Verdict]:
        """Return the verdict on a new entry of the epoch."""
        [found] = yield [self._on(sql.FENCE, id=self._prefix + id, epoch=epoch)]
        return _verdict(found.rows[0][0] if found.rows else None)

    def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Verb[Delivery]:
        """Put an event in the run's inbox and wake the run that awaits it."""
        key, now = self._prefix + id, self._now()
        sent, _, refused = yield [
            self._on(sql.SEND, id=key, name=name, payload=payload, dedup_id=dedup_id, now=now),
            self._on(sql.WAKE, id=key, name=name, now=now),
            self._on(sql.WHY_NOT_SENT, id=key, dedup_id=dedup_id),
        ]
        if sent.changed:
            return Delivery.DELIVERED
        if not refused.rows:
            return Delivery.UNKNOWN
        return Delivery.DUPLICATE if refused.rows[0][0] else Delivery.OVER

    def inbox(self, id: str) -> Verb[Sequence[Message]]:
        """Give the run's messages that were not taken."""
        [found] = yield [self._on(sql.INBOX, id=self._prefix + id)]
        return [message_of(*row) for row in found.rows]

    def prune(self, older_than: timedelta, status: RunStatus | None, limit: int) -> Verb[int]:
        """Delete runs that are over and old; give how many."""
        [pruned] = yield [
            self._on(
                sql.PRUNE,
                older_than=older_than // MICROSECOND,
                status=status,
                limit=limit,
                prefix=self._prefix,
                now=self._now(),
            )
        ]
        return pruned.changed

    def stats(self) -> Verb[Stats]:
        """Count the runs by status and find the oldest due one."""
        counted, oldest = yield [
            self._on(sql.COUNT, prefix=self._prefix),
            self._on(sql.OLDEST_DUE, prefix=self._prefix, now=self._now()),
        ]
        by_status = dict(cast("Sequence[tuple[str, int]]", counted.rows))
        return Stats(by_status, from_microseconds(oldest.rows[0][0]) if oldest.rows else None)

    def _mark(self, cursor: str) -> tuple[str, str]:
        listed_at, space, id = cursor.partition(" ")
        if not space:
            raise InvalidArgument("after", cursor, "the cursor of a line that list() gave")
        return listed_at, self._prefix + id

    def _listed(
        self, key: str, listed_at: str, status: RunStatus, workflow: str | None
    ) -> RunSummary:
        id = self._id(key)
        return RunSummary(id, _with_milliseconds(listed_at), status, workflow, f"{listed_at} {id}")

    def _all_new(self, entries: Sequence[Entry]) -> Verb[bool]:
        """Write the entries and tell whether each was both allowed and new."""
        consumes: list[Row] = []
        additions: list[Row] = []
        rests: list[Row] = []
        delete: list[Row] = []
        closed: set[Row] = set()
        for entry in entries:
            place = (self._prefix + entry.id, entry.epoch)
            if place in closed:
                continue
            if entry.consumes:
                consumes += [(*place, taken) for taken in entry.consumes]
            if entry.rest is None:
                additions.append((*place, entry.n, text_of(entry.data)))
                continue
            closed.add(place)
            if entry.rest.delete:
                delete.append(place)
            else:
                rests.append((*place, entry.n, text_of(entry.data), *_lying(entry.rest)))
        # An entry has its place by epoch and number: the order of writing does not matter. Only
        # what is taken must not wake a run that rests, and a run that goes away goes last.
        over = self._tables.over
        before = over(sql.TAKE_KNOWN, consumes) + over(sql.TAKE_UNKNOWN, consumes)
        writes = over(sql.APPEND, additions)
        after: list[Statement] = []
        if rests:
            moment = self._moment()
            writes += over(sql.REST, [(*row, *moment) for row in rests])
            after = over(sql.FOLD, [row[:3] for row in rests])
        if delete:
            before += over(sql.FORGET_OWNED, delete)
            writes += over(sql.DELETE_OWNED, delete)
        outcomes = yield [*before, *writes, *after]
        written = outcomes[len(before) : len(before) + len(writes)]
        return sum(outcome.changed for outcome in written) == len(entries)


def _leaving(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return the place of the last entry that deletes its run, by the run's id."""
    delete = ((at, entry) for at, entry in enumerate(entries) if entry.rest and entry.rest.delete)
    return {entry.id: at for at, entry in delete}


def _verdict(is_accepted: bool | None, *, leaves: bool = False) -> Verdict:
    """Return the verdict; None means that there is no such run."""
    if is_accepted is None:
        # One that should be gone, and is: by this write, or when its answer was lost before.
        return Verdict.ACCEPTED if leaves else Verdict.UNKNOWN
    return Verdict.ACCEPTED if is_accepted else Verdict.FENCED


def _lying(rest: Rest) -> tuple[str, str | None, int | None]:
    return rest.status, json_text(rest.awaits or None), micros_or_none(rest.wake_at)


def _stamp(now: int) -> str:
    return from_microseconds(now).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _with_milliseconds(listed_at: str) -> str:
    moment = _moment_in(listed_at)
    return listed_at if moment is None else isoformat(moment)


def _moment_in(listed_at: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(listed_at)
    except ValueError:
        return None
    # Another program's times have no zone, and are UTC.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
