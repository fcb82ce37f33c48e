"""The statements of the SQLite schema, for every way of reaching one: a file, or a server.

Moments are microseconds since 1970. `:now` is the moment of a store that brings its own clock;
where it is NULL, the database's clock counts. JSON comes out as bytes and lies there as text, which
stays readable for any other program.

A statement with `$rows` is said once of many: Python's lock changes hands between any two, and each
has its own price in SQLite. Its values go by place, and nulls fill it up to one of a few sizes.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from string import Template
from typing import Any, NamedTuple, TypeAlias

from perdure.errors import InvalidArgument

Value: TypeAlias = str | bytes | int | None
Row: TypeAlias = tuple[Value, ...]

_MOST_ROWS = 256

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
    INSERT INTO $runs (id, snapshot, updated_at, workflow, status, awaits, wake_at, epoch)
    SELECT :id, CAST(:snapshot AS TEXT), $stamp, :workflow, :status, :awaits,
        CASE WHEN $expected THEN t.now ELSE :wake_at END,
        max(t.now, (SELECT epoch FROM $floor) + 1)
    FROM (SELECT $now AS now) AS t
    WHERE true
    ON CONFLICT (id) DO UPDATE SET
        snapshot = excluded.snapshot, updated_at = excluded.updated_at,
        workflow = excluded.workflow, status = excluded.status, awaits = excluded.awaits,
        wake_at = excluded.wake_at, epoch = max(epoch + 1, excluded.epoch),
        owner = NULL, takeovers = 0, folded = -1
"""

FORGET_JOURNAL = "DELETE FROM $journal WHERE run = :id"

DELETE = "DELETE FROM $runs WHERE id = :id"

DELETE_OWNED = """
    DELETE FROM $runs WHERE id IN (
        SELECT r.id FROM ($rows) AS e CROSS JOIN $runs AS r
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    )
"""

# The trigger would do it too, but slower: SQLite lays a copy aside of every page it writes to.
FORGET_OWNED = """
    DELETE FROM $journal WHERE run IN (
        SELECT r.id FROM ($rows) AS e CROSS JOIN $runs AS r
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    )
"""

LIST = """
    SELECT id, listed_at, status, workflow FROM $runs
    WHERE (listed_at, id) < (:mark, :mark_id)
        AND substr(id, 1, length(:prefix)) = :prefix
        AND (:status IS NULL OR status = :status)
        AND (:workflow IS NULL OR workflow = :workflow)
    ORDER BY listed_at DESC, id DESC
    LIMIT :limit
"""

# An epoch is open while its run has an owner: a rest and a release end both.
# CROSS JOIN, for SQLite then reads the entries in the outer loop and finds each run by its key.
APPEND = """
    INSERT INTO $journal (run, epoch, n, data)
    SELECT e.column1, e.column2, e.column3, e.column4
    FROM ($rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
    ON CONFLICT DO NOTHING
"""

REST = """
    UPDATE $runs SET
        snapshot = e.column4, status = e.column5, awaits = e.column6,
        wake_at = CASE
            WHEN e.column6 IS NOT NULL AND EXISTS (
                SELECT 1 FROM $inbox
                WHERE run = e.column1 AND taken = 0
                    AND name IN (SELECT value FROM json_each(e.column6))
            ) THEN coalesce(e.column8, $clock) ELSE e.column7
        END,
        updated_at = coalesce(e.column9, $clock_stamp),
        owner = NULL, takeovers = 0, folded = e.column3
    FROM ($rows) AS e
    WHERE id = e.column1 AND epoch = e.column2 AND owner IS NOT NULL
"""

FOLD = """
    DELETE FROM $journal WHERE rowid IN (
        SELECT j.rowid FROM ($rows) AS e CROSS JOIN $runs AS r CROSS JOIN $journal AS j
        WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.folded >= e.column3
            AND j.run = e.column1 AND (j.epoch < e.column2 OR j.n <= e.column3)
    )
"""

TAKE_KNOWN = """
    UPDATE $inbox SET taken = 1, payload = '' WHERE dedup_id IS NOT NULL AND seq IN ($taken)
"""

TAKE_UNKNOWN = "DELETE FROM $inbox WHERE dedup_id IS NULL AND seq IN ($taken)"

# Whether an entry of the newest epoch is in the journal or the snapshot.
WRITTEN = """
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

CREATE = """
    INSERT INTO $runs (id, snapshot, workflow, wake_at, owner, epoch, updated_at)
    SELECT e.column1, e.column2, e.column3,
        coalesce(e.column4, coalesce(e.column7, $clock) + e.column6), e.column5,
        max(coalesce(e.column7, $clock), (SELECT epoch FROM $floor) + 1),
        coalesce(e.column8, $clock_stamp)
    FROM ($rows) AS e
    WHERE e.column1 IS NOT NULL
    ON CONFLICT (id) DO NOTHING
    RETURNING id, epoch, wake_at
"""

ACQUIRE = """
    UPDATE $runs SET $leased
    FROM (
        SELECT column1 AS key, column2 AS taker, column3 AS ttl, coalesce(column4, $clock) AS now
        FROM ($rows)
    ) AS w
    WHERE id = w.key AND (owner IS NULL OR owner = w.taker OR wake_at <= w.now)
    RETURNING id, epoch, wake_at, takeovers, CAST(snapshot AS BLOB), listed_at
"""

CLAIMABLE = """
    SELECT id FROM $runs
    WHERE wake_at <= $now
        AND substr(id, 1, length(:prefix)) = :prefix
        AND (:workflows IS NULL OR workflow IN (SELECT value FROM json_each(:workflows)))
    ORDER BY wake_at, id
    LIMIT :limit
"""

CLAIM = """
    UPDATE $runs SET $leased
    FROM (SELECT $now AS now, :owner AS taker, :ttl AS ttl) AS w
    WHERE id IN ($claimable) AND wake_at <= w.now
    RETURNING id, epoch, wake_at, takeovers, CAST(snapshot AS BLOB), listed_at
"""

HELD = "SELECT id, owner, listed_at FROM $runs WHERE id IN (SELECT value FROM json_each(:ids))"

JOURNALS = """
    SELECT run, CAST(data AS BLOB) FROM $journal
    WHERE run IN (SELECT value FROM json_each(:ids))
    ORDER BY run, epoch, n
"""

INBOXES = """
    SELECT run, seq, name, CAST(payload AS BLOB), sent_at FROM $inbox
    WHERE run IN (SELECT value FROM json_each(:ids)) AND taken = 0
    ORDER BY seq
"""

RENEW = """
    UPDATE $runs SET wake_at = t.now + :ttl
    FROM (SELECT $now AS now) AS t
    WHERE id IN (SELECT json_extract(value, '$$[0]') FROM json_each(:leases))
        AND (id, owner, epoch) IN (
            SELECT json_extract(value, '$$[0]'), json_extract(value, '$$[1]'),
                json_extract(value, '$$[2]')
            FROM json_each(:leases)
        )
    RETURNING id, epoch, wake_at,
        EXISTS (SELECT 1 FROM $inbox WHERE run = $runs.id AND taken = 0)
"""

RELEASE = """
    UPDATE $runs SET owner = NULL, wake_at = coalesce(:wake_at, t.now)
    FROM (SELECT $now AS now) AS t
    WHERE id IN (SELECT json_extract(value, '$$[0]') FROM json_each(:leases))
        AND (id, owner, epoch) IN (
            SELECT json_extract(value, '$$[0]'), json_extract(value, '$$[1]'),
                json_extract(value, '$$[2]')
            FROM json_each(:leases)
        )
"""

DUE = """
    SELECT id, wake_at FROM $runs
    WHERE wake_at <= :until
        AND (owner IS NULL OR wake_at <= $now)
        AND substr(id, 1, length(:prefix)) = :prefix
        AND (:workflows IS NULL OR workflow IN (SELECT value FROM json_each(:workflows)))
    ORDER BY wake_at, id
    LIMIT :limit
"""

SEND = """
    INSERT INTO $inbox (run, name, payload, sent_at, dedup_id)
    SELECT :id, :name, CAST(:payload AS TEXT), $now, :dedup_id FROM $runs
    WHERE id = :id AND status NOT IN ('completed', 'failed', 'cancelled')
    ON CONFLICT DO NOTHING
"""

# Asks the inbox and not the statement before: so it may be sent again without harm.
WAKE = """
    UPDATE $runs SET wake_at = t.now
    FROM (SELECT $now AS now) AS t
    WHERE id = :id AND owner IS NULL AND (wake_at IS NULL OR wake_at > t.now)
        AND :name IN (SELECT value FROM json_each(awaits))
        AND EXISTS (SELECT 1 FROM $inbox WHERE run = :id AND taken = 0 AND name = :name)
"""

WHY_NOT_SENT = """
    SELECT EXISTS (SELECT 1 FROM $inbox WHERE run = :id AND dedup_id = :dedup_id)
    FROM $runs WHERE id = :id
"""

INBOX = """
    SELECT seq, name, CAST(payload AS BLOB), sent_at FROM $inbox
    WHERE run = :id AND taken = 0
    ORDER BY seq
"""

PRUNE = """
    DELETE FROM $runs WHERE id IN (
        SELECT id FROM $runs
        WHERE listed_at < (SELECT $stamp FROM (SELECT $now - :older_than AS now) AS t)
            AND status IN ('completed', 'failed', 'cancelled')
            AND (:status IS NULL OR status = :status)
            AND substr(id, 1, length(:prefix)) = :prefix
        ORDER BY listed_at
        LIMIT :limit
    )
"""

COUNT = """
    SELECT status, count(*) FROM $runs
    WHERE substr(id, 1, length(:prefix)) = :prefix
    GROUP BY status
"""

OLDEST_DUE = """
    SELECT wake_at FROM $runs
    WHERE wake_at <= $now AND substr(id, 1, length(:prefix)) = :prefix
    ORDER BY wake_at
    LIMIT 1
"""

_EXPECTED = """
    EXISTS (
        SELECT 1 FROM $inbox
        WHERE run = :id AND taken = 0 AND name IN (SELECT value FROM json_each(:awaits))
    )
"""
_LEASED = """
    owner = w.taker, status = 'running', awaits = NULL, folded = -1,
    takeovers = CASE
        WHEN EXISTS (SELECT 1 FROM $journal AS j WHERE j.run = $runs.id AND j.epoch = $runs.epoch)
        THEN 0 ELSE takeovers + (owner IS NOT NULL AND wake_at <= w.now)
    END,
    epoch = max(epoch + 1, w.now),
    wake_at = w.now + w.ttl
"""
_TAKEN = """
    SELECT i.seq FROM ($rows) AS e CROSS JOIN $runs AS r CROSS JOIN $inbox AS i
    WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.owner IS NOT NULL
        AND i.run = e.column1 AND i.taken = 0 AND CAST(i.seq AS TEXT) = e.column3
"""


class Statement(NamedTuple):
    """One statement with its values."""

    sql: str
    values: Mapping[str, Any] | Sequence[Any]


class Outcome(NamedTuple):
    """What one statement gave: rows, and how many it changed."""

    rows: Sequence[tuple[Any, ...]]
    changed: int


class Tables:
    """The statements for the tables of one name: `tables[LOAD]`."""

    def __init__(self, table: str) -> None:
        self.name = check_table(table)
        names = {
            "runs": f'"{table}"',
            "journal": f'"{table}_journal"',
            "inbox": f'"{table}_inbox"',
            "floor": f'"{table}_floor"',
            "now": NOW,
            "clock": _CLOCK,
            "clock_stamp": "strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')",
            "stamp": _STAMP,
        }
        names["leased"] = Template(_LEASED).substitute(names)
        names["expected"] = Template(_EXPECTED).substitute(names)
        names["claimable"] = Template(CLAIMABLE).substitute(names)
        self._names = names
        self._filled: dict[tuple[str, int], str] = {}

    def __getitem__(self, statement: str) -> str:
        return self._filled.get((statement, 0)) or self._fill(statement, 0, 0)

    def over(self, statement: str, rows: Sequence[Row]) -> list[Statement]:
        """Give the statement for these rows: one for many."""
        if len(rows) > _MOST_ROWS:
            starts = range(0, len(rows), _MOST_ROWS)
            parts = [self.over(statement, rows[at : at + _MOST_ROWS]) for at in starts]
            return [*chain.from_iterable(parts)]
        if not rows:
            return []
        # Of few sizes, for SQLite to know the statement already; no run has the id NULL.
        size, width = 1 << (len(rows) - 1).bit_length(), len(rows[0])
        values = [*chain.from_iterable(rows), *repeat(None, (size - len(rows)) * width)]
        filled = self._filled.get((statement, size)) or self._fill(statement, size, width)
        return [Statement(filled, values)]

    def _fill(self, statement: str, size: int, width: int) -> str:
        row = f"({', '.join('?' * width)})"
        names = {**self._names, "rows": f"VALUES {', '.join([row] * size)}"}
        names["taken"] = Template(_TAKEN).substitute(names)
        filled = self._filled[statement, size] = Template(statement).substitute(names)
        return filled


def check_table(table: object, parameter: str = "table") -> str:
    """Give the table's name back, or raise: ASCII letters, digits and `_`, not a digit first."""
    if isinstance(table, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", table):
        return table
    raise InvalidArgument(parameter, table, "a name of ASCII letters, digits and _, no digit first")
