"""The statements of `SqlStore` that find runs by an index; see `statements`.

The code that runs a statement fills its `%s` with conditions, or with ranges of an index. Each
range has its own limit, so that the database reads no more of it than necessary.
"""

# One range of the due index.
DUE = """
    SELECT * FROM (
        SELECT run.wake_at, run.id, $key AS queue FROM $runs AS run
        WHERE $lane = ? AND %s AND run.version >= ? AND run.version <= ?
            AND run.wake_at <= COALESCE($number, $now) %s
        ORDER BY run.wake_at, run.version
        LIMIT ?
    ) AS due
"""
OF_KIND, OF_NO_KIND = "$kind = ?", "$kind IS NULL"
NOT_LEASED = "AND (run.wake_at <= $now OR run.owner IS NULL)"

# The workflows with scheduled runs in each queue from one queue on, after a workflow there. An
# empty name begins a queue, and NULL ends it: one lookup in the index each.
KINDS_BY_LOOKUP = """
    WITH RECURSIVE pair (queue, kind, n) AS (
        SELECT $key, $key, 0
        UNION ALL
        SELECT
            CASE WHEN pair.kind IS NULL THEN (
                SELECT MIN(run.queue) FROM $runs AS run
                WHERE run.wake_at IS NOT NULL AND run.queue > pair.queue
            ) ELSE pair.queue END,
            CASE WHEN pair.kind IS NULL THEN '' ELSE (
                SELECT MIN($kind) FROM $runs AS run
                WHERE run.wake_at IS NOT NULL AND run.queue = pair.queue AND $kind > pair.kind
            ) END,
            pair.n + 1
        FROM pair WHERE pair.queue < $key AND pair.n < ?
    )
    SELECT pair.queue, pair.kind FROM pair WHERE pair.n > 0 ORDER BY pair.n
"""
# The next workflow of a queue, and the first of the next queue. MariaDB returns wrong values of
# virtual columns when it sorts them, so they are only selected in index order.
NEXT_KINDS = """
    SELECT * FROM (
        SELECT run.lane, run.kind FROM $runs AS run FORCE INDEX ($due_idx)
        WHERE run.lane = ? AND run.kind > ? ORDER BY run.kind LIMIT 1
    ) AS same
    UNION ALL
    SELECT * FROM (
        SELECT run.lane, run.kind FROM $runs AS run FORCE INDEX ($due_idx)
        WHERE run.lane > ? AND run.lane < ? ORDER BY run.lane, run.kind LIMIT 1
    ) AS following
"""

# The last name is NULL, which stands for runs without a workflow.
WORKFLOWS_BY_LOOKUP = """
    WITH RECURSIVE workflow (kind, n) AS (
        SELECT (SELECT MIN($kind) FROM $runs AS run), 1
        UNION ALL
        SELECT (
            SELECT MIN($kind) FROM $runs AS run WHERE $kind > workflow.kind
        ), workflow.n + 1
        FROM workflow WHERE workflow.kind IS NOT NULL AND workflow.n < ?
    )
    SELECT (
        SELECT run.workflow FROM $runs AS run WHERE $kind = workflow.kind
        ORDER BY run.status, run.updated_at LIMIT 1
    )
    FROM workflow
"""
NEXT_WORKFLOW = """
    SELECT run.workflow FROM $runs AS run FORCE INDEX ($workflow_idx)
    WHERE run.kind > ? ORDER BY run.kind LIMIT 1
"""

# The runs that match, and the last one that was examined.
SEARCH = """
    SELECT run.* FROM (
        SELECT ROW_NUMBER() OVER (ORDER BY part.time %(order)s, part.place %(order)s) AS n, part.*
        FROM (%(ranges)s) AS part
        ORDER BY part.time %(order)s, part.place %(order)s
        LIMIT ?
    ) AS run
    WHERE (%(filters)s) OR run.n = ?
    ORDER BY run.n
    LIMIT ?
"""
BY_UPDATE = """
    SELECT * FROM (
        SELECT run.updated_at AS time, run.id AS place, $summary FROM $runs AS run $use_list
        WHERE %(conditions)s
        ORDER BY run.updated_at %(order)s, run.id %(order)s
        LIMIT ?
    ) AS range_part
"""
BY_GROUP = BY_UPDATE.replace("$use_list", "$use_workflow")
BY_TAG = """
    SELECT * FROM (
        SELECT tag.created_at AS time, tag.run AS place, $summary
        FROM $tags AS tag LEFT JOIN $runs AS run ON run.id = tag.run
        WHERE %(conditions)s
        ORDER BY tag.created_at %(order)s, tag.run %(order)s
        LIMIT ?
    ) AS range_part
"""
COUNT_IDS = """
    SELECT COUNT(*) FROM (
        SELECT run.id FROM $runs AS run WHERE %s ORDER BY run.id LIMIT ?
    ) AS few
"""
BY_ID = "SELECT $summary FROM $runs AS run WHERE %s ORDER BY run.id LIMIT ?"

SUMMARIES = """
    SELECT run.epoch,
        COALESCE((
            SELECT MAX(entry.n) FROM $journal AS entry
            WHERE entry.run = run.id AND entry.epoch = run.epoch
        ), run.folded_n),
        COALESCE((
            SELECT MAX($inbox.seq) FROM $inbox
            WHERE $inbox.run = run.id AND $inbox.consumed = 0
                AND $inbox.created_epoch = run.created_epoch
        ), 0),
        $summary
    FROM $runs AS run WHERE run.id IN ([?], ...)
"""

# How many of the examined runs of a workflow have a status.
COUNT_GROUP = """
    SELECT $number AS place, COUNT(*) AS examined, COUNT(CASE WHEN %s THEN 1 END) AS number
    FROM (SELECT run.id FROM $runs AS run WHERE %s ORDER BY run.updated_at LIMIT ?) AS run
"""

NOW = "SELECT $now"
COUNT_BY_STATUS = "SELECT run.status, COUNT(*) FROM $runs AS run WHERE %s GROUP BY run.status"
COUNT_BY_QUEUE = """
    SELECT $queue_name, COUNT(CASE WHEN run.wake_at <= $now THEN 1 END),
        COUNT(CASE WHEN run.wake_at > $now THEN 1 END),
        MIN(CASE WHEN run.wake_at <= $now THEN run.wake_at END)
    FROM $runs AS run
    WHERE run.wake_at IS NOT NULL AND (run.wake_at <= $now OR run.owner IS NOT NULL)
        AND (run.queue < '~' OR run.queue >= ?) AND %s
    GROUP BY 1
"""
