"""The statements of the MySQL store.

A transaction that writes runs first locks their rows, in the order of their ids. Python decides
what to write from the contents of the rows, and writes while they are still locked: at READ
COMMITTED, the statements after the lock see everything that was committed before it. `FORCE INDEX`
prevents a full scan of a small table, which would lock rows of other runs out of order and deadlock
with a statement that locks them in order.

Columns: `consumed` marks messages that are kept only for their `dedup` digest, `folded` is the
number of the last entry that the snapshot contains.
"""

from collections.abc import Sequence

from perdure.stores.mysql.literals import Rows, Statement, Value
from perdure.stores.mysql.schema import Dialect, Tables

NOW = Statement(b"UTC_TIMESTAMP(6)")

LOAD = """
    SELECT -1, -1, CAST(snapshot AS BINARY) FROM {runs} WHERE id = %s
    UNION ALL
    SELECT epoch, n, data FROM {journal} WHERE run = %s
"""

# Not LIKE: using an index, MariaDB's LIKE misses ids whose next character is above U+FFFF.
WITH_PREFIX = "LEFT(id, %s) = %s"

LOCK = """
    SELECT id, epoch, folded, owner IS NOT NULL, COALESCE(tags, '[]')
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_LEASED = """
    SELECT id, epoch, owner, wake_at, takeovers, NULL, queue, version, messages, status,
        UTC_TIMESTAMP(6)
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_REQUESTED = """
    SELECT id, epoch, owner, wake_at, takeovers, IF(
        owner IS NULL OR owner IN (%s) OR wake_at <= UTC_TIMESTAMP(6),
        CAST(snapshot AS BINARY), NULL
    ), queue, version, messages, status, UTC_TIMESTAMP(6)
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
# The reply to an INSERT contains the argument of LAST_INSERT_ID. This returns the epoch, and with
# it the time, without another statement.
CREATE_LEASED = """
    INSERT INTO {runs} (
        id, snapshot, workflow, owner, wake_at, version, tags, summary,
        created_at, updated_at, epoch
    ) VALUES %s
"""
CREATE_LEASED_ROW = b"""(
    %s, %s, %s, %s, UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND, %s, %s, %s,
    UTC_TIMESTAMP(6), UTC_TIMESTAMP(6),
    LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
)"""

# An existing run is locked by the update, which changes nothing. INSERT IGNORE would take only a
# shared lock, and two transactions that then write the row would deadlock.
INSERT_OR_LOCK = """
    INSERT INTO {runs} (id, snapshot, created_at, epoch) VALUES (%s, '', UTC_TIMESTAMP(6), -1)
    ON DUPLICATE KEY UPDATE epoch = epoch
"""
STORED_TAGS = "SELECT COALESCE(tags, '[]') FROM {runs} WHERE id = %s"
SAVE = """
    UPDATE {runs} SET
        snapshot = %s, workflow = %s, lane = %s, queue = '', status = %s,
        wake_at = IF(%s, UTC_TIMESTAMP(6), %s), awaits = %s, version = COALESCE(%s, version),
        tags = COALESCE(%s, tags), summary = COALESCE(%s, summary),
        updated_at = UTC_TIMESTAMP(6), owner = NULL, takeovers = 0, folded = -1,
        epoch = GREATEST(epoch + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
    WHERE id = %s
"""

# An epoch is open while its run has an owner: a rest and a release end both.
APPEND_ONE = """
    INSERT INTO {journal} (run, epoch, n, data)
    SELECT id, epoch, %s, %s FROM {runs}
    WHERE id = %s AND epoch = %s AND owner IS NOT NULL FOR UPDATE
"""
APPEND = """
    INSERT INTO {journal} (run, epoch, n, data)
    SELECT STRAIGHT_JOIN entry.id, IF(run.id IS NULL, 0, entry.epoch), entry.n, entry.data
    FROM (
        SELECT %s COLLATE {collation} AS id, %s AS epoch, %s AS n, %s AS data UNION ALL %s
    ) AS entry
    LEFT JOIN {runs} AS run
        ON run.id = entry.id AND run.epoch = entry.epoch AND run.owner IS NOT NULL
    FOR UPDATE
"""
APPEND_ROW = b"SELECT %s, %s, %s, %s"

INSERT_ENTRIES = """
    INSERT INTO {journal} (run, epoch, n, data) VALUES %s
    ON DUPLICATE KEY UPDATE n = n
"""
FIND_ENTRY = "SELECT run, epoch, n FROM {journal} WHERE run = %s AND epoch = %s AND n = %s"
# Matches nothing if the tags change, which takes more statements. The next two statements do
# nothing if this one matched no run. It always changes a column, so that the count is 1 if it
# matched, whatever flags the connection has.
REST_ONE = """
    UPDATE {runs} SET
        snapshot = %s, status = %s, wake_at = %s, awaits = %s, updated_at = UTC_TIMESTAMP(6),
        owner = NULL, takeovers = 0, folded = %s, version = COALESCE(%s, version),
        summary = COALESCE(%s, summary)
    WHERE id = %s AND epoch = %s AND owner IS NOT NULL AND (%s OR COALESCE(tags, '[]') = %s)
"""
# Keeps the entries of a later owner: if REST_ONE matched nothing, the row is not locked.
DELETE_FOLDED = """
    DELETE FROM {journal}
    WHERE run = %s AND epoch <= %s AND (epoch < %s OR n <= %s) AND EXISTS (
        SELECT 1 FROM {runs} AS run WHERE run.id = %s AND run.epoch = %s AND run.folded = %s
    )
"""
WAKE_IF_MESSAGE = """
    UPDATE {runs} SET wake_at = UTC_TIMESTAMP(6)
    WHERE id = %s AND epoch = %s AND folded = %s AND owner IS NULL
        AND (wake_at IS NULL OR wake_at > UTC_TIMESTAMP(6)) AND EXISTS (
            SELECT 1 FROM {inbox} AS message
            WHERE message.run = %s AND message.consumed = 0 AND message.name IN (%s)
        )
"""
# Only for a run without messages and tags, which is the usual case: each message would be joined
# with each entry. The join order locks the run before the other rows are read, and senders of
# messages lock the run too. For many runs at once, this would take twice as long as one statement
# per table.
DELETE_ONE = """
    DELETE run, entry FROM {runs} AS run
    LEFT JOIN {inbox} AS message ON message.run = run.id
    LEFT JOIN {journal} AS entry ON entry.run = run.id
    WHERE run.id = %s AND run.epoch = %s AND run.owner IS NOT NULL AND message.seq IS NULL
        AND COALESCE(run.tags, '[]') = '[]'
"""

# The rows exist and are locked. An upsert is how many updates fit in one statement.
REST = """
    INSERT INTO {runs} (
        id, epoch, folded, snapshot, status, wake_at, awaits, version, tags, summary
    )
    VALUES %s {new_row}
    ON DUPLICATE KEY UPDATE {set_rest},
        updated_at = UTC_TIMESTAMP(6), owner = NULL, takeovers = 0
"""
FENCE = "SELECT epoch = %s AND owner IS NOT NULL FROM {runs} WHERE id = %s"
FENCE_LOCKED = FENCE + " FOR UPDATE"

# MariaDB scans a whole primary key that it is forced to use, unless it needs another column. Hence
# the second condition here and in CONSUME, which is true for all of these rows.
DELETE_RUNS = """
    DELETE run FROM {runs} AS run FORCE INDEX (PRIMARY) WHERE run.id IN (%s) AND run.folded >= -1
"""
DELETE_JOURNALS = """
    DELETE entry FROM {journal} AS entry FORCE INDEX (PRIMARY) WHERE entry.run IN (%s)
"""
DELETE_INBOXES = """
    DELETE message FROM {inbox} AS message FORCE INDEX (by_run) WHERE message.run IN (%s)
"""

# The order matters: each assignment sees the columns as the previous ones left them. A run that is
# not running has no journal.
LEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET
        takeovers = IF(
            status = 'running' AND EXISTS (
                SELECT 1 FROM {journal} AS entry
                WHERE entry.run = {runs}.id AND entry.epoch = {runs}.epoch
            ), 0, takeovers + (owner IS NOT NULL AND (%s OR wake_at <= %s))
        ),
        epoch = GREATEST(epoch + 1, %s),
        owner = %s, wake_at = %s, status = 'running', awaits = NULL, folded = -1,
        messages = messages + %s
    WHERE id IN (%s)
"""
OWNERS = "SELECT id, owner, IF(owner IS NULL, NULL, wake_at) FROM {runs} WHERE id IN (%s)"
RENEW = "UPDATE {runs} FORCE INDEX (PRIMARY) SET wake_at = %s WHERE id IN (%s)"
RELEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET owner = NULL, wake_at = %s WHERE id IN (%s)
"""

JOURNALS = "SELECT run, epoch, data FROM {journal} WHERE run IN (%s) ORDER BY run, epoch, n"
INBOXES = """
    SELECT run, seq, name, payload, sent_at FROM {inbox}
    WHERE run IN (%s) AND consumed = 0 ORDER BY seq
"""
INBOX = """
    SELECT run, seq, name, payload, sent_at FROM {inbox} FORCE INDEX (by_run)
    WHERE run = %s AND consumed = 0 AND seq > %s ORDER BY seq LIMIT %s
"""
MESSAGES = """
    SELECT run, seq, name, dedup IS NOT NULL FROM {inbox} WHERE run IN (%s) AND consumed = 0
"""
MESSAGES_TO_CONSUME = """
    SELECT run, seq, name, dedup IS NOT NULL FROM {inbox} FORCE INDEX (PRIMARY)
    WHERE seq IN (%s) AND run IN (%s) AND consumed = 0
"""
RUNS_WITH_MESSAGES = "SELECT DISTINCT run FROM {inbox} WHERE run IN (%s) AND consumed = 0"
# Processes of an older version, if any are still running, do not count messages.
COUNT_CONSUMED = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET messages = GREATEST(messages - %s, 0) WHERE id IN (%s)
"""
CONSUME = """
    DELETE message FROM {inbox} AS message FORCE INDEX (PRIMARY)
    WHERE message.seq IN (%s) AND message.consumed = 0
"""
MARK_CONSUMED = """
    UPDATE {inbox} FORCE INDEX (PRIMARY) SET consumed = 1, payload = '{{}}' WHERE seq IN (%s)
"""


class Statements:
    """The statements for the tables of one store, in the dialect of its server."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._tables = tables
        self._dialect = dialect
        self._cache: dict[str, bytes] = {}

    def bind(self, template: str, *values: Value) -> Statement:
        """Return a statement with the values of its parameters."""
        sql = self._cache.get(template)
        if sql is None:
            sql = self._cache[template] = self._tables.sql(template, self._dialect)
        return Statement(sql, values)

    def all(self, conditions: "Conditions") -> Statement:
        """Return the conjunction of the conditions, as part of a statement."""
        return self.bind(" AND ".join(conditions.templates) or "TRUE", *conditions.values)

    def union(self, template: str, rows: Sequence[Sequence[Value]]) -> Statement:
        """Return the UNION of several selects, each with its own values."""
        return Statement(b"%s", [Rows(self.bind(template).sql, rows, b" UNION ALL ")])


class Conditions:
    """Conditions of a WHERE clause, and the values of their parameters."""

    def __init__(self) -> None:
        self.templates: list[str] = []
        self.values: list[Value] = []

    def add(self, template: str, *values: Value) -> None:
        """Add a condition."""
        self.templates.append(template)
        self.values += values

    def copy(self) -> "Conditions":
        """Return a copy, to which more conditions can be added."""
        conditions = Conditions()
        conditions.templates, conditions.values = [*self.templates], [*self.values]
        return conditions

    def add_prefix(self, prefix: str) -> None:
        """Add the condition that the stored id begins with `prefix`, unless the prefix is empty."""
        if prefix:
            self.add(WITH_PREFIX, len(prefix), prefix)
