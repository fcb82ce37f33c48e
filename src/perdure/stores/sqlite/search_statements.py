"""The statements that find, count and prune runs by their headers.

`NEWEST_FIRST` and `OLDEST_FIRST` examine up to `:part` runs in order. The first row of the result
has their number and the last one of them; the other rows are the runs that match.

A subquery with `LIMIT -1` is not merged with the query around it. After ANALYZE, SQLite would build
a Bloom filter for a join with conditions on the joined run, and read all runs to do so.
"""

from collections.abc import Mapping

# Parts of statements, by name. A store's runs are a range of ids, and the engine's own runs a range
# inside it; an end may be a blob, which sorts after all text. A plus keeps SQLite from choosing the
# index on ids.
FRAGMENTS: Mapping[str, str] = {
    "in_prefix": "r.id >= :prefix AND r.id < :prefix_end",
    "is_shown": """
        +r.id >= :prefix AND +r.id < :prefix_end AND (+r.id < :system OR +r.id >= :system_end)
    """,
    "has_tags": """(
        :tags IS NULL OR NOT EXISTS (
            SELECT 1 FROM json_each(:tags) AS t
            WHERE t.value NOT IN (SELECT value FROM json_each(r.tags))
        )
    )""",
    "summary": """
        r.id, r.listed_at, r.status, r.workflow, r.owner, r.version, r.queue, r.tags, r.summary,
        r.created_at, r.wake_at, r.awaits, r.takeovers
    """,
    # One seek per workflow, and a last one that finds none: its NULL stands for runs without a
    # workflow.
    "all_workflows": """
        all_workflows (name) AS (
            SELECT ''
            UNION ALL
            SELECT (
                SELECT workflow FROM $runs
                WHERE workflow > all_workflows.name ORDER BY workflow LIMIT 1
            )
            FROM all_workflows WHERE name IS NOT NULL
        )
    """,
    "workflows": """
        $all_workflows, workflows (name) AS (
            SELECT value FROM json_each(:workflows)
            UNION ALL
            SELECT name FROM all_workflows WHERE :workflows IS NULL AND name IS NOT ''
        )
    """,
    "cutoff": "(SELECT $stamp AS time FROM (SELECT $now - :older_than AS now) AS t) AS cutoff",
    "pruned_by_status": """
        WITH RECURSIVE $workflows
        SELECT r.id FROM (
            SELECT r.id, r.tags
            FROM $cutoff CROSS JOIN workflows AS w CROSS JOIN json_each(:statuses) AS s
            CROSS JOIN $runs AS r
            WHERE r.workflow IS w.name AND r.status = s.value AND r.listed_at < cutoff.time
            LIMIT -1
        ) AS r
        WHERE $is_shown AND $has_tags
        LIMIT :limit
    """,
    "pruned_by_tag": """
        SELECT r.id FROM (
            SELECT r.id, r.tags, r.status, r.workflow
            FROM $cutoff CROSS JOIN $tags AS t CROSS JOIN $runs AS r
            WHERE t.tag = :tag AND r.id = t.run AND r.listed_at < cutoff.time
            LIMIT -1
        ) AS r
        WHERE $is_shown AND $has_tags
            AND r.status IN (SELECT value FROM json_each(:statuses))
            AND (:workflows IS NULL OR r.workflow IN (SELECT value FROM json_each(:workflows)))
        LIMIT :limit
    """,
    "queue_name": "substr(r.queue, 1, instr(r.queue || '/', '/') - 1)",
}

_SEARCH = """
    WITH walk AS MATERIALIZED ($arms ORDER BY time $order, id $order LIMIT :part)
    SELECT * FROM (
        SELECT (SELECT count(*) FROM walk), time, id,
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
        FROM walk
        ORDER BY time $reverse, id $reverse
        LIMIT 1
    )
    UNION ALL
    SELECT * FROM (
        SELECT NULL, NULL, $summary FROM (
            SELECT walk.time, $summary FROM walk CROSS JOIN $runs AS r
            WHERE r.id = walk.id
                AND walk.id >= :prefix AND walk.id < :prefix_end
                AND (walk.id < :system OR walk.id >= :system_end)
            LIMIT -1
        ) AS r
        WHERE (:statuses IS NULL OR r.status IN (SELECT value FROM json_each(:statuses)))
            AND (:workflows IS NULL OR r.workflow IN (SELECT value FROM json_each(:workflows)))
            AND (:queue IS NULL OR r.queue = :queue)
            AND $has_tags
            AND (:since IS NULL OR r.listed_at >= :since)
            AND (:until IS NULL OR r.listed_at < :until)
        ORDER BY r.time $order, r.id $order
        LIMIT :limit
    )
"""
NEWEST_FIRST = _SEARCH.replace("$order", "DESC").replace("$reverse", "ASC")
OLDEST_FIRST = _SEARCH.replace("$order", "ASC").replace("$reverse", "DESC")

BY_UPDATE = """
    SELECT listed_at AS time, id FROM $runs
    WHERE (listed_at, id) > (:low, :low_id) AND (listed_at, id) < (:high, :high_id)
"""

BY_STATUS = """
    SELECT listed_at AS time, id FROM $runs
    WHERE workflow IS :workflow$n AND status = :status$n
        AND (listed_at, id) > (:low, :low_id) AND (listed_at, id) < (:high, :high_id)
"""

BY_TAG = """
    SELECT created_at AS time, run AS id FROM $tags
    WHERE tag = :tag
        AND (created_at, run) > (:low, :low_id) AND (created_at, run) < (:high, :high_id)
"""

# Returns nothing if there are :part or more. Pluses keep SQLite from choosing an index by time.
_BY_PREFIX = """
    SELECT r.$time AS time, r.id AS id
    FROM (
        SELECT count(*) AS number FROM (SELECT 1 FROM $runs AS r WHERE $in_prefix LIMIT :part)
    ) AS few
    CROSS JOIN $runs AS r
    WHERE few.number < :part AND $in_prefix
        AND (+r.$time, +r.id) > (:low, :low_id) AND (+r.$time, +r.id) < (:high, :high_id)
"""
BY_PREFIX_AND_UPDATE = _BY_PREFIX.replace("$time", "listed_at")
BY_PREFIX_AND_CREATION = _BY_PREFIX.replace("$time", "created_at")

COUNT_PREFIX = "SELECT count(*) FROM (SELECT 1 FROM $runs AS r WHERE $in_prefix LIMIT :part)"

SUMMARIES = """
    SELECT $summary, r.epoch,
        coalesce(
            (SELECT max(n) FROM $journal AS j WHERE j.run = r.id AND j.epoch = r.epoch), r.folded
        ),
        coalesce((SELECT max(seq) FROM $inbox WHERE run = r.id AND taken = 0), 0)
    FROM $runs AS r WHERE r.id IN (SELECT value FROM json_each(:ids))
"""

WORKFLOWS = """
    WITH RECURSIVE $all_workflows SELECT name FROM all_workflows WHERE name IS NOT '' LIMIT :limit
"""

# Hidden runs are examined too, so :part limits how many runs are read. Most stores have no prefix,
# and comparing every id with one would double the time.
COUNTS_OF_PREFIX = """
    WITH RECURSIVE $workflows, groups (workflow, status, number) AS MATERIALIZED (
        SELECT w.name, s.value, (
            SELECT count(*) FROM (
                SELECT 1 FROM (
                    SELECT id FROM $runs WHERE workflow IS w.name AND status = s.value LIMIT :part
                ) AS r
                WHERE $is_shown
                LIMIT :cap + 1
            )
        )
        FROM workflows AS w CROSS JOIN json_each(:statuses) AS s
    )
    SELECT workflow, status, min(number, :cap), CASE
        WHEN number > :cap THEN true
        ELSE EXISTS (
            SELECT 1 FROM $runs AS r WHERE r.workflow IS g.workflow AND r.status = g.status
            LIMIT 1 OFFSET :part
        )
    END
    FROM groups AS g
"""

COUNTS = COUNTS_OF_PREFIX.replace("$is_shown", "r.id < :system OR r.id >= :system_end")

PRUNE_BY_STATUS = "DELETE FROM $runs WHERE id IN ($pruned_by_status)"
PRUNE_BY_TAG = "DELETE FROM $runs WHERE id IN ($pruned_by_tag)"
COUNT_BY_STATUS = "SELECT count(*) FROM ($pruned_by_status)"
COUNT_BY_TAG = "SELECT count(*) FROM ($pruned_by_tag)"

# In the order of the index: by status alone, SQLite would sort all runs.
STATUSES = "SELECT status, count(*) FROM $runs AS r WHERE $is_shown GROUP BY workflow, status"

# A run whose lease has expired is due.
DUE_QUEUES = """
    SELECT $queue_name, count(*), min(r.wake_at) FROM $runs AS r
    WHERE r.wake_at <= $now AND $is_shown AND substr(r.queue, 1, 1) <> '~'
    GROUP BY 1
"""

# An owned run has the status running, and there are far fewer of these than runs with a wake time.
# With json_each, because a comparison of the joined run with a constant may have a Bloom filter.
LEASED_QUEUES = """
    WITH RECURSIVE $all_workflows
    SELECT $queue_name, count(*) FROM (
        SELECT r.id, r.queue, r.owner, r.wake_at
        FROM all_workflows AS w CROSS JOIN json_each('["running"]') AS s CROSS JOIN $runs AS r
        WHERE r.workflow IS w.name AND r.status = s.value
        LIMIT -1
    ) AS r
    WHERE r.owner IS NOT NULL AND r.wake_at > $now
        AND $is_shown AND substr(r.queue, 1, 1) <> '~'
    GROUP BY 1
"""
