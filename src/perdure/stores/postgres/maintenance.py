"""Prune old runs, and count runs."""

from collections.abc import Sequence

from perdure.store import QueueStats, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores.postgres.append import Fetch
from perdure.stores.postgres.search import Searches
from perdure.stores.postgres.statements import Statements, compose
from perdure.stores.postgres.walks import NAMED, UNNAMED

# $1 is the store's prefix, and $2 the prefix of the engine's own runs.
_IS_LISTED = "starts_with(run.id, $1) AND NOT starts_with(run.id, $2)"

# Rows that awaitly wrote have no status, and are never pruned.
_OLD = compose(
    """
    run.status = ANY ($3::text[]) AND run.updated_at < statement_timestamp() - $4::interval
        AND {listed}
    """,
    listed=_IS_LISTED,
)


_OLD_IN_GROUP = compose(
    """
    SELECT run.id FROM {runs} AS run WHERE {group} AND {old} ORDER BY run.updated_at LIMIT $5
    """,
    old=_OLD,
)

OLD_BY_GROUP = compose(
    """
    SELECT old.id
    FROM unnest((SELECT $6::text[]), (SELECT $7::text[])) AS searched (workflow, status)
    CROSS JOIN LATERAL (({old_named}) UNION ALL ({old_unnamed})) AS old
    LIMIT $5
    """,
    old_named=compose(_OLD_IN_GROUP, group=NAMED),
    old_unnamed=compose(_OLD_IN_GROUP, group=UNNAMED),
)

OLD_BY_TAG = compose(
    """
    SELECT run.id FROM {tags} AS tagged
    CROSS JOIN LATERAL (
        SELECT run.id FROM {runs} AS run
        WHERE run.id = tagged.run COLLATE {id_collation} AND run.tags ?& $6::text[]
            AND ($7::text IS NULL OR run.workflow = $7) AND {old}
        LIMIT 1
    ) AS run
    WHERE tagged.tag = sha256(convert_to(($6::text[])[1], 'UTF8'))
    ORDER BY tagged.created_at
    LIMIT $5
    """,
    old=_OLD,
)

# A run that was found may be locked, or in use again, so it is checked again once locked.
PRUNE = compose(
    """
    WITH old AS MATERIALIZED (
        SELECT run.id FROM ({found}) AS found
        CROSS JOIN LATERAL (
            SELECT run.id FROM {runs} AS run WHERE run.id = found.id AND {old}
            FOR UPDATE SKIP LOCKED
        ) AS run
    ), deleted_entries AS (
        DELETE FROM {journal} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), deleted_messages AS (
        DELETE FROM {inbox} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), deleted_tags AS (
        DELETE FROM {tags} WHERE run = ANY (ARRAY(SELECT id FROM old))
    ), pruned AS (
        DELETE FROM {runs} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
    )
    SELECT count(*) FROM pruned
    """,
    old=_OLD,
)

COUNT_OLD = "SELECT count(*) FROM ({found}) AS found"

COUNT_BY_STATUS = compose(
    """
    SELECT coalesce({status}, 'running'), count(*) FROM {runs} AS run
    WHERE {listed} GROUP BY 1
    """,
    listed=_IS_LISTED,
)

# The wake time of a run that has an owner is when the owner's lease expires.
COUNT_BY_QUEUE = compose(
    """
    SELECT * FROM (
        SELECT split_part(run.queue, '/', 1) AS name,
            count(*) FILTER (WHERE run.wake_at <= statement_timestamp()) AS due,
            count(run.owner) FILTER (WHERE run.wake_at > statement_timestamp()) AS leased,
            min(run.wake_at) FILTER (WHERE run.wake_at <= statement_timestamp())
        FROM {runs} AS run
        WHERE run.wake_at IS NOT NULL AND NOT starts_with(run.queue, '~') AND {listed}
        GROUP BY 1
    ) AS queue
    WHERE due > 0 OR leased > 0
    """,
    listed=_IS_LISTED,
)


class Maintenance:
    """Prunes and counts the runs whose stored ids begin with `prefix`."""

    def __init__(
        self, fetch: Fetch, statements: Statements, searches: Searches, prefix: str
    ) -> None:
        self._fetch = fetch
        self._statements = statements
        self._searches = searches
        self._prefixes = prefix, prefix + "~"

    async def prune(self, request: PruneRequest) -> int:
        """Delete old runs, skipping those that are locked; return how many."""
        old, values = await self._old(request)
        template = compose(COUNT_OLD if request.dry_run else PRUNE, found=old)
        conditions = (list(request.statuses), request.older_than, request.limit)
        statement = self._statements.sql(template)
        [(count,)] = await self._fetch(statement, *self._prefixes, *conditions, *values)
        return int(count)

    async def stats(self) -> Stats:
        """Count the runs by status and queue."""
        by_status = self._statements.sql(COUNT_BY_STATUS)
        statuses = dict(await self._fetch(by_status, *self._prefixes))
        rows = await self._fetch(self._statements.sql(COUNT_BY_QUEUE), *self._prefixes)
        queues = {name: QueueStats(*numbers) for name, *numbers in rows}
        oldest = [queue.oldest_due for queue in queues.values() if queue.oldest_due is not None]
        return Stats(statuses, min(oldest, default=None), queues)

    async def _old(self, request: PruneRequest) -> tuple[str, Sequence[object]]:
        if request.tags:
            return OLD_BY_TAG, (list(request.tags), request.workflow)
        workflows = () if request.workflow is None else (request.workflow,)
        groups = await self._searches.groups(workflows, request.statuses)
        return OLD_BY_GROUP, [list(column) for column in zip(*groups, strict=True)]
