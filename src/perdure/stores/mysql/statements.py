"""The statements of the MySQL store.

Whoever writes a run locks its row first, those of several runs in the order of their ids. What is
decided by the rows is decided in Python, and written while they are still locked; in a transaction
that reads what is committed, statements after the lock see all that was there before it. `FORCE
INDEX` keeps a small table from being scanned: a scan would lock rows of other runs, out of order,
which is a deadlock with a statement that locks them in order.
"""

from perdure.stores.mysql.literals import Statement, Value
from perdure.stores.mysql.schema import Dialect, Names

LOAD = """
    SELECT -1, -1, CAST(snapshot AS BINARY) FROM {runs} WHERE id = %s
    UNION ALL
    SELECT epoch, n, data FROM {journal} WHERE run = %s
"""

LIST = """
    SELECT id, updated_at, status, workflow FROM {runs}
    WHERE {conditions} ORDER BY updated_at DESC, id DESC LIMIT %s
"""
# Not LIKE: by an index, MariaDB's LIKE loses ids that go on with a character beyond U+FFFF.
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
LOCK_WANTED = """
    SELECT id, epoch, owner, wake_at, takeovers, UTC_TIMESTAMP(6), IF(
        owner IS NULL OR owner IN (%s) OR wake_at <= UTC_TIMESTAMP(6),
        CAST(snapshot AS BINARY), NULL
    )
    FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) ORDER BY id FOR UPDATE
"""
LOCK_RECEIVER = """
    SELECT status, owner, awaits, wake_at, UTC_TIMESTAMP(6) FROM {runs} WHERE id = %s FOR UPDATE
"""

# The answer to an INSERT holds what LAST_INSERT_ID was given: so the epoch, and with it the time,
# is known without a question more.
START = """
    INSERT INTO {runs} (id, snapshot, workflow, owner, wake_at, updated_at, epoch) VALUES %s
"""
STARTED = b"""(
    %s, %s, %s, %s, UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND, UTC_TIMESTAMP(6),
    LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
)"""
ENQUEUE = "INSERT INTO {runs} (id, snapshot, workflow, wake_at, updated_at, epoch) VALUES %s"
ENQUEUED = b"""(
    %s, %s, %s, COALESCE(%s, UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6),
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
)"""

# A run that is made in this transaction has the epoch -1 until its end. One that is there already
# is locked by the update that changes nothing; INSERT IGNORE would lock it for reading only, and
# two that want to write it then would wait for each other.
MAKE = """
    INSERT INTO {runs} (id, snapshot, workflow, wake_at, epoch) VALUES %s
    ON DUPLICATE KEY UPDATE epoch = epoch
"""
MADE = "SELECT id FROM {runs} FORCE INDEX (PRIMARY) WHERE id IN (%s) AND epoch = -1"
QUEUE_MADE = """
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
NEXT_ENTRY = b"SELECT %s, %s, %s, %s"

ADD = """
    INSERT INTO {journal} (run, epoch, n, data) VALUES %s
    ON DUPLICATE KEY UPDATE n = n
"""
ENTRY = "SELECT run, epoch, n FROM {journal} WHERE run = %s AND epoch = %s AND n = %s"
# What the first of these does not find, the others leave alone. It changes a column whatever flags
# the connection has, so that its count tells whether it found the run.
REST_ONE = """
    UPDATE {runs} SET
        snapshot = %s, status = %s, wake_at = %s, awaits = %s, updated_at = UTC_TIMESTAMP(6),
        owner = NULL, takeovers = 0, folded = %s
    WHERE id = %s AND epoch = %s AND owner IS NOT NULL
"""
# Not what a later owner wrote: when the first has found nothing, the row is not locked.
FOLD_ONE = """
    DELETE FROM {journal}
    WHERE run = %s AND epoch <= %s AND (epoch < %s OR n <= %s) AND EXISTS (
        SELECT 1 FROM {runs} AS run WHERE run.id = %s AND run.epoch = %s AND run.folded = %s
    )
"""
EXPECT_ONE = """
    UPDATE {runs} SET wake_at = UTC_TIMESTAMP(6)
    WHERE id = %s AND epoch = %s AND folded = %s AND owner IS NULL
        AND (wake_at IS NULL OR wake_at > UTC_TIMESTAMP(6)) AND EXISTS (
            SELECT 1 FROM {inbox} AS message
            WHERE message.run = %s AND message.taken = 0 AND message.name IN (%s)
        )
"""
# Only a run without messages, as most are: each would meet each entry. The joins keep the order:
# the run is locked before the others are read, and whoever sends a message locks it, too. Of many
# runs at once, this would take twice as long as the statements one by one.
FORGET_ONE = """
    DELETE run, entry FROM {runs} AS run
    LEFT JOIN {inbox} AS message ON message.run = run.id
    LEFT JOIN {journal} AS entry ON entry.run = run.id
    WHERE run.id = %s AND run.epoch = %s AND run.owner IS NOT NULL AND message.seq IS NULL
"""

# The rows are there and locked. In this form, many updates are one statement.
REST = """
    INSERT INTO {runs} (id, epoch, folded, snapshot, status, wake_at, awaits, updated_at)
    VALUES %s {as_given}
    ON DUPLICATE KEY UPDATE {rest_as_given}, owner = NULL, takeovers = 0
"""
FENCE = "SELECT epoch = %s AND owner IS NOT NULL FROM {runs} WHERE id = %s"
FENCE_LOCKED = FENCE + " FOR UPDATE"

# MariaDB scans a primary key that it is forced to use when it needs no other column: hence the
# second condition here and in TAKE, which all of these rows meet.
FORGET_RUNS = """
    DELETE run FROM {runs} AS run FORCE INDEX (PRIMARY) WHERE run.id IN (%s) AND run.folded >= -1
"""
FORGET_JOURNALS = """
    DELETE entry FROM {journal} AS entry FORCE INDEX (PRIMARY) WHERE entry.run IN (%s)
"""
FORGET_INBOXES = """
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

# The order matters: what comes first still sees how the run was.
LEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET
        takeovers = IF(
            EXISTS (
                SELECT 1 FROM {journal} AS entry
                WHERE entry.run = {runs}.id AND entry.epoch = {runs}.epoch
            ), 0, takeovers + (owner IS NOT NULL AND wake_at <= %s)
        ),
        epoch = GREATEST(epoch + 1, %s),
        owner = %s, wake_at = %s, status = 'running', awaits = NULL, folded = -1
    WHERE id IN (%s)
"""
RENEW = "UPDATE {runs} FORCE INDEX (PRIMARY) SET wake_at = %s WHERE id IN (%s)"
RELEASE = """
    UPDATE {runs} FORCE INDEX (PRIMARY) SET owner = NULL, wake_at = %s WHERE id IN (%s)
"""
WAKE = "UPDATE {runs} SET wake_at = %s WHERE id = %s"

JOURNALS = "SELECT run, epoch, data FROM {journal} WHERE run IN (%s) ORDER BY run, epoch, n"
INBOXES = """
    SELECT run, seq, name, payload, sent_at FROM {inbox}
    WHERE run IN (%s) AND taken = 0 ORDER BY seq
"""
MAIL = "SELECT run, seq, name, dedup IS NOT NULL FROM {inbox} WHERE run IN (%s) AND taken = 0"
MAILED = "SELECT DISTINCT run FROM {inbox} WHERE run IN (%s) AND taken = 0"
KNOWN = "SELECT 1 FROM {inbox} WHERE run = %s AND dedup = %s"
SEND = "INSERT INTO {inbox} (run, name, payload, sent_at, dedup) VALUES (%s, %s, %s, %s, %s)"
TAKE = """
    DELETE message FROM {inbox} AS message FORCE INDEX (PRIMARY)
    WHERE message.seq IN (%s) AND message.taken = 0
"""
TAKE_KNOWN = """
    UPDATE {inbox} FORCE INDEX (PRIMARY) SET taken = 1, payload = '{{}}' WHERE seq IN (%s)
"""

OLD = """
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
    """The statements for the tables of one name: `statements(LOAD, id, id)`."""

    def __init__(self, names: Names, dialect: Dialect) -> None:
        self._names = names
        self._dialect = dialect
        self._filled: dict[str, bytes] = {}

    def __call__(self, sql: str, *values: Value) -> Statement:
        filled = self._filled.get(sql)
        if filled is None:
            filled = self._filled[sql] = self._names.fill(sql, self._dialect)
        return Statement(filled, values)

    def where(self, sql: str, conditions: "Conditions", *values: Value) -> Statement:
        """Give a statement for the rows that meet all of the conditions."""
        together = " AND ".join(conditions.texts) or "TRUE"
        return self(sql.replace("{conditions}", together), *conditions.values, *values)


class Conditions:
    """What rows must be like, and the values to compare them with."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.values: list[Value] = []

    def add(self, text: str, *values: Value) -> None:
        """Keep to rows of which this holds too."""
        self.texts.append(text)
        self.values += values

    def add_prefix(self, prefix: str) -> None:
        """Keep to runs whose stored id begins so."""
        if prefix:
            self.add(WITH_PREFIX, len(prefix), prefix)
