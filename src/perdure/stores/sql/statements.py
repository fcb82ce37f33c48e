"""The statements of `SqlStore`, for any database and any client.

A client commits each statement by itself, so a process may end, or another one interfere, between
any two. Each statement therefore leaves a state that loads correctly, and a verb of several
statements relies on their order:

* An entry is written by a statement that locks its run or writes nothing: the fence. An epoch is
  open while its run has an owner; a rest and a release end both.
* A rest is one update, which also stores up to which entry the snapshot includes the journal
  (`folded_epoch`, `folded_n`). Entries up to there are ignored, and deleted afterwards.
* A message counts as consumed as soon as an entry, or the last rest, names it in `consumes`. The
  message itself is marked or deleted afterwards, and only then the entry.
* A suspended run that waits for events is due at first. Its wake time is set in a second statement,
  and only if its inbox has no message and none was sent in the meantime (`deliveries`).
* The epoch of a deleted run is stored in the floor before the run is deleted.

`$name` is a word of the dialect, a table or a fragment; `?` is a value; `[item] separator ...` is
repeated as often as a call needs. MySQL assigns from left to right and reads what it has just
assigned: a column is read before it is set.
"""

# Parts that several statements share. Each may use those before it.
FRAGMENTS = {
    "new_epoch": "$greatest($now, (SELECT lowest.epoch + 1 FROM $floor AS lowest WHERE id = 1))",
    "after_fold": """
        (entry.epoch > run.folded_epoch
            OR entry.epoch = run.folded_epoch AND entry.n > run.folded_n)
    """,
    "consumed_by_entry": """
        EXISTS (
            SELECT 1 FROM $journal AS entry
            WHERE entry.run = $inbox.run
                AND $position(entry.consumes, $comma $inbox.seq $end_comma) > 0
        )
    """,
    "consumed": """
        ($consumed_by_entry OR EXISTS (
            SELECT 1 FROM $runs AS run
            WHERE run.id = $inbox.run
                AND $position(run.consumes, $comma $inbox.seq $end_comma) > 0
        ))
    """,
    "unconsumed": """
        $inbox.consumed = 0 AND NOT $consumed_by_entry
            AND COALESCE($position(run.consumes, $comma $inbox.seq $end_comma), 0) = 0
    """,
    "lease": """
        takeovers = CASE
            WHEN EXISTS (
                SELECT 1 FROM $journal AS entry
                WHERE entry.run = run.id AND entry.epoch = run.epoch
            ) THEN 0
            WHEN run.owner IS NOT NULL AND (run.wake_at <= $now OR run.owner = ?)
            THEN run.takeovers + 1
            ELSE run.takeovers
        END,
        epoch = $greatest(run.epoch + 1, $now), status = 'running', awaits = NULL,
        owner = ?, ticket = ?, wake_at = $now + $number
    """,
}

LOAD = """
    SELECT 0 AS part, 0 AS epoch, 0 AS n, run.snapshot AS data
    FROM $runs AS run WHERE run.id = ?
    UNION ALL
    SELECT 1, entry.epoch, entry.n, entry.data
    FROM $journal AS entry JOIN $runs AS run ON run.id = entry.run
    WHERE entry.run = ? AND $after_fold
    ORDER BY 1, 2, 3
"""

SAVE = """
    INSERT INTO $runs $as_run (
        id, snapshot, workflow, status, wake_at, awaits, updated_at,
        epoch, created_epoch, folded_epoch
    )
    VALUES (
        ?, ?, ?, ?, CASE WHEN $number = 1 THEN $now ELSE $number END, ?,
        $now, $new_epoch, $new_epoch, $new_epoch
    )
    $on_same_id
        snapshot = ${new}snapshot$end, workflow = ${new}workflow$end,
        status = ${new}status$end, wake_at = ${new}wake_at$end, awaits = ${new}awaits$end,
        updated_at = ${new}updated_at$end, owner = NULL, takeovers = 0, consumes = NULL,
        folded_n = -1,
        folded_epoch = $greatest(${old}epoch + 1, ${new}epoch$end),
        epoch = $greatest(${old}epoch + 1, ${new}epoch$end)
"""

DELETE_FOLDED = """
    DELETE FROM $journal
    WHERE run = ? AND EXISTS (
        SELECT 1 FROM $runs AS run
        WHERE run.id = $journal.run AND (
            $journal.epoch < run.folded_epoch
            OR $journal.epoch = run.folded_epoch AND $journal.n <= run.folded_n
        )
    )
"""

RAISE_EPOCH_FLOOR = """
    UPDATE $floor SET epoch = $greatest(
        epoch, COALESCE((SELECT MAX(run.epoch) FROM $runs AS run WHERE run.id IN ([?], ...)), 0)
    ) WHERE id = 1
"""

DELETE = "DELETE FROM $runs WHERE id = ?"

DELETE_OLD = """
    DELETE FROM $runs
    WHERE id IN ([?], ...) AND status IN ('completed', 'failed', 'cancelled')
        AND updated_at < $now - $number
"""

DELETE_OWNED = "DELETE FROM $runs WHERE id = ? AND epoch = ? AND owner IS NOT NULL"

# Entries and messages of a deleted run, or of an earlier run with the same id.
DELETE_ORPHANED_ENTRIES = """
    DELETE FROM $journal
    WHERE run IN ([?], ...) AND NOT EXISTS (
        SELECT 1 FROM $runs AS run
        WHERE run.id = $journal.run AND run.created_epoch <= $journal.epoch
    )
"""
DELETE_ORPHANED_MESSAGES = """
    DELETE FROM $inbox
    WHERE run IN ([?], ...) AND NOT EXISTS (
        SELECT 1 FROM $runs AS run
        WHERE run.id = $inbox.run AND run.created_epoch = $inbox.created_epoch
    )
"""

LIST = """
    SELECT run.id, run.updated_at, run.status, run.workflow, run.owner FROM $runs AS run
    WHERE $position(run.id, ?) = 1 %s
    ORDER BY run.updated_at DESC, run.id DESC
    LIMIT ?
"""
OF_STATUS = "AND run.status = ?"
OF_WORKFLOW = "AND run.workflow = ?"
AFTER = "AND (run.updated_at < ? OR run.updated_at = ? AND run.id < ?)"

APPEND = """
    $insert $journal (run, epoch, n, data, consumes)
    SELECT entry.run, entry.epoch, entry.n, entry.data, entry.consumes
    FROM (
        [SELECT $key AS run, $number AS epoch, $number AS n, $text AS data, $text AS consumes]
        UNION ALL ...
    ) AS entry
    JOIN $runs AS run ON run.id = entry.run
    WHERE run.epoch = entry.epoch AND run.owner IS NOT NULL
    $lock_run $or_ignore
"""

FENCES = """
    SELECT run.id, run.epoch, run.folded_epoch, run.folded_n FROM $runs AS run
    WHERE run.id IN ([?], ...)
"""
WRITTEN = "SELECT run, epoch, n FROM $journal WHERE run IN ([?], ...)"

REST = """
    UPDATE $runs SET
        snapshot = ?, status = ?, awaits = ?, consumes = ?,
        wake_at = CASE WHEN $number = 1 THEN $now ELSE $number END,
        updated_at = $now, owner = NULL, takeovers = 0, folded_n = $number,
        folded_epoch = $number
    WHERE id = ? AND epoch = ? AND owner IS NOT NULL
"""

COUNT_AWAITED_MESSAGES = """
    SELECT run.epoch, run.folded_n, run.deliveries, (
        SELECT COUNT(*) FROM $inbox
        WHERE $inbox.run = run.id AND $inbox.created_epoch = run.created_epoch
            AND $position(run.awaits, $comma $inbox.digest $end_comma) > 0 AND $unconsumed
    )
    FROM $runs AS run WHERE run.id = ?
"""

SCHEDULE_WAKE = """
    UPDATE $runs SET wake_at = $number
    WHERE id = ? AND epoch = ? AND folded_n = ? AND deliveries = ? AND owner IS NULL AND awaits = ?
"""

MARK_CONSUMED = """
    UPDATE $inbox SET consumed = 1, payload = ''
    WHERE run = ? AND consumed = 0 AND dedup IS NOT NULL AND $consumed
"""
DELETE_CONSUMED = """
    DELETE FROM $inbox WHERE run = ? AND consumed = 0 AND dedup IS NULL AND $consumed
"""

CREATE = """
    $insert $runs (
        id, snapshot, workflow, owner, creator, ticket, status, wake_at, updated_at,
        epoch, created_epoch, folded_epoch
    )
    SELECT item.id, item.snapshot, item.workflow, item.owner, item.creator, item.creator, 'running',
        CASE WHEN item.ttl IS NULL THEN COALESCE(item.wake_at, $now) ELSE $now + item.ttl END,
        $now, $new_epoch, $new_epoch, $new_epoch
    FROM (
        [SELECT $key AS id, $text AS snapshot, $key AS workflow, $key AS owner, $key AS creator,
            $number AS ttl, $number AS wake_at]
        UNION ALL ...
    ) AS item
    WHERE 1 = 1 $or_ignore
"""
CREATED = "SELECT id FROM $runs WHERE id IN ([?], ...) AND creator = ?"

LEASE = """
    UPDATE $runs AS run SET $lease
    WHERE run.id IN ([?], ...) AND (
        run.owner IS NULL OR run.owner = ? OR run.wake_at <= $now OR run.owner = ?
    )
"""
CLAIM = "UPDATE $runs AS run SET $lease WHERE run.id IN ([?], ...) AND run.wake_at <= $now"

LEASED_RUNS = """
    SELECT run.id, run.epoch, run.wake_at, run.takeovers, run.snapshot, $now
    FROM $runs AS run WHERE run.id IN ([?], ...) AND run.ticket = ?
"""
JOURNALS = """
    SELECT run.id, run.epoch, entry.data
    FROM $runs AS run LEFT JOIN $journal AS entry ON entry.run = run.id AND $after_fold
    WHERE run.id IN ([?], ...)
    ORDER BY run.id, entry.epoch, entry.n
"""
INBOXES = """
    SELECT $inbox.run, $inbox.seq, $inbox.name, $inbox.payload, $inbox.sent_at
    FROM $inbox
    JOIN $runs AS run ON run.id = $inbox.run AND run.created_epoch = $inbox.created_epoch
    WHERE $inbox.run IN ([?], ...) AND $unconsumed
    ORDER BY $inbox.seq
"""
OWNERS = "SELECT id, owner, wake_at FROM $runs WHERE id IN ([?], ...)"

RENEW = """
    UPDATE $runs SET wake_at = $now + $number
    WHERE [(id = ? AND owner = ? AND epoch = ?)] OR ...
"""
RENEWED = """
    SELECT run.id, run.owner, run.epoch, run.wake_at, (
        SELECT COUNT(*) FROM $inbox
        WHERE $inbox.run = run.id AND $inbox.created_epoch = run.created_epoch AND $unconsumed
    )
    FROM $runs AS run WHERE [(run.id = ? AND run.owner = ? AND run.epoch = ?)] OR ...
"""
RELEASE = """
    UPDATE $runs SET owner = NULL, wake_at = COALESCE($number, $now)
    WHERE [(id = ? AND owner = ? AND epoch = ?)] OR ...
"""

DUE = """
    SELECT run.id, run.wake_at FROM $runs AS run
    WHERE run.wake_at <= COALESCE($number, $now) AND (run.owner IS NULL OR run.wake_at <= $now)
        AND $position(run.id, ?) = 1 %s
    ORDER BY run.wake_at, run.id
    LIMIT ?
"""
IN_WORKFLOWS = "AND run.workflow IN ([?], ...)"

SEND = """
    $insert $inbox (run, created_epoch, name, digest, payload, sent_at, dedup)
    SELECT run.id, run.created_epoch, $text, $key, $text, $now, $key
    FROM $runs AS run
    WHERE run.id = ? AND run.status NOT IN ('completed', 'failed', 'cancelled')
    $lock_run $or_ignore
"""
EXPLAIN_SEND = """
    SELECT (
        SELECT COUNT(*) FROM $inbox
        WHERE $inbox.run = run.id AND $inbox.created_epoch = run.created_epoch
            AND $inbox.dedup = ?
    )
    FROM $runs AS run WHERE run.id = ?
"""
WAKE_IF_MESSAGE = """
    UPDATE $runs AS run SET deliveries = run.deliveries + 1, wake_at = CASE
        WHEN run.owner IS NULL AND $position(run.awaits, ?) > 0
            AND (run.wake_at IS NULL OR run.wake_at > $now)
            AND EXISTS (
                SELECT 1 FROM $inbox
                WHERE $inbox.run = ? AND $inbox.digest = ? AND $unconsumed
            )
        THEN $now ELSE run.wake_at END
    WHERE run.id = ?
"""

OLD_RUNS = """
    SELECT id FROM $runs AS run
    WHERE status IN ([?], ...) AND updated_at < $now - $number AND $position(id, ?) = 1
    ORDER BY updated_at
    LIMIT ?
"""
COUNT = """
    SELECT run.status, COUNT(*) FROM $runs AS run
    WHERE $position(run.id, ?) = 1
    GROUP BY run.status
"""
OLDEST_DUE = """
    SELECT MIN(run.wake_at) FROM $runs AS run
    WHERE run.wake_at <= $now AND $position(run.id, ?) = 1
"""

CREATE_MIGRATIONS_TABLE = "CREATE TABLE IF NOT EXISTS $migrations (version INTEGER PRIMARY KEY)"
APPLIED_MIGRATIONS = "SELECT version FROM $migrations"
RECORD_MIGRATION = """
    $insert $migrations (version)
    SELECT item.version FROM (SELECT $number AS version) AS item WHERE 1 = 1 $or_ignore
"""
