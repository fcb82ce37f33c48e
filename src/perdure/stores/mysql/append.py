"""Write journal entries and rests: in one statement if possible, otherwise under locks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from perdure.store import Entry, Rest, Verdict
from perdure.stores._checks import message_number
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.errors import ConstraintViolation
from perdure.stores.mysql.literals import Rows, Statement, Value
from perdure.stores.mysql.rows import (
    MAX_STATEMENT_SIZE,
    chunks,
    names_as_json,
    row_size,
    tags_as_json,
)
from perdure.stores.mysql.statements import Statements
from perdure.stores.mysql.tags import DELETE_TAGS, replace_tags

_NO_TAGS = b"[]"
_SAME_VERSION = -1


class StoredMessage(NamedTuple):
    """A message in an inbox; if it has a dedup id, it is marked as consumed rather than deleted."""

    seq: int
    name: str
    has_dedup_id: bool


class Writer:
    """Writes entries; those of one call are written in one transaction."""

    def __init__(
        self, database: Database, statements: Statements, key: Callable[[str], str]
    ) -> None:
        self._database = database
        self._statements = statements
        self._bind = statements.bind
        self._key = key

    async def write(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Return a verdict on each entry, in order."""
        if await self._write_at_once(entries):
            return [Verdict.ACCEPTED] * len(entries)
        return await self._database.transact(
            lambda transaction: self.write_in(transaction, entries)
        )

    async def write_in(
        self, transaction: Transaction, entries: Sequence[Entry]
    ) -> Sequence[Verdict]:
        """Lock the runs, write the entries, and return a verdict on each, in order."""
        batch = Batch(self._statements, self._key)
        batch.add_locked(await transaction.run(*batch.lock(entries)))
        if statements := batch.find_written(entries):
            batch.add_written(await transaction.run(*statements))
        verdicts = [batch.judge(entry) for entry in entries]
        if statements := batch.writes():
            await transaction.finish(*statements)
        return verdicts

    async def fence(self, transaction: Transaction, id: str, epoch: int) -> Verdict:
        """Return the verdict on a new entry of the epoch."""
        [fence] = await transaction.run(self._bind(sql.FENCE, epoch, self._key(id)))
        return _verdict(fence)

    async def finish(self, transaction: Transaction, entry: Entry) -> Verdict:
        """Write the entry that ends a user's transaction, and return the verdict on it."""
        key = self._key(entry.id)
        fence, existing = await transaction.run(
            self._bind(sql.FENCE_LOCKED, entry.epoch, key),
            self._bind(sql.FIND_ENTRY, key, entry.epoch, entry.n),
        )
        verdict = _verdict(fence)
        # If the entry exists, the user's writes were already committed with it.
        if verdict is not Verdict.ACCEPTED or existing.rows:
            return verdict
        return (await self.write_in(transaction, [entry]))[0]

    async def _write_at_once(self, entries: Sequence[Entry]) -> bool:
        """Write without locking first; if that is impossible, write nothing and return `False`."""
        # Messages are consumed and counted only while their run is locked.
        if any(entry.consumes for entry in entries):
            return False
        if len(entries) == 1:
            return await self._write_one(entries[0])
        if any(entry.rest is not None for entry in entries):
            return False
        rows = [(self._key(entry.id), entry.epoch, entry.n, entry.data) for entry in entries]
        if sum(map(row_size, rows)) > MAX_STATEMENT_SIZE:
            return False
        # A fenced entry violates a constraint, which undoes the whole statement. A count of written
        # rows would come too late: another owner could take over before we ask for the reason.
        try:
            await self._database.run_alone(self._append(sorted(rows)))
        except ConstraintViolation:
            return False
        return True

    async def _write_one(self, entry: Entry) -> bool:
        if entry.rest is not None and entry.rest.delete:
            delete = self._bind(sql.DELETE_ONE, self._key(entry.id), entry.epoch)
            return (await self._database.run_alone(delete)).count > 0
        if entry.rest is not None:
            # One packet with COMMIT: if the first statement matches no run, the others do nothing.
            [first, *_] = await self._database.run(*self._rest(entry, entry.rest))
            return first.count == 1
        values = (entry.n, entry.data, self._key(entry.id), entry.epoch)
        try:
            result = await self._database.run_alone(self._bind(sql.APPEND_ONE, *values))
        except ConstraintViolation:
            return False
        return result.count == 1

    def _rest(self, entry: Entry, rest: Rest) -> Iterator[Statement]:
        key = self._key(entry.id)
        place = (key, entry.epoch, entry.n)
        columns = (rest.status, rest.wake_at, names_as_json(rest.awaits))
        header = (rest.version, rest.summary)
        same_tags = (rest.tags is None, tags_as_json(rest.tags))
        yield self._bind(
            sql.REST_ONE, entry.data, *columns, entry.n, *header, key, entry.epoch, *same_tags
        )
        yield self._bind(sql.DELETE_FOLDED, key, entry.epoch, *place[1:], *place)
        if rest.awaits:
            yield self._bind(sql.WAKE_IF_MESSAGE, *place, key, [*rest.awaits])

    def _append(self, rows: Sequence[tuple[str, int, int, bytes]]) -> Statement:
        first, *others = rows
        return self._bind(sql.APPEND, *first, Rows(sql.APPEND_ROW, others, b" UNION ALL "))


class Batch:
    """The entries of one call, with the statements to lock and write them, and the verdicts.

    `lock` and `add_locked` come first, then `find_written` and `add_written`, then `judge` for each
    entry in order, then `writes`.
    """

    def __init__(self, statements: Statements, key: Callable[[str], str]) -> None:
        self._statements = statements
        self._bind = statements.bind
        self._key = key
        self._epochs: dict[str, int] = {}
        self._last_folded: dict[str, int] = {}
        self._open: set[str] = set()
        self._existing_places: set[tuple[str, int, int]] = set()
        self._messages: dict[str, dict[str, StoredMessage]] = defaultdict(dict)
        self._entries: dict[str, dict[tuple[int, int], bytes]] = defaultdict(dict)
        self._consumed_messages: list[tuple[str, StoredMessage]] = []
        self._tags: dict[str, bytes] = {}
        self._new_tags: dict[str, Sequence[str]] = {}
        self._rests: dict[str, tuple[Entry, Rest]] = {}
        self._deleted_keys: list[str] = []

    def lock(self, entries: Sequence[Entry]) -> Sequence[Statement]:
        """Return the statements that lock the runs and read what the verdicts depend on."""
        keys = sorted({self._key(entry.id) for entry in entries})
        keys_of_inboxes = {
            self._key(entry.id) for entry in entries if entry.rest is not None and entry.rest.awaits
        }
        seqs = {message_number(id) for entry in entries for id in entry.consumes} - {None}
        statements = [self._bind(sql.LOCK, keys)]
        if keys_of_inboxes:
            statements.append(self._bind(sql.MESSAGES, sorted(keys_of_inboxes)))
        if seqs:
            statements.append(self._bind(sql.MESSAGES_TO_CONSUME, [*seqs], keys))
        return statements

    def add_locked(self, results: Sequence[Result]) -> None:
        """Add the results of `lock`."""
        runs, *inboxes = results
        for key, epoch, last_folded, is_open, tags in runs.rows:
            self._epochs[key], self._last_folded[key] = epoch, last_folded
            self._tags[key] = tags.encode()
            if is_open:
                self._open.add(key)
        for inbox in inboxes:
            for key, seq, name, has_dedup_id in inbox.rows:
                self._messages[key][str(seq)] = StoredMessage(seq, name, bool(has_dedup_id))

    def find_written(self, entries: Sequence[Entry]) -> Sequence[Statement]:
        """Return the statements that look for entries of closed epochs in the journal."""
        places = ((self._key(entry.id), entry.epoch, entry.n) for entry in entries)
        return [
            self._bind(sql.FIND_ENTRY, *place)
            for place in places
            if self._epochs.get(place[0]) == place[1] and place[0] not in self._open
        ]

    def add_written(self, results: Sequence[Result]) -> None:
        """Add the results of `find_written`."""
        rows = (row for result in results for row in result.rows)
        self._existing_places.update((key, epoch, n) for key, epoch, n in rows)

    def judge(self, entry: Entry) -> Verdict:
        """Return the verdict on the next entry, and record what it changes."""
        key = self._key(entry.id)
        if key not in self._epochs:
            return Verdict.UNKNOWN
        if entry.epoch != self._epochs[key]:
            return Verdict.FENCED
        if key in self._open:
            self._accept(key, entry)
            return Verdict.ACCEPTED
        exists = (
            entry.n <= self._last_folded[key]
            or (key, entry.epoch, entry.n) in self._existing_places
        )
        return Verdict.ACCEPTED if exists else Verdict.FENCED

    def _accept(self, key: str, entry: Entry) -> None:
        if entry.consumes:
            messages = self._messages[key]
            consumed_messages = (messages.pop(id) for id in entry.consumes if id in messages)
            self._consumed_messages += ((key, message) for message in consumed_messages)
        if entry.rest is None:
            self._entries[key].setdefault((entry.epoch, entry.n), entry.data)
            return
        # The rest contains the entries before it, and closes the epoch.
        self._entries.pop(key, None)
        self._open.discard(key)
        if entry.rest.delete:
            del self._epochs[key]
            self._deleted_keys.append(key)
        else:
            self._last_folded[key] = entry.n
            self._rests[key] = entry, entry.rest
            tags = entry.rest.tags
            if tags is not None and tags_as_json(tags) != self._tags[key]:
                self._new_tags[key] = tags

    def writes(self) -> Sequence[Statement]:
        """Return the statements that write the accepted entries."""
        bind = self._bind
        statements = [*self._consume()]
        if keys := sorted({*self._rests, *self._deleted_keys}):
            statements.append(bind(sql.DELETE_JOURNALS, keys))
        if self._deleted_keys:
            statements.append(bind(sql.DELETE_INBOXES, self._deleted_keys))
            statements.append(bind(sql.DELETE_RUNS, self._deleted_keys))
        if tagged_keys := [key for key in self._deleted_keys if self._tags[key] != _NO_TAGS]:
            statements.append(bind(DELETE_TAGS, tagged_keys))
        rests = [self._rest_row(key, *rest) for key, rest in self._rests.items()]
        statements += [bind(sql.REST, rows) for rows in chunks(rests)]
        statements += replace_tags(self._statements, self._new_tags)
        entries = [
            (key, *place, data)
            for key, journal in self._entries.items()
            for place, data in journal.items()
        ]
        return [*statements, *(bind(sql.INSERT_ENTRIES, rows) for rows in chunks(entries))]

    def _consume(self) -> Iterator[Statement]:
        for template, has_dedup_id in ((sql.CONSUME, False), (sql.MARK_CONSUMED, True)):
            seqs = [
                each.seq for _, each in self._consumed_messages if each.has_dedup_id is has_dedup_id
            ]
            if seqs:
                yield self._bind(template, seqs)
        keys_by_number: dict[int, list[Value]] = defaultdict(list)
        for key, number in Counter(key for key, _ in self._consumed_messages).items():
            keys_by_number[number].append(key)
        for number, keys in keys_by_number.items():
            yield self._bind(sql.COUNT_CONSUMED, number, keys)

    def _rest_row(self, key: str, entry: Entry, rest: Rest) -> Sequence[Value]:
        has_message = any(each.name in rest.awaits for each in self._messages[key].values())
        wake_at = sql.NOW if has_message else rest.wake_at
        columns = (rest.status, wake_at, names_as_json(rest.awaits))
        version = _SAME_VERSION if rest.version is None else rest.version
        header = (version, tags_as_json(self._new_tags.get(key)), rest.summary)
        return (key, entry.epoch, entry.n, entry.data, *columns, *header)


def _verdict(fence: Result) -> Verdict:
    if not fence.rows:
        return Verdict.UNKNOWN
    [(is_open,)] = fence.rows
    return Verdict.ACCEPTED if is_open else Verdict.FENCED
