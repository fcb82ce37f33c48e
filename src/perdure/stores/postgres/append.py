"""Write journal entries and rests: the statement for each batch, and its verdicts."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from perdure.store import Entry, Verdict
from perdure.stores.postgres.batch import JOURNAL_ONLY, Batch, Needs, rest_columns, sequence_numbers
from perdure.stores.postgres.errors import DuplicateRow
from perdure.stores.postgres.statements import Statements

# The statements for most batches write every entry that passes the fence, and return how many did.
# If any did not pass, the statement of `_write_statement` finds out why. A run whose fence refuses
# the entry is not locked. If another owner commits while this statement waits for the row,
# PostgreSQL evaluates the condition again on the new row. An epoch is open while its run has an
# owner: a rest and a release end both. The plain INSERT fails on an existing entry, which happens
# only if it is sent again. ON CONFLICT would make every batch a quarter slower.
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
# fence. Removed messages are counted, because an id that is not in the inbox is ignored.
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

# The deletions depend on the rows that the fenced statement returns: on their own they would see
# the fence as it was before another owner took over. Entries that earlier rests have deleted stay
# in the index until a vacuum, so those are skipped: the statement sees the run as it was before. A
# rest that changes the run's tags, and the deletion of a run that has any, are left to the
# statement of `_write_statement`.
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
            owner = NULL, takeovers = 0, clean = true,
            version = coalesce($8, run.version), summary = coalesce($10, run.summary)
        FROM (
            SELECT $4::bytea AS data, $7::text::jsonb AS awaits, $9::text::jsonb AS tags
        ) AS input
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL
            AND (input.tags IS NULL OR input.tags = run.tags)
        RETURNING run.id, {notify_if_due}
    ), deleted_entries AS (
        DELETE FROM {journal} AS entry
        WHERE entry.run = (SELECT id FROM rested)
            AND (entry.epoch, entry.n) > (SELECT folded_epoch, folded_n FROM {runs} WHERE id = $1)
    )
    SELECT id FROM rested
"""

DELETE_ONE = """
    WITH deleted_runs AS (
        DELETE FROM {runs} AS run
        WHERE run.id = $1 AND run.epoch = $2 AND run.owner IS NOT NULL AND run.tags = '[]'
        RETURNING run.id
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = (SELECT id FROM deleted_runs)
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = (SELECT id FROM deleted_runs)
    )
    SELECT id FROM deleted_runs
"""

# The statement for any batch consists of the parts it needs, because each part costs planning time.
_LOCKED_RUNS = """
    WITH locked AS MATERIALIZED (
        SELECT entry.*, run.epoch = entry.epoch AS newest, run.is_open,
            CASE WHEN entry.is_deleted THEN -1 ELSE run.folded_epoch END AS after_epoch,
            run.folded_n AS after_n,
            (run.folded_epoch, run.folded_n) >= (entry.epoch, entry.n) AS folded,
            run.tags <> '[]' AS is_tagged, run.tags <> entry.tags::jsonb AS is_retagged
        FROM unnest(
            (SELECT $1::text[]), (SELECT $2::bigint[]), (SELECT $3::bigint[]), (SELECT $4::bytea[]),
            (SELECT $5::text[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]),
            (SELECT $8::bigint[]), (SELECT $9::text[]), (SELECT $10::bytea[]),
            (SELECT $11::boolean[])
        ) WITH ORDINALITY AS entry (
            id, epoch, n, data, status, wake_at, awaits, version, tags, summary, is_deleted, i
        )
        CROSS JOIN LATERAL (
            SELECT epoch, owner IS NOT NULL AS is_open, folded_epoch, folded_n, tags
            FROM {runs} AS run WHERE run.id = entry.id FOR NO KEY UPDATE
        ) AS run
    ), writable AS MATERIALIZED (
        SELECT * FROM locked WHERE newest AND is_open
    )
"""
_WRITTEN_ENTRIES = """
    written AS (
        INSERT INTO {journal} (run, epoch, n, data)
        SELECT id, epoch, n, data FROM writable WHERE status IS NULL
        {extra}
    )
"""
_CONSUMED_MESSAGES = """
    matched AS MATERIALIZED (
        SELECT writable.id, consumes.seq
        FROM unnest((SELECT $12::bigint[]), (SELECT $13::bigint[])) AS consumes (i, seq)
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
# As in the statement for one rest; but nothing may be left of a run that is deleted, because a new
# run with its id would continue from that.
_DELETED_ENTRIES = """
    deleted_entries AS (
        DELETE FROM {journal} WHERE ctid = ANY (ARRAY(
            SELECT entry.ctid FROM writable CROSS JOIN LATERAL (
                SELECT ctid FROM {journal} AS entry
                WHERE entry.run = writable.id
                    AND (entry.epoch, entry.n) > (writable.after_epoch, writable.after_n)
                OFFSET 0
            ) AS entry
            WHERE writable.status IS NOT NULL
        ))
    )
"""
_DELETED_RUNS = """
    deleted_tags AS (
        DELETE FROM {tags}
        WHERE run = ANY (ARRAY(SELECT id FROM writable WHERE is_deleted AND is_tagged))
    ), deleted_messages AS (
        DELETE FROM {inbox}
        WHERE run = ANY (ARRAY(SELECT id FROM writable WHERE is_deleted))
    ), deleted_runs AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM writable WHERE is_deleted))
    )
"""
_SETTLED_RUNS = """
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
            owner = NULL, takeovers = 0, clean = true, messages = run.messages - input.consumed,
            version = coalesce(input.version, run.version),
            tags = coalesce(input.tags, run.tags),
            summary = coalesce(input.summary, run.summary),
            created_at = CASE WHEN input.is_retagged
                THEN coalesce({created_at}, statement_timestamp()) ELSE run.created_at END
        FROM (
            SELECT id, epoch, n, data, status, wake_at, awaits::jsonb AS awaits, version,
                tags::jsonb AS tags, summary, is_retagged,
                coalesce(counted.messages, 0) AS consumed
            FROM writable LEFT JOIN counted USING (id)
            WHERE status IS NOT NULL AND NOT is_deleted
        ) AS input
        WHERE run.id = input.id
        RETURNING run.id, run.tags, run.created_at, input.is_retagged, {notify_if_due}
    )
"""

_RETAGGED_RUNS = """
    retagged AS MATERIALIZED (
        SELECT id, tags, created_at FROM rested WHERE is_retagged
    ), {replaced_tags}
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


class Fetch(Protocol):
    """Runs one statement, in its own transaction or in an open one."""

    async def __call__(self, statement: str, /, *values: object) -> Sequence[Any]: ...


class Writer:
    """Writes entries; those of one call are written in one statement."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def write(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Return a verdict on each entry, in order."""
        if len(entries) == 1 and await self._write_one(entries[0]):
            return [Verdict.ACCEPTED]
        batch = Batch(entries, self._prefix)
        if len(entries) > 1 and batch.needs == JOURNAL_ONLY and await self._append(batch):
            return [Verdict.ACCEPTED] * len(entries)
        return await self._write_batch(batch)

    async def _write_one(self, entry: Entry) -> bool:
        """Write one entry in the fastest way; return `False` if a general statement is needed."""
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

    async def _append(self, batch: Batch) -> bool:
        """Write journal entries; return `False` if some were refused or already existed."""
        try:
            [(count,)] = await self._fetch(self._statements.sql(APPEND), *batch.columns())
        except DuplicateRow:
            return False
        return bool(count == len(batch.entries))

    async def _write_batch(self, batch: Batch) -> list[Verdict]:
        try:
            # `_append` may just have written some of the journal entries.
            row = await self._send(batch, repeated=batch.needs == JOURNAL_ONLY)
        except DuplicateRow:
            row = await self._send(batch, repeated=True)
        verdicts = batch.verdicts(row)
        pairs = zip(batch.entries, verdicts, strict=True)
        remaining = [entry for entry, verdict in pairs if verdict is None]
        later_verdicts = iter(await self.write(remaining) if remaining else ())
        return [next(later_verdicts) if verdict is None else verdict for verdict in verdicts]

    async def _send(self, batch: Batch, *, repeated: bool) -> Any:
        extra = "ON CONFLICT DO NOTHING" if repeated else ""
        statement = self._statements.sql(_write_statement(batch.needs), extra)
        columns = batch.columns() + batch.rest_columns()
        if batch.needs.consumes:
            columns += batch.consume_columns()
        [row] = await self._fetch(statement, *columns)
        return row


@cache
def _write_statement(needs: Needs) -> str:
    parts = {
        _LOCKED_RUNS: True,
        _WRITTEN_ENTRIES: needs.journal,
        _CONSUMED_MESSAGES: needs.consumes,
        _NOTHING_CONSUMED: not needs.consumes,
        _DELETED_ENTRIES: needs.rests or needs.deletes,
        _SETTLED_RUNS: needs.rests,
        _RETAGGED_RUNS: needs.tags,
        _DELETED_RUNS: needs.deletes,
    }
    return ",".join(part for part, is_needed in parts.items() if is_needed) + _VERDICTS


def _statement_for_one(entry: Entry) -> tuple[str, Sequence[object]] | None:
    """Return the special statement for this entry and its values, if there is one."""
    if entry.consumes:
        seqs = sequence_numbers(entry)
        if entry.rest is not None or len(seqs) != 1:
            return None
        return CONSUME_ONE, (entry.n, entry.data, seqs[0])
    if entry.rest is None:
        return APPEND_ONE, (entry.n, entry.data)
    if entry.rest.delete:
        return DELETE_ONE, ()
    return REST_ONE, (entry.n, entry.data, *rest_columns(entry.rest))
