"""Writes of journal entries and rests: the statement for each batch, and its verdicts."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from perdure import codec
from perdure.store import Entry, Rest, Verdict
from perdure.stores.postgres.errors import DuplicateRow
from perdure.stores.postgres.statements import Statements

# The statements for most batches write every entry that passes the fence and return how many. If
# any did not pass, the statement of `_write_statement` finds out why. A run whose fence refuses the
# entry is not locked. If another owner commits while this waits for the row, PostgreSQL evaluates
# the condition again on the new row. An epoch is open while its run has an owner: a rest and a
# release end both.
# The bare INSERT fails on an entry that exists, which happens only if it is sent again. ON CONFLICT
# would make every batch a quarter slower.
APPEND_ONE = """
    INSERT INTO {journal} (run, epoch, n, data)
    SELECT $1, $2, $3, $4 FROM (
        SELECT FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        FOR NO KEY UPDATE
    ) AS locked
    RETURNING true
"""

# The record of a wait that received a message. The message is removed only if the run passed the
# fence. What was removed is counted, because an id that is not in the inbox is ignored.
CONSUME_ONE = """
    WITH locked AS MATERIALIZED (
        SELECT id FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        FOR NO KEY UPDATE
    ), written AS (
        INSERT INTO {journal} (run, epoch, n, data) SELECT id, $2, $3, $4 FROM locked
    ), removed AS (
        DELETE FROM {inbox} AS message
        WHERE message.seq = $5 AND message.run = (SELECT id FROM locked) AND message.dedup IS NULL
        RETURNING true
    ), marked AS (
        UPDATE {inbox} AS message SET consumed = true, payload = ''
        WHERE message.seq = $5 AND message.run = (SELECT id FROM locked)
            AND message.dedup IS NOT NULL AND NOT message.consumed
        RETURNING true
    )
    UPDATE {runs} AS run SET messages = run.messages
        - (SELECT count(*) FROM removed) - (SELECT count(*) FROM marked)
    WHERE run.id = (SELECT id FROM locked)
    RETURNING true
"""

APPEND = """
    WITH written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT entry.* FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[])
        ) AS entry (id, epoch, n, data)
        CROSS JOIN LATERAL (
            SELECT FROM {runs} AS run
            WHERE run.id = entry.id AND run.epoch = entry.epoch AND run.owner IS NOT NULL
            FOR NO KEY UPDATE
        ) AS locked
        RETURNING true
    )
    SELECT count(*) FROM written
"""

# The deletions depend on the rows that the fenced statement returns: by themselves they would see
# the fence as it was before another owner took over.
REST_ONE = """
    WITH rested AS (
        UPDATE {runs} AS run SET
            snapshot = {json_of_data}, exact = {exact_of_data}, status = $5, awaits = input.awaits,
            wake_at = CASE WHEN run.messages > 0 AND (
                SELECT count(*) <> run.messages OR bool_or(input.awaits ? message.name)
                FROM {inbox} AS message
                WHERE message.run = run.id AND message.first_epoch = run.first_epoch
                    AND NOT message.consumed
            ) THEN statement_timestamp() ELSE $6 END,
            folded_epoch = $2, folded_n = $3, updated_at = statement_timestamp(),
            owner = NULL, takeovers = 0, clean = true
        FROM (SELECT $4::bytea AS data, $7::text::jsonb AS awaits) AS input
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        RETURNING run.id, {notify_if_due}
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = (SELECT id FROM rested)
    )
    SELECT id FROM rested
"""

DELETE_ONE = """
    WITH deleted_runs AS (
        DELETE FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
        RETURNING run.id
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = (SELECT id FROM deleted_runs)
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = (SELECT id FROM deleted_runs)
    )
    SELECT id FROM deleted_runs
"""

# The statement for any batch consists of the parts it needs, because each part costs planning time.
_LOCKED = """
    WITH locked AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.is_open,
            (run.folded_epoch, run.folded_n) >= (entry.epoch, entry.n) AS folded
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[]),
            (SELECT $5::text[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]),
            (SELECT $8::boolean[])
        ) WITH ORDINALITY AS entry (id, epoch, n, data, status, wake_at, awaits, is_deleted, i)
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NOT NULL AS is_open, folded_epoch, folded_n FROM {runs} AS run
            WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), writable AS MATERIALIZED (
        SELECT * FROM locked WHERE newest AND is_open
    )
"""
_WRITTEN = """
    written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM writable WHERE status IS NULL
        {extra}
    )
"""
_CONSUMED = """
    matched AS MATERIALIZED (
        SELECT writable.id, consumes.seq
        FROM unnest((SELECT $9::bigint[]), (SELECT $10::bigint[])) AS consumes (i, seq)
        JOIN writable USING (i)
        WHERE NOT writable.is_deleted
    ), removed AS (
        DELETE FROM {inbox} AS message USING matched
        WHERE message.seq = matched.seq AND message.run = matched.id AND message.dedup IS NULL
        RETURNING matched.id
    ), marked AS (
        UPDATE {inbox} AS message SET consumed = true, payload = '' FROM matched
        WHERE message.seq = matched.seq AND message.run = matched.id
            AND message.dedup IS NOT NULL AND NOT message.consumed
        RETURNING matched.id
    ), counted AS MATERIALIZED (
        SELECT id, count(*) AS messages
        FROM (SELECT id FROM removed UNION ALL SELECT id FROM marked) AS message
        GROUP BY id
    ), updated AS (
        UPDATE {runs} AS run SET messages = run.messages - counted.messages FROM counted
        WHERE run.id = counted.id
            AND NOT EXISTS (
                SELECT FROM writable
                WHERE writable.id = counted.id AND writable.status IS NOT NULL
            )
    )
"""
_NOTHING_CONSUMED = """
    matched AS (SELECT 0 AS seq WHERE false),
    counted AS (SELECT '' AS id, 0 AS messages WHERE false)
"""
_DELETED_ENTRIES = """
    deleted_entries AS (
        DELETE FROM {journal}
        WHERE run = ANY (ARRAY(SELECT id FROM writable WHERE status IS NOT NULL))
    )
"""
_DELETED_RUNS = """
    deleted_messages AS (
        DELETE FROM {inbox}
        WHERE run = ANY (ARRAY(SELECT id FROM writable WHERE is_deleted))
    ), deleted_runs AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM writable WHERE is_deleted))
    )
"""
_RESTED = """
    rested AS (
        UPDATE {runs} AS run SET
            snapshot = {json_of_data}, exact = {exact_of_data},
            status = input.status, awaits = input.awaits,
            wake_at = CASE WHEN run.messages > input.consumed AND (
                SELECT count(*) <> run.messages OR bool_or(
                    input.awaits ? message.name
                    AND message.seq <> ALL (ARRAY(SELECT seq FROM matched))
                )
                FROM {inbox} AS message
                WHERE message.run = run.id AND message.first_epoch = run.first_epoch
                    AND NOT message.consumed
            ) THEN statement_timestamp() ELSE input.wake_at END,
            folded_epoch = input.epoch, folded_n = input.n, updated_at = statement_timestamp(),
            owner = NULL, takeovers = 0, clean = true, messages = run.messages - input.consumed
        FROM (
            SELECT id, epoch, n, data, status, wake_at, awaits::jsonb AS awaits,
                coalesce(counted.messages, 0) AS consumed
            FROM writable LEFT JOIN counted USING (id)
            WHERE status IS NOT NULL AND NOT is_deleted
        ) AS input
        WHERE run.id = input.id
        RETURNING {notify_if_due}
    )
"""

# EXISTS is avoided because the planner may read the whole journal for it.
_VERDICTS = """
    SELECT array_agg(i) FILTER (WHERE fits) AS accepted,
        array_agg(i) FILTER (WHERE NOT fits) AS fenced
    FROM (
        SELECT i, newest AND (is_open OR folded OR (
            SELECT true FROM {journal} AS entry
            WHERE entry.run = locked.id AND entry.epoch = locked.epoch AND entry.n = locked.n
        ) IS NOT NULL) AS fits
        FROM locked
    ) AS verdict
"""


class Needs(NamedTuple):
    """What a batch writes: journal entries, rests, deletions, consumed messages."""

    journal: bool
    rests: bool
    deletes: bool
    consumes: bool


_JOURNAL_ONLY = Needs(journal=True, rests=False, deletes=False, consumes=False)


class Fetch(Protocol):
    """Runs one statement, in a transaction of its own or in one that is open."""

    async def __call__(self, statement: str, /, *values: object) -> Sequence[Any]: ...


class Writer:
    """Writes entries, those of one call in one statement."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def write(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Return a verdict on each entry, in order."""
        if len(entries) == 1 and await self._write_one(entries[0]):
            return [Verdict.ACCEPTED]
        batch = Batch(entries, self._prefix)
        if len(entries) > 1 and batch.needs == _JOURNAL_ONLY and await self._append(batch):
            return [Verdict.ACCEPTED] * len(entries)
        return await self._write_batch(batch)

    async def _write_one(self, entry: Entry) -> bool:
        """Write one entry in the fastest way; return `False` if it takes another to judge it."""
        if (choice := _statement_for_one(entry)) is None:
            return False
        template, values = choice
        statement = self._statements.sql(template)
        try:
            rows = await self._fetch(statement, self._prefix + entry.id, entry.epoch, *values)
        except DuplicateRow:
            # The fence accepted the entry when it was first written.
            return True
        return bool(rows)

    async def _append(self, batch: "Batch") -> bool:
        """Write journal entries; return `False` if some were refused or existed already."""
        try:
            [(count,)] = await self._fetch(self._statements.sql(APPEND), *batch.columns())
        except DuplicateRow:
            return False
        return bool(count == len(batch.entries))

    async def _write_batch(self, batch: "Batch") -> list[Verdict]:
        try:
            # `_append` may just have written some of the journal entries.
            row = await self._send(batch, repeated=batch.needs == _JOURNAL_ONLY)
        except DuplicateRow:
            row = await self._send(batch, repeated=True)
        verdicts = batch.verdicts(row)
        judged = zip(batch.entries, verdicts, strict=True)
        left = [entry for entry, verdict in judged if verdict is None]
        later = iter(await self.write(left) if left else ())
        return [next(later) if verdict is None else verdict for verdict in verdicts]

    async def _send(self, batch: "Batch", *, repeated: bool) -> Any:
        extra = "ON CONFLICT DO NOTHING" if repeated else ""
        statement = self._statements.sql(_write_statement(batch.needs), extra)
        columns = batch.columns() + batch.rest_columns()
        if batch.needs.consumes:
            columns += batch.consume_columns()
        [row] = await self._fetch(statement, *columns)
        return row


class Batch:
    """The entries of one call as columns, ordered by id so that every batch locks in that order.

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
        self._sent = sorted(indexes, key=ids.__getitem__)

    def columns(self) -> list[list[Any]]:
        """Return the columns that every entry has."""
        entries = [self.entries[index] for index in self._sent]
        return [
            [self._prefix + entry.id for entry in entries],
            [entry.epoch for entry in entries],
            [entry.n for entry in entries],
            [entry.data for entry in entries],
        ]

    def rest_columns(self) -> list[list[Any]]:
        """Return the columns of rests."""
        rests = [_columns_of(self.entries[index].rest) for index in self._sent]
        return [list(column) for column in zip(*rests, strict=True)]

    def consume_columns(self) -> list[list[Any]]:
        """Return which entry consumes which messages."""
        consumes = list(self._consumes())
        return [[position for position, _ in consumes], [seq for _, seq in consumes]]

    def verdicts(self, row: Any) -> list[Verdict | None]:
        """Return a verdict on each entry; `None` if it takes another statement to judge it."""
        accepted, fenced = row
        verdicts: list[Verdict | None] = [Verdict.UNKNOWN] * len(self.entries)
        for verdict, positions in ((Verdict.ACCEPTED, accepted), (Verdict.FENCED, fenced)):
            for position in positions or ():
                verdicts[self._sent[position - 1]] = verdict
        for index, deciding in enumerate(self._deciding or ()):
            if deciding != index:
                is_contained = deciding > index and verdicts[deciding] is Verdict.ACCEPTED
                verdicts[index] = Verdict.ACCEPTED if is_contained else None
        return verdicts

    def _consumes(self) -> Iterator[tuple[int, int]]:
        positions = {index: position for position, index in enumerate(self._sent, 1)}
        for index, entry in enumerate(self.entries):
            deciding = index if self._deciding is None else self._deciding[index]
            if deciding >= index:
                yield from ((positions[deciding], seq) for seq in _sequence_numbers(entry))


def _deciding_entries(entries: Sequence[Entry]) -> list[int] | None:
    """Return for each entry the index of the one that decides it: its run's first rest, or itself.

    `None` means that there is no rest, so that each entry decides for itself.
    """
    rests: dict[tuple[str, int], int] = {}
    for index, entry in enumerate(entries):
        if entry.rest is not None:
            rests.setdefault((entry.id, entry.epoch), index)
    if not rests:
        return None
    return [rests.get((entry.id, entry.epoch), index) for index, entry in enumerate(entries)]


def _needs_of(entries: Sequence[Entry]) -> Needs:
    rests = [entry.rest for entry in entries]
    deletes = [rest.delete for rest in rests if rest is not None]
    consumes = any(entry.consumes for entry in entries)
    return Needs(len(deletes) < len(rests), not all(deletes), any(deletes), consumes)


@cache
def _write_statement(needs: Needs) -> str:
    parts = {
        _LOCKED: True,
        _WRITTEN: needs.journal,
        _CONSUMED: needs.consumes,
        _NOTHING_CONSUMED: not needs.consumes,
        _DELETED_ENTRIES: needs.rests or needs.deletes,
        _RESTED: needs.rests,
        _DELETED_RUNS: needs.deletes,
    }
    return ",".join(part for part, is_needed in parts.items() if is_needed) + _VERDICTS


def _statement_for_one(entry: Entry) -> tuple[str, Sequence[object]] | None:
    """Return the statement that writes only this entry and its values, if there is one."""
    if entry.consumes:
        seqs = _sequence_numbers(entry)
        if entry.rest is not None or len(seqs) != 1:
            return None
        return CONSUME_ONE, (entry.n, entry.data, seqs[0])
    if entry.rest is None:
        return APPEND_ONE, (entry.n, entry.data)
    if entry.rest.delete:
        return DELETE_ONE, ()
    status, wake_at, awaits, _ = _columns_of(entry.rest)
    return REST_ONE, (entry.n, entry.data, status, wake_at, awaits)


def _sequence_numbers(entry: Entry) -> list[int]:
    """Return which messages an entry consumes; an id of another form is not in the inbox."""
    return [int(id) for id in entry.consumes if id.isdecimal()]


def _columns_of(rest: Rest | None) -> tuple[object, ...]:
    if rest is None:
        return None, None, None, False
    return rest.status, rest.wake_at, names_as_json(rest.awaits), rest.delete


def names_as_json(names: Sequence[str]) -> str:
    """Return names of events as a JSON array."""
    return codec.dumps(list(names)).decode()
