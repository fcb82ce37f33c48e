"""Writing journal entries and rests: in one statement when it can be, else under locks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores import _mysql_sql as sql
from perdure.stores._mysql_database import Database, Result, Transaction
from perdure.stores._mysql_errors import Refused
from perdure.stores._mysql_literals import Statement, Value, read_moment
from perdure.stores._mysql_sql import Statements

# A statement of more is not worth its memory, on either side.
_LARGEST_STATEMENT = 1024 * 1024
_ROW_OVERHEAD = 1024


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
        self._statements = statements
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
        batch = Batch(self._statements, self._key)
        batch.learn(await transaction.run(*batch.questions(entries)))
        verdicts = [batch.judge(entry) for entry in entries]
        statements = batch.statements()
        if statements:
            await transaction.finish(*statements)
        return verdicts

    async def is_written(self, transaction: Transaction, entry: Entry) -> bool:
        """Tell whether the entry lies there already, or in the snapshot; locks the run."""
        key = self._key(entry.id)
        held, found = await transaction.run(
            self._statements(sql.LOCK, [key]),
            self._statements(sql.ENTRY, key, entry.epoch, entry.n),
        )
        is_folded = any(epoch == entry.epoch and entry.n <= n for _, epoch, n in held.rows)
        return is_folded or bool(found.rows)

    async def _write_at_once(self, entries: Sequence[Entry]) -> bool:
        """Write journal entries without looking first; False when it must be looked at."""
        if any(entry.rest is not None or entry.takes for entry in entries):
            return False
        if len(entries) == 1:
            return await self._write_one(entries[0])
        if sum(len(entry.data) + _ROW_OVERHEAD for entry in entries) > _LARGEST_STATEMENT:
            return False
        try:
            await self._database.run_alone(self._append(entries))
        except Refused:
            return False
        return True

    async def _write_one(self, entry: Entry) -> bool:
        values = (entry.n, entry.data, self._key(entry.id), entry.epoch, entry.n)
        try:
            result = await self._database.run_alone(self._statements(sql.APPEND_ONE, *values))
        except Refused:
            return False
        return result.count == 1

    def _append(self, entries: Sequence[Entry]) -> Statement:
        rows = sorted((self._key(entry.id), entry.epoch, entry.n, entry.data) for entry in entries)
        source = sql.FIRST_ENTRY + sql.NEXT_ENTRY * (len(rows) - 1)
        statement = self._statements(sql.APPEND.replace("{entries}", source))
        return statement._replace(values=[value for row in rows for value in row])


class Batch:
    """The entries of one call: what is asked first, the verdicts, and what is written then."""

    def __init__(self, statements: Statements, key: Callable[[str], str]) -> None:
        self._statements = statements
        self._key = key
        self._epochs: dict[str, int] = {}
        self._folded: dict[str, int] = {}
        self._mail: dict[str, dict[str, Letter]] = defaultdict(dict)
        self._rows: dict[tuple[str, int, int], bytes] = {}
        self._taken: list[Letter] = []
        self._rests: dict[str, tuple[Entry, Rest]] = {}
        self._gone: list[str] = []

    def questions(self, entries: Sequence[Entry]) -> Sequence[Statement]:
        """Give the statements that lock the runs and read what the verdicts depend on."""
        keys = sorted({self._key(entry.id) for entry in entries})
        mailed = [
            self._key(entry.id)
            for entry in entries
            if entry.takes or (entry.rest is not None and entry.rest.awaits)
        ]
        asked = [self._statements(sql.LOCK, keys), self._statements(sql.NOW)]
        if mailed:
            asked.append(self._statements(sql.MAIL, sorted(set(mailed))))
        return asked

    def learn(self, results: Sequence[Result]) -> None:
        """Take in what the questions were answered with."""
        held, now, *mail = results
        self._now: datetime = read_moment(now.rows[0][0])
        for key, epoch, folded in held.rows:
            self._epochs[key], self._folded[key] = epoch, folded
        for result in mail:
            for key, seq, name, is_known in result.rows:
                self._mail[key][str(seq)] = Letter(seq, name, bool(is_known))

    def judge(self, entry: Entry) -> Verdict:
        """Give the verdict on the next entry, and remember what it changes."""
        key = self._key(entry.id)
        if key not in self._epochs:
            return Verdict.UNKNOWN
        if entry.epoch != self._epochs[key]:
            return Verdict.FENCED
        if entry.n > self._folded[key]:
            self._accept(key, entry)
        return Verdict.ACCEPTED

    def _accept(self, key: str, entry: Entry) -> None:
        letters = self._mail[key]
        self._taken += [letters.pop(id) for id in entry.takes if id in letters]
        if entry.rest is None:
            self._rows.setdefault((key, entry.epoch, entry.n), entry.data)
            return
        # The rest holds what the entries before it hold.
        self._rows = {place: data for place, data in self._rows.items() if place[0] != key}
        if entry.rest.gone:
            del self._epochs[key]
            self._gone.append(key)
        else:
            self._folded[key] = entry.n
            self._rests[key] = entry, entry.rest

    def statements(self) -> Sequence[Statement]:
        """Give what is to be written."""
        on = self._statements
        written = self._takes()
        emptied = sorted({*self._rests, *self._gone})
        if emptied:
            written.append(on(sql.FORGET_JOURNALS, emptied))
        written += [self._rest(key, *rest) for key, rest in self._rests.items()]
        if self._gone:
            written.append(on(sql.FORGET_INBOXES, self._gone))
            written.append(on(sql.FORGET_RUNS, self._gone))
        rows = [(*place, data) for place, data in self._rows.items()]
        return [*written, *(on(sql.ADD, chunk) for chunk in chunks(rows))]

    def _takes(self) -> list[Statement]:
        simple = [letter.seq for letter in self._taken if not letter.is_known]
        known = [letter.seq for letter in self._taken if letter.is_known]
        takes = [self._statements(sql.TAKE, simple)] if simple else []
        return [*takes, self._statements(sql.TAKE_KNOWN, known)] if known else takes

    def _rest(self, key: str, entry: Entry, rest: Rest) -> Statement:
        awaited = any(letter.name in rest.awaits for letter in self._mail[key].values())
        wake_at = self._now if awaited else rest.wake_at
        values = (entry.data, rest.status, wake_at, names_as_json(rest.awaits), self._now, entry.n)
        return self._statements(sql.REST, *values, key)


def chunks(rows: Sequence[Sequence[Value]]) -> list[list[Value]]:
    """Give rows in lists, each short enough for one statement unless it is a single row."""
    found: list[list[Value]] = []
    room = 0
    for row in rows:
        size = _ROW_OVERHEAD + sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > room:
            found.append([])
            room = _LARGEST_STATEMENT
        found[-1].append(row)
        room -= size
    return found


def names_as_json(names: Sequence[str]) -> bytes | None:
    """Give the names of events as a JSON array, and no names as None."""
    return codec.dumps(list(names)) if names else None
