"""Writing journal entries and rests: in one statement when it can be, else under locks."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from perdure.store import Entry, Rest, Verdict
from perdure.stores.mysql import statements as sql
from perdure.stores.mysql.database import Database, Result, Transaction
from perdure.stores.mysql.errors import Refused
from perdure.stores.mysql.literals import Rows, Statement, Value, read_moment
from perdure.stores.mysql.rows import LARGEST_STATEMENT, chunks, names_as_json, row_size
from perdure.stores.mysql.statements import Statements


class Letter(NamedTuple):
    """A message that lies in an inbox: its number, and whether its dedup id must be kept."""

    seq: int
    name: str
    is_known: bool


class Writer:
    """Writes entries, all of a call in one transaction."""

    def __init__(
        self, database: Database, statements: Statements, key: Callable[[str], str]
    ) -> None:
        self._database = database
        self._on = statements
        self._key = key

    async def write(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Give a verdict for each entry, in order."""
        if not entries or await self._write_at_once(entries):
            return [Verdict.ACCEPTED] * len(entries)
        return await self._database.transact(
            lambda transaction: self.write_in(transaction, entries)
        )

    async def write_in(
        self, transaction: Transaction, entries: Sequence[Entry]
    ) -> Sequence[Verdict]:
        """Give a verdict for each entry, decided and written while the runs are locked."""
        batch = Batch(self._on, self._key)
        batch.learn(await transaction.run(*batch.questions(entries)))
        if closed := batch.closed(entries):
            batch.learn_written(await transaction.run(*closed))
        verdicts = [batch.judge(entry) for entry in entries]
        written = batch.written()
        if written:
            await transaction.finish(*written)
        return verdicts

    async def fence(self, transaction: Transaction, id: str, epoch: int) -> Verdict:
        """Return the verdict on a new entry of the epoch."""
        [found] = await transaction.run(self._on(sql.FENCE, epoch, self._key(id)))
        return _verdict(found)

    async def finish(self, transaction: Transaction, entry: Entry) -> Verdict:
        """Return the verdict on the entry that ends a user's transaction."""
        key = self._key(entry.id)
        held, written = await transaction.run(
            self._on(sql.FENCE_LOCKED, entry.epoch, key),
            self._on(sql.ENTRY, key, entry.epoch, entry.n),
        )
        verdict = _verdict(held)
        # An entry that is there already means that what the user wrote is, too.
        if verdict is not Verdict.ACCEPTED or written.rows:
            return verdict
        return (await self.write_in(transaction, [entry]))[0]

    async def _write_at_once(self, entries: Sequence[Entry]) -> bool:
        """Write without looking first; False when it must be looked at, and nothing was written."""
        if any(entry.consumes for entry in entries):
            return False
        if len(entries) == 1:
            return await self._write_one(entries[0])
        if any(entry.rest is not None for entry in entries):
            return False
        rows = [(self._key(entry.id), entry.epoch, entry.n, entry.data) for entry in entries]
        if sum(map(row_size, rows)) > LARGEST_STATEMENT:
            return False
        try:
            await self._database.run_alone(self._append(sorted(rows)))
        except Refused:
            return False
        return True

    async def _write_one(self, entry: Entry) -> bool:
        if entry.rest is not None and entry.rest.delete:
            forgotten = self._on(sql.FORGET_ONE, self._key(entry.id), entry.epoch)
            return (await self._database.run_alone(forgotten)).count > 0
        if entry.rest is not None:
            [first, *_] = await self._database.run(*self._rest(entry, entry.rest))
            return first.count == 1
        values = (entry.n, entry.data, self._key(entry.id), entry.epoch)
        try:
            result = await self._database.run_alone(self._on(sql.APPEND_ONE, *values))
        except Refused:
            return False
        return result.count == 1

    def _rest(self, entry: Entry, rest: Rest) -> Iterator[Statement]:
        key = self._key(entry.id)
        place = (key, entry.epoch, entry.n)
        lying = (rest.status, rest.wake_at, names_as_json(rest.awaits))
        yield self._on(sql.REST_ONE, entry.data, *lying, entry.n, key, entry.epoch)
        yield self._on(sql.FOLD_ONE, key, entry.epoch, *place[1:], *place)
        if rest.awaits:
            yield self._on(sql.EXPECT_ONE, *place, key, [*rest.awaits])

    def _append(self, rows: Sequence[tuple[str, int, int, bytes]]) -> Statement:
        first, *others = rows
        return self._on(sql.APPEND, *first, Rows(sql.NEXT_ENTRY, others, b" UNION ALL "))


class Batch:
    """The entries of one call: what is asked first, the verdicts, and what is written then."""

    def __init__(self, statements: Statements, key: Callable[[str], str]) -> None:
        self._on = statements
        self._key = key
        self._now: datetime | None = None
        self._epochs: dict[str, int] = {}
        self._folded: dict[str, int] = {}
        self._open: set[str] = set()
        self._written: set[tuple[str, int, int]] = set()
        self._mail: dict[str, dict[str, Letter]] = defaultdict(dict)
        self._rows: dict[str, dict[tuple[int, int], bytes]] = defaultdict(dict)
        self._taken: list[Letter] = []
        self._rests: dict[str, tuple[Entry, Rest]] = {}
        self._gone: list[str] = []

    def questions(self, entries: Sequence[Entry]) -> Sequence[Statement]:
        """Give the statements that lock the runs and read what the verdicts depend on."""
        keys = sorted({self._key(entry.id) for entry in entries})
        mailed = [
            self._key(entry.id)
            for entry in entries
            if entry.consumes or (entry.rest is not None and entry.rest.awaits)
        ]
        asked = [self._on(sql.LOCK, keys)]
        if mailed:
            asked.append(self._on(sql.MAIL, sorted(set(mailed))))
        return asked

    def learn(self, results: Sequence[Result]) -> None:
        """Take in what the questions were answered with."""
        held, *mail = results
        for key, epoch, folded, is_open, now in held.rows:
            self._epochs[key], self._folded[key] = epoch, folded
            if is_open:
                self._open.add(key)
            self._now = self._now or read_moment(now)
        for result in mail:
            for key, seq, name, is_known in result.rows:
                self._mail[key][str(seq)] = Letter(seq, name, bool(is_known))

    def closed(self, entries: Sequence[Entry]) -> Sequence[Statement]:
        """Return the statements that look for entries of closed epochs in the journal."""
        places = ((self._key(entry.id), entry.epoch, entry.n) for entry in entries)
        return [
            self._on(sql.ENTRY, *place)
            for place in places
            if self._epochs.get(place[0]) == place[1] and place[0] not in self._open
        ]

    def learn_written(self, results: Sequence[Result]) -> None:
        """Take in which entries of closed epochs were found."""
        self._written.update((run, epoch, n) for found in results for run, epoch, n in found.rows)

    def judge(self, entry: Entry) -> Verdict:
        """Give the verdict on the next entry, and remember what it changes."""
        key = self._key(entry.id)
        if key not in self._epochs:
            return Verdict.UNKNOWN
        if entry.epoch != self._epochs[key]:
            return Verdict.FENCED
        if key in self._open:
            self._accept(key, entry)
            return Verdict.ACCEPTED
        is_there = entry.n <= self._folded[key] or (key, entry.epoch, entry.n) in self._written
        return Verdict.ACCEPTED if is_there else Verdict.FENCED

    def _accept(self, key: str, entry: Entry) -> None:
        if entry.consumes:
            letters = self._mail[key]
            self._taken += [letters.pop(id) for id in entry.consumes if id in letters]
        if entry.rest is None:
            self._rows[key].setdefault((entry.epoch, entry.n), entry.data)
            return
        # The rest holds what the entries before it hold, and closes the epoch.
        self._rows.pop(key, None)
        self._open.discard(key)
        if entry.rest.delete:
            del self._epochs[key]
            self._gone.append(key)
        else:
            self._folded[key] = entry.n
            self._rests[key] = entry, entry.rest

    def written(self) -> Sequence[Statement]:
        """Give what is to be written."""
        on = self._on
        written = self._takes()
        emptied = sorted({*self._rests, *self._gone})
        if emptied:
            written.append(on(sql.FORGET_JOURNALS, emptied))
        if self._gone:
            written.append(on(sql.FORGET_INBOXES, self._gone))
            written.append(on(sql.FORGET_RUNS, self._gone))
        rests = [self._rest(key, *rest) for key, rest in self._rests.items()]
        written += [on(sql.REST, rows) for rows in chunks(rests)]
        entries = [
            (key, *place, data) for key, rows in self._rows.items() for place, data in rows.items()
        ]
        return [*written, *(on(sql.ADD, rows) for rows in chunks(entries))]

    def _takes(self) -> list[Statement]:
        simple = [letter.seq for letter in self._taken if not letter.is_known]
        known = [letter.seq for letter in self._taken if letter.is_known]
        consumes = [self._on(sql.TAKE, simple)] if simple else []
        return [*consumes, self._on(sql.TAKE_KNOWN, known)] if known else consumes

    def _rest(self, key: str, entry: Entry, rest: Rest) -> Sequence[Value]:
        awaited = any(letter.name in rest.awaits for letter in self._mail[key].values())
        wake_at = self._now if awaited else rest.wake_at
        lying = (rest.status, wake_at, names_as_json(rest.awaits))
        return (key, entry.epoch, entry.n, entry.data, *lying, self._now)


def _verdict(fence: Result) -> Verdict:
    if not fence.rows:
        return Verdict.UNKNOWN
    [(is_open,)] = fence.rows
    return Verdict.ACCEPTED if is_open else Verdict.FENCED
