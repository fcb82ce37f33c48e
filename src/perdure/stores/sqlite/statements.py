"""Statements of the SQLite schema, for a file and for a libSQL server.

Times are microseconds since 1970. `:now` is the time of a store with its own clock; where it is
NULL, the database's clock is used. JSON is stored as text, which other programs can read, and
selected as bytes.

A statement with `$rows` handles many rows at once: each statement has a fixed cost in SQLite, and
Python may switch threads between any two. Its values are positional, and rows of NULL pad it to one
of a few sizes. A statement with `$arms` merges ranges of an index: SQLite reads each of them only
as far as the result needs.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from string import Template
from typing import Any, NamedTuple, TypeAlias

from perdure.errors import InvalidArgument
from perdure.stores._migrations import check_table
from perdure.stores.sqlite.search_statements import FRAGMENTS

Value: TypeAlias = str | bytes | int | None
Row: TypeAlias = tuple[Value, ...]

_MAX_ROWS = 256
_MAX_TABLE_LENGTH = 100

_CLOCK = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000"
NOW = f"coalesce(:now, {_CLOCK})"
_STAMP = """
    strftime('%Y-%m-%dT%H:%M:%S', t.now / 1000000, 'unixepoch') || printf('.%06dZ', t.now % 1000000)
"""

LOAD = """
    SELECT -1, -1, CAST(snapshot AS BLOB), listed_at FROM $runs WHERE id = :id
    UNION ALL
    SELECT epoch, n, CAST(data AS BLOB), NULL FROM $journal WHERE run = :id
    ORDER BY 1, 2
"""

SAVE = """
    INSERT INTO $runs (
        id, snapshot, updated_at, workflow, status, awaits, wake_at, epoch, version, tags, summary,
        created_at
    )
    SELECT :id, CAST(:snapshot AS TEXT), $stamp, :workflow, :status, :awaits,
        CASE WHEN $has_message THEN t.now ELSE :wake_at END,
        max(t.now, (SELECT epoch FROM $floor) + 1),
        coalesce(:version, 0), coalesce(:tags, '[]'), coalesce(:summary, x''), t.now
    FROM (SELECT $now AS now) AS t
    WHERE true
    ON CONFLICT (id) DO UPDATE SET
        snapshot = excluded.snapshot, updated_at = excluded.updated_at,
        workflow = excluded.workflow, status = excluded.status, awaits = excluded.awaits,
        wake_at = excluded.wake_at, epoch = max(epoch + 1, excluded.epoch),
        owner = NULL, takeovers = 0, folded = -1, queue = '',
        version = coalesce(:version, version), tags = coalesce(:tags, tags),
        summary = coalesce(:summary, summary),
        created_at = coalesce(created_at, CASE WHEN :tags <> '[]' THEN excluded.created_at END)
"""

DELETE_JOURNAL = "DELETE FROM $journal WHERE run = :id"

DELETE = "DELETE FROM $runs WHERE id = :id"

DELETE_OWNED = """
    DELETE FROM $runs WHERE id IN (
        SELECT r.id FROM ($rows) AS e CROSS JOIN $runs AS r
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    )
"""

# The trigger would do this too, but more slowly: SQLite copies every page before a trigger changes
# it.
DELETE_OWNED_JOURNAL = """
    DELETE FROM $journal WHERE run IN (
        SELECT r.id FROM ($rows) AS e CROSS JOIN $runs AS r
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    )
"""

# An epoch is open while its run has an owner: a rest and a release end both. CROSS JOIN fixes the
# order of the loops: for each entry, SQLite looks up its run by key.
APPEND = """
    INSERT INTO $journal (run, epoch, n, data)
    SELECT e.column1, e.column2, e.column3, e.column4
    FROM ($rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    ON CONFLICT DO NOTHING
"""

# A run without a time of creation, written by another program or an older perdure, gets one with
# its first tags, because searches by tag are ordered by creation.
REST = """
    UPDATE $runs SET
        snapshot = e.column4, status = e.column5, awaits = e.column6,
        wake_at = CASE
            WHEN e.column6 IS NOT NULL AND EXISTS (
                SELECT 1 FROM $inbox
                WHERE run = e.column1 AND taken = 0
                    AND name IN (SELECT value FROM json_each(e.column6))
            ) THEN coalesce(e.column11, $clock) ELSE e.column7
        END,
        version = coalesce(e.column8, version), tags = coalesce(e.column9, tags),
        summary = coalesce(e.column10, summary),
        created_at = coalesce(
            created_at, CASE WHEN e.column9 <> '[]' THEN coalesce(e.column11, $clock) END
        ),
        updated_at = coalesce(e.column12, $clock_stamp),
        owner = NULL, takeovers = 0, folded = e.column3
    FROM ($rows) AS e
    WHERE id = e.column1 AND epoch = e.column2 AND owner IS NOT NULL
"""

DELETE_FOLDED = """
    DELETE FROM $journal WHERE rowid IN (
        SELECT j.rowid FROM ($rows) AS e CROSS JOIN $runs AS r CROSS JOIN $journal AS j
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.folded >= e.column3
            AND j.run = e.column1 AND (j.epoch < e.column2 OR j.n <= e.column3)
    )
"""

# A message with a dedup_id is kept, without its payload, because it may be sent again. The plus
# keeps SQLite from reading the whole index of these messages if there were few at the last ANALYZE.
CONSUME_DEDUPLICATED = """
    UPDATE $inbox SET taken = 1, payload = '' WHERE +dedup_id IS NOT NULL AND seq IN ($consumed)
"""

CONSUME = "DELETE FROM $inbox WHERE dedup_id IS NULL AND seq IN ($consumed)"

# Whether each entry is of the newest epoch, and in the journal or in the snapshot.
WRITTEN_ENTRIES = """
    SELECT e.column1, e.column2, e.column3, r.epoch = e.column2 AND (
        r.folded >= e.column3 OR EXISTS (
            SELECT 1 FROM $journal AS j
            WHERE j.run = e.column1 AND j.epoch = e.column2 AND j.n = e.column3
        )
    )
    FROM ($rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1
"""

FENCE = "SELECT epoch = :epoch AND owner IS NOT NULL FROM $runs WHERE id = :id"

# A run with neither a wake time nor an offset from now is not due.
CREATE = """
    INSERT INTO $runs (
        id, snapshot, workflow, wake_at, owner, epoch, updated_at, created_at, status, awaits,
        queue, version, tags, summary
    )
    SELECT e.column1, e.column2, e.column3,
        coalesce(e.column4, coalesce(e.column7, $clock) + e.column6), e.column5,
        max(coalesce(e.column7, $clock), (SELECT epoch FROM $floor) + 1),
        coalesce(e.column8, $clock_stamp), coalesce(e.column7, $clock),
        e.column9, e.column10, e.column11, e.column12, e.column13, e.column14
    FROM ($rows) AS e
    WHERE e.column1 IS NOT NULL
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch, wake_at
"""

ACQUIRE = """
    UPDATE $runs SET $lease
    FROM (
        SELECT column1 AS key, column2 AS new_owner, column3 AS ttl,
            coalesce(column4, $clock) AS now, column5 AS instead_of
        FROM ($rows)
    ) AS w
    WHERE id = w.key AND (
        owner IS NULL OR owner = w.new_owner OR wake_at <= w.now OR owner = w.instead_of
    )
    RETURNING $leased
"""

# :latest is the latest wake time of these runs when they were read: a run that was claimed since,
# or got another wake time, is not leased.
CLAIM = """
    UPDATE $runs SET $lease
    FROM (SELECT $now AS now, :owner AS new_owner, :ttl AS ttl, NULL AS instead_of) AS w
    WHERE id IN (SELECT value FROM json_each(:ids)) AND wake_at <= :latest
    RETURNING $leased
"""

OWNERS = "SELECT id, owner, listed_at FROM $runs WHERE id IN (SELECT value FROM json_each(:ids))"

LEASE_EXPIRIES = """
    SELECT id, owner, wake_at FROM $runs WHERE id IN (SELECT value FROM json_each(:ids))
"""

JOURNALS = """
    SELECT run, CAST(data AS BLOB) FROM $journal
    WHERE run IN ($keys)
    ORDER BY run, epoch, n
"""

INBOXES = """
    SELECT i.run, i.seq, i.name, CAST(i.payload AS BLOB), i.sent_at
    FROM ($keys) AS k CROSS JOIN $inbox AS i
    WHERE i.seq IN (
        SELECT seq FROM $inbox WHERE run = k.key AND taken = 0 ORDER BY seq LIMIT :page
    )
    ORDER BY i.seq
"""

RENEW = """
    UPDATE $runs SET wake_at = coalesce(e.column5, $clock) + e.column4
    FROM ($rows) AS e
    WHERE id = e.column1 AND owner = e.column2 AND epoch = e.column3
    RETURNING id, epoch, wake_at,
        EXISTS (SELECT 1 FROM $inbox WHERE run = $runs.id AND taken = 0)
"""

RELEASE = """
    UPDATE $runs SET owner = NULL, wake_at = coalesce(e.column4, e.column5, $clock)
    FROM ($rows) AS e
    WHERE id = e.column1 AND owner = e.column2 AND epoch = e.column3
"""

_FRAGMENTS = {
    "has_message": """
        EXISTS (
            SELECT 1 FROM $inbox
            WHERE run = :id AND taken = 0 AND name IN (SELECT value FROM json_each(:awaits))
        )
    """,
    "lease": """
        owner = w.new_owner, status = 'running', awaits = NULL, folded = -1,
        takeovers = CASE
            WHEN EXISTS (
                SELECT 1 FROM $journal AS j WHERE j.run = $runs.id AND j.epoch = $runs.epoch
            ) THEN 0
            ELSE takeovers + (owner IS NOT NULL AND (wake_at <= w.now OR owner IS w.instead_of))
        END,
        epoch = max(epoch + 1, w.now),
        wake_at = w.now + w.ttl
    """,
    "keys": "SELECT value AS key FROM json_each(:ids)",
    "leased": """
        id, epoch, wake_at, takeovers, queue, version, CAST(snapshot AS BLOB), listed_at
    """,
}

# SQLite takes VALUES of n rows for 2 to the power of n / 10 rows. After ANALYZE it would build a
# Bloom filter on the table that is joined, and read all of it, to save so many lookups. With a
# likelihood of 0 it expects at most one row, whatever the statistics are.
_ROWS = "SELECT * FROM (VALUES {}) WHERE likelihood(column1 IS NOT NULL, 0.0)"
_MARK_CONSUMED = """
    SELECT i.seq FROM ($rows) AS e CROSS JOIN $runs AS r CROSS JOIN $inbox AS i
    WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
        AND i.run = e.column1 AND i.taken = 0 AND CAST(i.seq AS TEXT) = e.column3
"""


class Statement(NamedTuple):
    """One statement with its values."""

    sql: str
    values: Mapping[str, Any] | Sequence[Any]

    def only_reads(self) -> bool:
        """Return whether the statement changes nothing."""
        return self.sql.lstrip().startswith(("SELECT", "WITH"))


class Outcome(NamedTuple):
    """The rows that one statement returned, and how many rows it changed."""

    rows: Sequence[tuple[Any, ...]]
    changed: int


class Statements:
    """The statements above, with the names of one store's tables."""

    def __init__(self, table: str) -> None:
        self.table = check_name(table)
        names = {
            "runs": f'"{table}"',
            "journal": f'"{table}_journal"',
            "inbox": f'"{table}_inbox"',
            "floor": f'"{table}_floor"',
            "tags": f'"{table}_tags"',
            "unconsumed": f'"{table}_unconsumed"',
            "now": NOW,
            "clock": _CLOCK,
            "clock_stamp": "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')",
            "stamp": _STAMP,
        }
        for name, fragment in (*_FRAGMENTS.items(), *FRAGMENTS.items()):
            names[name] = Template(fragment).substitute(names)
        self._names = names
        self._cache: dict[tuple[str, str, int], str] = {}

    def sql(self, template: str, arm: str = "", count: int = 0) -> str:
        """Return a statement with its names filled in.

        `$arms` are that many copies of `arm`, combined by UNION ALL; `$n` in each is its number.
        """
        statement = self._cache.get((template, arm, count))
        if statement is None:
            copies = (Template(arm).substitute(self._names, n=n) for n in range(count))
            names = {**self._names, "arms": " UNION ALL ".join(copies)}
            statement = self._cache[template, arm, count] = Template(template).substitute(names)
        return statement

    def many(self, template: str, rows: Sequence[Row]) -> list[Statement]:
        """Return the statements that handle these rows, up to 256 rows each."""
        if len(rows) > _MAX_ROWS:
            starts = range(0, len(rows), _MAX_ROWS)
            parts = [self.many(template, rows[at : at + _MAX_ROWS]) for at in starts]
            return [*chain.from_iterable(parts)]
        if not rows:
            return []
        # Only a few sizes, so that SQLite's cache has the statement; a row of NULL matches no run.
        size, width = 1 << (len(rows) - 1).bit_length(), len(rows[0])
        values = [*chain.from_iterable(rows), *repeat(None, (size - len(rows)) * width)]
        statement = self._cache.get((template, "", size)) or self._fill(template, size, width)
        return [Statement(statement, values)]

    def _fill(self, template: str, size: int, width: int) -> str:
        row = f"({', '.join('?' * width)})"
        names = {**self._names, "rows": _ROWS.format(", ".join([row] * size))}
        names["consumed"] = Template(_MARK_CONSUMED).substitute(names)
        statement = self._cache[template, "", size] = Template(template).substitute(names)
        return statement


def check_name(table: str) -> str:
    """Return a valid table name, without a schema."""
    if "." in check_table(table, _MAX_TABLE_LENGTH):
        raise InvalidArgument("table", table, "a table name without a schema")
    return table
