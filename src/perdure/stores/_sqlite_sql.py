"""The statements of the SQLite schema, for every way of reaching one: a file, or a server.

Moments are microseconds since 1970. `:now` is the moment of a store that brings its own clock;
where it is NULL, the database's clock counts. JSON goes in and comes out as bytes and lies there as
text, which costs no decoding here and stays readable for any other program.
"""

import re
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, NamedTuple, TypeAlias

from perdure.errors import InvalidArgument

Value: TypeAlias = str | bytes | int | None

APPEND_CHUNK = 32

NOW = """
    coalesce(:now, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
"""
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

DELETE_OWNED = "DELETE FROM $runs WHERE id = :id AND epoch = :epoch"

LIST = """
    SELECT id, listed_at, status, workflow FROM $runs
    WHERE (listed_at, id) < (:mark, :mark_id)
        AND substr(id, 1, length(:prefix)) = :prefix
        AND (:status IS NULL OR status = :status)
        AND (:workflow IS NULL OR workflow = :workflow)
    ORDER BY listed_at DESC, id DESC
    LIMIT :limit
"""

APPEND = """
    INSERT INTO $journal (run, epoch, n, data)
    SELECT ?1, ?2, ?3, CAST(?4 AS TEXT) FROM $runs WHERE id = ?1 AND epoch = ?2 AND folded < ?3
    ON CONFLICT DO NOTHING
"""

# CROSS JOIN, for SQLite then reads the entries in the outer loop and finds each run by its key.
APPEND_MANY = """
    INSERT INTO $journal (run, epoch, n, data)
    SELECT e.column1, e.column2, e.column3, CAST(e.column4 AS TEXT)
    FROM (VALUES $rows) AS e CROSS JOIN $runs AS r
    WHERE r.id = e.column1 AND r.epoch = e.column2 AND r.folded < e.column3
    ON CONFLICT DO NOTHING
"""

REST = """
    UPDATE $runs SET
        snapshot = CAST(:data AS TEXT), updated_at = $stamp, status = :status, awaits = :awaits,
        wake_at = CASE WHEN $expected THEN t.now ELSE :wake_at END,
        owner = NULL, takeovers = 0, folded = :n
    FROM (SELECT $now AS now) AS t
    WHERE id = :id AND epoch = :epoch AND folded < :n
"""

FOLD = """
    DELETE FROM $journal
    WHERE run = :id AND (epoch < :epoch OR n <= :n)
        AND EXISTS (SELECT 1 FROM $runs WHERE id = :id AND epoch = :epoch AND folded >= :n)
"""

# The plus keeps SQLite from the index of known ids, which also holds all that were ever taken.
TAKE_KNOWN = """
    UPDATE $inbox SET taken = 1, payload = ''
    WHERE run = :id AND taken = 0 AND +dedup_id IS NOT NULL
        AND CAST(seq AS TEXT) IN (SELECT value FROM json_each(:takes))
        AND EXISTS (SELECT 1 FROM $runs WHERE id = :id AND epoch = :epoch)
"""

TAKE_UNKNOWN = """
    DELETE FROM $inbox
    WHERE run = :id AND taken = 0 AND +dedup_id IS NULL
        AND CAST(seq AS TEXT) IN (SELECT value FROM json_each(:takes))
        AND EXISTS (SELECT 1 FROM $runs WHERE id = :id AND epoch = :epoch)
"""

EPOCHS = "SELECT id, epoch FROM $runs WHERE id IN (SELECT value FROM json_each(:ids))"

CREATE = """
    INSERT INTO $runs (id, snapshot, updated_at, workflow, wake_at, owner, epoch)
    SELECT :id, CAST(:snapshot AS TEXT), $stamp, :workflow,
        coalesce(:wake_at, t.now + :ttl), :owner, max(t.now, (SELECT epoch FROM $floor) + 1)
    FROM (SELECT $now AS now) AS t
    WHERE true
    ON CONFLICT (id) DO NOTHING
    RETURNING epoch, wake_at
"""

ACQUIRE = """
    UPDATE $runs SET $leased
    FROM (SELECT $now AS now) AS t
    WHERE id = :id AND (owner IS NULL OR owner = :owner OR wake_at <= t.now)
    RETURNING epoch, wake_at, takeovers, CAST(snapshot AS BLOB)
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
    FROM (SELECT $now AS now) AS t
    WHERE id IN ($claimable) AND wake_at <= t.now
    RETURNING id, epoch, wake_at, takeovers, CAST(snapshot AS BLOB)
"""

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
    owner = :owner, status = 'running', awaits = NULL, folded = -1,
    takeovers = takeovers + (owner IS NOT NULL AND wake_at <= t.now),
    epoch = max(epoch + 1, t.now),
    wake_at = t.now + :ttl
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
            "stamp": _STAMP,
            "leased": _LEASED,
            "rows": ", ".join(["(?, ?, ?, ?)"] * APPEND_CHUNK),
        }
        names["expected"] = Template(_EXPECTED).substitute(names)
        names["claimable"] = Template(CLAIMABLE).substitute(names)
        self._names = names
        self._filled: dict[str, str] = {}

    def __getitem__(self, statement: str) -> str:
        filled = self._filled.get(statement)
        if filled is None:
            filled = self._filled[statement] = Template(statement).substitute(self._names)
        return filled


def check_table(table: object, parameter: str = "table") -> str:
    """Give the table's name back, or raise: ASCII letters, digits and `_`, not a digit first."""
    if isinstance(table, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", table):
        return table
    raise InvalidArgument(parameter, table, "a name of ASCII letters, digits and _, no digit first")
