"""The statements of `SqlStore`, for any database and any client.

A client commits each statement separately, so a process may crash, or another one interfere,
between any two. Each statement therefore leaves a state that loads correctly, and an operation of
several statements relies on their order:

* An entry is written by a statement that locks its run or writes nothing: the fence. An epoch is
  open while its run has an owner; a rest and a release end both.
* A rest is one update, which also stores up to which entry the snapshot includes the journal
  (`folded_epoch`, `folded_n`). Entries up to there are ignored, and deleted afterwards.
* A message counts as consumed as soon as an entry, or the last rest, names it in `consumes`. The
  message itself is marked or deleted afterwards, and only then the entry.
* A suspended run that waits for events is due at first. Its wake time is set in a second statement,
  and only if its inbox has no message and none was sent in the meantime (`deliveries`).
* The epoch of a deleted run is stored in the floor before the run is deleted.
* A run's tags are written to their table before the run itself is created or changed. A row there
  counts only while a run has its id, time of creation and tag, so a row that a crash left behind is
  ignored. The rows of a deleted run are not newer than the floor.
* Each time a message is sent, it is inserted, then it wakes its run, then it is counted. The sender
  of the last message in an inbox thus counts all of them. The count is that of an index range. It
  includes messages whose consumer crashed before it could mark them, until the run's next owner
  does.

`$name` is a term of the dialect, a table or a fragment; `?` is a value; `[item] separator ...` is
repeated as often as needed. MySQL assigns from left to right and sees its own assignments, so a
column is always read before it is set.
"""

# Parts that several statements share. Each part may use the parts before it.
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
        $inbox.consumed = 0 AND $inbox.created_epoch = run.created_epoch
            AND NOT $consumed_by_entry
            AND COALESCE($position(run.consumes, $comma $inbox.seq $end_comma), 0) = 0
    """,
    "created": "COALESCE(run.created_at, run.created_epoch)",
    "summary": """
        run.id, run.updated_at, run.status, run.workflow, run.owner, run.version, run.queue,
        run.tags, run.summary, $created AS created, run.wake_at, run.awaited, run.takeovers
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
        awaited = NULL, owner = ?, ticket = ?, wake_at = $now + $number
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
        id, snapshot, workflow, status, awaits, awaited, version, tags, summary, created_at,
        wake_at, updated_at, epoch, created_epoch, folded_epoch
    )
    VALUES (
        ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,
        CASE WHEN $number = 1 THEN $now ELSE $number END, $now, $new_epoch, $new_epoch, $new_epoch
    )
    $on_same_id
        snapshot = ${new}snapshot$end, workflow = ${new}workflow$end,
        status = ${new}status$end, awaits = ${new}awaits$end, awaited = ${new}awaited$end,
        queue = '', version = ${new}version$end, tags = ${new}tags$end,
        summary = ${new}summary$end, created_at = COALESCE(${new}created_at$end, ${old}created_at),
        wake_at = ${new}wake_at$end, updated_at = ${new}updated_at$end,
        owner = NULL, takeovers = 0, consumes = NULL, folded_n = -1,
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

DELETE_ORPHANED_TAGS = """
    DELETE FROM $tags
    WHERE run IN ([?], ...)
        AND created_at <= (SELECT lowest.epoch FROM $floor AS lowest WHERE id = 1)
        AND NOT EXISTS (
            SELECT 1 FROM $runs AS run WHERE run.id = $tags.run AND $created = $tags.created_at
        )
"""

# A run is created with the time of its tags, if it has any.
NOW_AND_EXISTING = """
    SELECT $now, run.id FROM (SELECT 1 AS one) AS one LEFT JOIN $runs AS run ON run.id IN ([?], ...)
"""
CREATION_AND_TAGS = "SELECT $created, run.tags FROM $runs AS run WHERE run.id = ?"
ADD_TAGS = """
    $insert $tags (tag, created_at, run)
    SELECT item.tag, item.created_at, item.run
    FROM ([SELECT $key AS tag, $number AS created_at, $key AS run] UNION ALL ...) AS item
    WHERE 1 = 1 $or_ignore
"""
# Tags that were written for a run that another process then created.
DELETE_UNUSED_TAGS = """
    DELETE FROM $tags
    WHERE run IN ([?], ...) AND created_at = ? AND NOT EXISTS (
        SELECT 1 FROM $runs AS run WHERE run.id = $tags.run AND $created = $tags.created_at
    )
"""
# Not while an owner may be writing tags for its rest, or has written them.
DELETE_OTHER_TAGS = """
    DELETE FROM $tags
    WHERE run = ? AND tag NOT IN ([?], ...) AND EXISTS (
        SELECT 1 FROM $runs AS run WHERE run.id = $tags.run AND run.owner IS NULL AND run.tags = ?
    )
"""

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
WRITTEN_ENTRIES = "SELECT run, epoch, n FROM $journal WHERE run IN ([?], ...)"

REST = """
    UPDATE $runs SET
        snapshot = ?, status = ?, awaits = ?, awaited = ?, consumes = ?,
        version = COALESCE($number, version), tags = COALESCE($text, tags),
        summary = COALESCE($text, summary),
        wake_at = CASE WHEN $number = 1 THEN $now ELSE $number END,
        updated_at = $now, owner = NULL, takeovers = 0, folded_n = $number,
        folded_epoch = $number
    WHERE id = ? AND epoch = ? AND owner IS NOT NULL
"""

COUNT_AWAITED_MESSAGES = """
    SELECT run.epoch, run.folded_n, run.deliveries, (
        SELECT COUNT(*) FROM $inbox
        WHERE $inbox.run = run.id
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
        id, snapshot, workflow, owner, creator, ticket, status, awaits, awaited, queue, version,
        tags, summary, created_at, wake_at, updated_at, epoch, created_epoch, folded_epoch
    )
    SELECT item.id, item.snapshot, item.workflow, item.owner, item.creator, item.creator,
        item.status, item.awaits, item.awaited, item.queue, item.version, item.tags, item.summary,
        item.created_at,
        CASE WHEN item.delay IS NULL THEN item.wake_at ELSE $now + item.delay END,
        $now, $new_epoch, $new_epoch, $new_epoch
    FROM (
        [SELECT $key AS id, $text AS snapshot, $key AS workflow, $key AS owner, $key AS creator,
            $key AS status, $text AS awaits, $text AS awaited, $key AS queue, $number AS version,
            $text AS tags, $text AS summary, $number AS created_at, $number AS delay,
            $number AS wake_at]
        UNION ALL ...
    ) AS item
    WHERE 1 = 1 $or_ignore
"""
CREATED_RUNS = "SELECT id FROM $runs WHERE id IN ([?], ...) AND creator = ?"

LEASE = """
    UPDATE $runs AS run SET $lease
    WHERE run.id IN ([?], ...) AND (
        run.owner IS NULL OR run.owner = ? OR run.wake_at <= $now OR run.owner = ?
    )
"""
# A run that was claimed and is due again, perhaps with another version, has a different wake time.
CLAIM = """
    UPDATE $runs AS run SET $lease
    WHERE run.id IN ([?], ...) AND run.wake_at IN ([?], ...) AND run.wake_at <= $now
"""

LEASED_RUNS = """
    SELECT run.id, run.epoch, run.wake_at, run.takeovers, run.snapshot, $now, run.queue, run.version
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
    FROM $runs AS run JOIN $inbox ON $inbox.run = run.id
    WHERE run.id IN ([?], ...) AND $unconsumed
    LIMIT ?
"""
INBOX = """
    SELECT $inbox.run, $inbox.seq, $inbox.name, $inbox.payload, $inbox.sent_at
    FROM $runs AS run JOIN $inbox ON $inbox.run = run.id
    WHERE run.id = ? AND $inbox.seq > ? AND $unconsumed
    ORDER BY $inbox.seq
    LIMIT ?
"""
OWNERS = "SELECT id, owner, wake_at FROM $runs WHERE id IN ([?], ...)"

RENEW = """
    UPDATE $runs SET wake_at = $now + $number
    WHERE [(id = ? AND owner = ? AND epoch = ?)] OR ...
"""
RENEWED_LEASES = """
    SELECT run.id, run.owner, run.epoch, run.wake_at, CASE WHEN EXISTS (
        SELECT 1 FROM $inbox WHERE $inbox.run = run.id AND $unconsumed
    ) THEN 1 ELSE 0 END
    FROM $runs AS run WHERE [(run.id = ? AND run.owner = ? AND run.epoch = ?)] OR ...
"""
RELEASE = """
    UPDATE $runs SET owner = NULL, wake_at = COALESCE($number, $now)
    WHERE [(id = ? AND owner = ? AND epoch = ?)] OR ...
"""

# A statement contains messages to one run only and locks the run's row, so that messages are
# numbered in the order in which they are committed.
SEND = """
    $insert $inbox (run, created_epoch, name, digest, payload, sent_at, dedup, ticket)
    SELECT run.id, run.created_epoch, item.name, item.digest, item.payload, $now, item.dedup,
        item.ticket
    FROM (
        [SELECT $number AS place, $text AS name, $key AS digest, $text AS payload, $key AS dedup,
            $key AS ticket]
        UNION ALL ...
    ) AS item CROSS JOIN $runs AS run
    WHERE run.id = ? AND run.status NOT IN ('completed', 'failed', 'cancelled')
    ORDER BY item.place
    $lock_run $or_ignore
"""
TICKETS = """
    SELECT $inbox.dedup, $inbox.ticket
    FROM $runs AS run
    JOIN $inbox ON $inbox.run = run.id AND $inbox.created_epoch = run.created_epoch
    WHERE run.id = ? AND $inbox.dedup IN ([?], ...)
"""
COUNT_UNCONSUMED = """
    SELECT (
        SELECT COUNT(*) FROM $inbox
        WHERE $inbox.run = run.id AND $inbox.consumed = 0
            AND $inbox.created_epoch = run.created_epoch
    )
    FROM $runs AS run WHERE run.id = ?
"""
WAKE_IF_MESSAGE = """
    UPDATE $runs AS run SET deliveries = run.deliveries + 1, wake_at = CASE
        WHEN run.owner IS NULL AND run.awaits IS NOT NULL
            AND (run.wake_at IS NULL OR run.wake_at > $now)
            AND EXISTS (
                SELECT 1 FROM $inbox
                WHERE $inbox.run = ? AND $inbox.digest IN ([?], ...)
                    AND $position(run.awaits, $comma $inbox.digest $end_comma) > 0 AND $unconsumed
            )
        THEN $now ELSE run.wake_at END
    WHERE run.id = ?
"""

CREATE_MIGRATIONS_TABLE = "CREATE TABLE IF NOT EXISTS $migrations (version INTEGER PRIMARY KEY)"
APPLIED_MIGRATIONS = "SELECT version FROM $migrations"
RECORD_MIGRATION = """
    $insert $migrations (version)
    SELECT item.version FROM (SELECT $number AS version) AS item WHERE 1 = 1 $or_ignore
"""
