"""The statements of the MySQL store.

A transaction that writes runs first locks their rows, in the order of their ids. Python decides by
what the rows contain, and writes while they are still locked: at READ COMMITTED, the statements
after the lock see everything that was committed before it. `FORCE INDEX` prevents the scan of a
small table, which would lock rows of other runs out of order: a deadlock with a statement that
locks them in order.

Columns: `consumed` marks messages that are kept only for their `dedup` digest, `folded` is the
number of the last entry that the snapshot contains.
"""

from perdure.stores.mysql.literals import Statement, Value
from perdure.stores.mysql.schema import Dialect, Tables

LOAD = """
    SELECT -1, -1, CAST(snapshot AS BINARY) FROM {runs} WHERE id = %s
    UNION ALL
    SELECT epoch, n, data FROM {journal} WHERE run = %s
"""

LIST = """
    SELECT id, updated_at, status, workflow, owner FROM {runs}
    WHERE {conditions} ORDER BY updated_at DESC, id DESC LIMIT %s
"""
# Not LIKE: with an index, MariaDB's LIKE misses ids whose next character is beyond U+FFFF.
WITH_PREFIX = "LEFT(id, %s) = %s"
WITH_STATUS = "status = %s"
WITH_WORKFLOW = "workflow = %s"
IN_WORKFLOWS = "workflow IN (%s)"
AFTER = "updated_at <= %s AND (updated_at < %s OR id < %s)"

LOCK = """
    SELECT id, epoch, folded, owner IS NOT NULL, UTC_TIMESTAMP(6) FROM {runs} FORCE INDEX (PRIMARY)
    WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_LEASED = """
    SELECT id, epoch, owner, wake_at, takeovers, UTC_TIMESTAMP(6), NULL
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_REQUESTED = """
    SELECT id, epoch, owner, wake_at, takeovers, UTC_TIMESTAMP(6), IF(
        owner IS NULL OR owner IN (%s) OR wake_at <= UTC_TIMESTAMP(6),
        CAST(snapshot AS BINARY), NULL
    )
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_RECEIVER = """
    SELECT status, owner, awaits, wake_at, UTC_TIMESTAMP(6) FROM {runs} WHERE id = %s FOR UPDATE
"""

# The reply to an INSERT contains the argument of LAST_INSERT_ID: it returns the epoch, and with it
# the time, without another statement.
CREATE_LEASED = """
    INSERT INTO {runs} (id, snapshot, workflow, owner, wake_at, updated_at, epoch) VALUES %s
"""
CREATE_LEASED_ROW = b"""(
    %s, %s, %s, %s, UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND, UTC_TIMESTAMP(6),
    LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
)"""
ENQUEUE = "INSERT INTO {runs} (id, snapshot, workflow, wake_at, updated_at, epoch) VALUES %s"
ENQUEUE_ROW = b"""(
    %s, %s, %s, COALESCE(%s, UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6),
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
)"""

# A run that this transaction creates has the epoch -1 until its last statement. One that exists is
# locked by the update, which changes nothing. INSERT IGNORE would lock it for reading only: a
# deadlock between two transactions that then write it.
INSERT_OR_LOCK = """
    INSERT INTO {runs} (id, snapshot, workflow, wake_at, epoch) VALUES %s
    ON DUPLICATE KEY UPDATE epoch = epoch
"""
INSERTED = "SELECT id FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) AND epoch = -1"
QUEUE_INSERTED = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET
        wake_at = COALESCE(wake_at, UTC_TIMESTAMP(6)), updated_at = UTC_TIMESTAMP(6),
        epoch = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
    WHERE id IN (%s) AND epoch = -1
"""

SAVE = """
    UPDATE {runs} SET
        snapshot = %s, workflow = %s, status = %s, wake_at = IF(%s, UTC_TIMESTAMP(6), %s),
        awaits = %s, updated_at = UTC_TIMESTAMP(6), owner = NULL, takeovers = 0, folded = -1,
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
# The next two statements do nothing if this one did not find the run. It always changes a column,
# so that its count is 1 if it found the run, whatever flags the connection has.
REST_ONE = """
    UPDATE {runs} SET
        snapshot = %s, status = %s, wake_at = %s, awaits = %s, updated_at = UTC_TIMESTAMP(6),
        owner = NULL, takeovers = 0, folded = %s
    WHERE id = %s AND epoch = %s AND owner IS NOT NULL
"""
# Entries of a later owner are kept: if REST_ONE found nothing, the row is not locked.
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
# Only for a run without messages, as most are: each message would be joined with each entry. The
# order of the joins locks the run before the others are read, and a sender of a message locks it
# too. For many runs at once this would take twice as long as one statement per table.
DELETE_ONE = """
    DELETE run, entry FROM {runs} AS run
    LEFT JOIN {inbox} AS message ON message.run = run.id
    LEFT JOIN {journal} AS entry ON entry.run = run.id
    WHERE run.id = %s AND run.epoch = %s AND run.owner IS NOT NULL AND message.seq IS NULL
"""

# The rows exist and are locked: an upsert is the way to write many updates in one statement.
REST = """
    INSERT INTO {runs} (id, epoch, folded, snapshot, status, wake_at, awaits, updated_at)
    VALUES %s {new_row}
    ON DUPLICATE KEY UPDATE {set_rest}, owner = NULL, takeovers = 0
"""
FENCE = "SELECT epoch = %s AND owner IS NOT NULL FROM {runs} WHERE id = %s"
FENCE_LOCKED = FENCE + " FOR UPDATE"

# MariaDB scans a primary key that it is forced to use if it needs no other column: hence the second
# condition here and in CONSUME, which is true for all of these rows.
DELETE_RUNS = """
    DELETE run FROM {runs} AS run FORCE INDEX (PRIMARY) WHERE run.id IN (%s) AND run.folded >= -1
"""
DELETE_JOURNALS = """
    DELETE entry FROM {journal} AS entry FORCE INDEX (PRIMARY) WHERE entry.run IN (%s)
"""
DELETE_INBOXES = """
    DELETE message FROM {inbox} AS message FORCE INDEX (by_run) WHERE message.run IN (%s)
"""

DUE = """
    SELECT id, wake_at FROM {runs} FORCE INDEX (by_wake)
    WHERE {conditions} ORDER BY wake_at LIMIT %s
"""
IS_DUE = "wake_at <= %s AND (owner IS NULL OR wake_at <= UTC_TIMESTAMP(6))"
CLAIM = """
    SELECT id, epoch, owner, wake_at, takeovers, UTC_TIMESTAMP(6), CAST(snapshot AS BINARY)
    FROM {runs} FORCE INDEX (by_wake)
    WHERE {conditions} ORDER BY wake_at LIMIT %s FOR UPDATE {skip_locked}
"""
IS_DUE_NOW = "wake_at <= UTC_TIMESTAMP(6)"

# The order matters: each assignment sees the columns as the previous ones left them.
LEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET
        takeovers = IF(
            EXISTS (
                SELECT 1 FROM {journal} AS entry
                WHERE entry.run = {runs}.id AND entry.epoch = {runs}.epoch
            ), 0, takeovers + (owner IS NOT NULL AND (%s OR wake_at <= %s))
        ),
        epoch = GREATEST(epoch + 1, %s),
        owner = %s, wake_at = %s, status = 'running', awaits = NULL, folded = -1
    WHERE id IN (%s)
"""
OWNERS = "SELECT id, owner, IF(owner IS NULL, NULL, wake_at) FROM {runs} WHERE id IN (%s)"
RENEW = "UPDATE {runs} FORCE INDEX (PRIMARY) SET wake_at = %s WHERE id IN (%s)"
RELEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET owner = NULL, wake_at = %s WHERE id IN (%s)
"""
WAKE = "UPDATE {runs} SET wake_at = %s WHERE id = %s"

JOURNALS = "SELECT run, epoch, data FROM {journal} WHERE run IN (%s) ORDER BY run, epoch, n"
INBOXES = """
    SELECT run, seq, name, payload, sent_at FROM {inbox}
    WHERE run IN (%s) AND consumed = 0 ORDER BY seq
"""
MESSAGES = """
    SELECT run, seq, name, dedup IS NOT NULL FROM {inbox} WHERE run IN (%s) AND consumed = 0
"""
RUNS_WITH_MESSAGES = "SELECT DISTINCT run FROM {inbox} WHERE run IN (%s) AND consumed = 0"
FIND_DUPLICATE = "SELECT 1 FROM {inbox} WHERE run = %s AND dedup = %s"
SEND = "INSERT INTO {inbox} (run, name, payload, sent_at, dedup) VALUES (%s, %s, %s, %s, %s)"
CONSUME = """
    DELETE message FROM {inbox} AS message FORCE INDEX (PRIMARY)
    WHERE message.seq IN (%s) AND message.consumed = 0
"""
MARK_CONSUMED = """
    UPDATE {inbox} FORCE INDEX (PRIMARY) SET consumed = 1, payload = '{{}}' WHERE seq IN (%s)
"""

LOCK_OLD = """
    SELECT id FROM {runs} FORCE INDEX (by_status)
    WHERE {conditions} LIMIT %s FOR UPDATE {skip_locked}
"""
IS_OLD = "status IN (%s) AND updated_at < UTC_TIMESTAMP(6) - INTERVAL %s MICROSECOND"
COUNT = "SELECT status, COUNT(*) FROM {runs} WHERE {conditions} GROUP BY status"
OLDEST_DUE = """
    SELECT wake_at FROM {runs} FORCE INDEX (by_wake)
    WHERE {conditions} ORDER BY wake_at LIMIT 1
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

    def where(self, template: str, conditions: "Conditions", *values: Value) -> Statement:
        """Return a statement for the rows that meet all of the conditions."""
        condition = " AND ".join(conditions.templates) or "TRUE"
        sql = template.replace("{conditions}", condition)
        return self.bind(sql, *conditions.values, *values)


class Conditions:
    """Conditions of a WHERE clause, and the values of their parameters."""

    def __init__(self) -> None:
        self.templates: list[str] = []
        self.values: list[Value] = []

    def add(self, template: str, *values: Value) -> None:
        """Add a condition."""
        self.templates.append(template)
        self.values += values

    def add_prefix(self, prefix: str) -> None:
        """Add the condition that the stored id begins with `prefix`, unless that is empty."""
        if prefix:
            self.add(WITH_PREFIX, len(prefix), prefix)
