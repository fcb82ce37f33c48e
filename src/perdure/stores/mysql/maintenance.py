"""Prune old runs, and count runs."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from perdure.store import QueueStats, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores.mysql.database import Database, Transaction
from perdure.stores.mysql.literals import Statement, read_datetime
from perdure.stores.mysql.search import Searches
from perdure.stores.mysql.statements import Conditions, Statements
from perdure.stores.mysql.tags import tag_digest
from perdure.stores.mysql.walks import IN_GROUP, WITH_OTHER_TAG, WITH_TAG, add_listed

_MICROSECOND = timedelta(microseconds=1)
_GROUPS_PER_STATEMENT = 100

OLD_IN_GROUP = """
    (SELECT run.id FROM {runs} AS run FORCE INDEX (by_workflow)
    WHERE %s AND %s ORDER BY run.updated_at LIMIT %s)
"""
OLD_BY_TAG = """
    SELECT STRAIGHT_JOIN run.id FROM {tags} AS tagged FORCE INDEX (by_tag)
    JOIN {runs} AS run ON run.id = tagged.run AND run.created_at = tagged.created_at
    WHERE %s ORDER BY tagged.created_at LIMIT %s
"""
LOCK_OLD = """
    SELECT run.id FROM {runs} AS run FORCE INDEX (PRIMARY)
    WHERE run.id IN (%s) AND %s FOR UPDATE {skip_locked}
"""
_IS_OLD = "run.updated_at < UTC_TIMESTAMP(6) - INTERVAL %s MICROSECOND"
_IS_OVER = "run.status IN (%s)"
_OF_WORKFLOW = "run.workflow = %s"

COUNT_BY_STATUS = """
    SELECT run.status, COUNT(*) FROM {runs} AS run FORCE INDEX (by_workflow)
    WHERE %s GROUP BY run.status
"""
COUNT_DUE = """
    SELECT SUBSTRING_INDEX(run.queue, '/', 1) AS name, COUNT(*), MIN(run.wake_at)
    FROM {runs} AS run FORCE INDEX (by_due)
    WHERE run.scheduled = 1 AND run.wake_at <= UTC_TIMESTAMP(6) AND %s GROUP BY name
"""
# Every owned run has the status running, so the index finds owned runs without reading others.
COUNT_LEASED = """
    SELECT SUBSTRING_INDEX(run.queue, '/', 1) AS name, COUNT(*)
    FROM {runs} AS run FORCE INDEX (by_workflow)
    WHERE run.status = 'running' AND run.owner IS NOT NULL AND run.wake_at > UTC_TIMESTAMP(6)
        AND %s GROUP BY name
"""
_IN_USERS_QUEUE = "LEFT(run.queue, 1) <> '~'"


class Maintenance:
    """Prunes and counts the runs whose stored ids begin with `prefix`.

    `delete` returns the statements that delete runs, by their stored ids.
    """

    def __init__(
        self,
        database: Database,
        statements: Statements,
        searches: Searches,
        prefix: str,
        delete: Callable[[Sequence[str]], Sequence[Statement]],
    ) -> None:
        self._database = database
        self._statements = statements
        self._searches = searches
        self._prefix = prefix
        self._delete = delete

    async def prune(self, request: PruneRequest) -> int:
        """Delete old runs, skipping those that are locked if the server can; return how many."""
        old = Conditions()
        old.add(_IS_OVER, [*request.statuses])
        old.add(_IS_OLD, request.older_than // _MICROSECOND)
        add_listed(old, self._prefix)
        find = self._find_by_tag if request.tags else self._find_by_group
        keys = await find(request, old)
        if request.dry_run or not keys:
            return len(keys)
        # A run that was found may be locked, or in use again, so it is checked again once locked.
        lock = self._statements.bind(LOCK_OLD, [*keys], self._statements.all(old))

        async def work(transaction: Transaction) -> int:
            [result] = await transaction.run(lock)
            if result.rows:
                await transaction.finish(*self._delete([key for (key,) in result.rows]))
            return len(result.rows)

        return await self._database.transact(work)

    async def stats(self) -> Stats:
        """Count the runs by status and queue."""
        shown_runs, shown_in_queues = Conditions(), Conditions()
        add_listed(shown_runs, self._prefix)
        add_listed(shown_in_queues, self._prefix)
        shown_in_queues.add(_IN_USERS_QUEUE)
        statuses, due, leased = await self._database.run(
            self._statements.bind(COUNT_BY_STATUS, self._statements.all(shown_runs)),
            self._statements.bind(COUNT_DUE, self._statements.all(shown_in_queues)),
            self._statements.bind(COUNT_LEASED, self._statements.all(shown_in_queues)),
        )
        leased_counts = dict(leased.rows)
        queues = {name: QueueStats(leased=number) for name, number in leased.rows}
        for name, number, oldest in due.rows:
            queues[name] = QueueStats(number, leased_counts.get(name, 0), read_datetime(oldest))
        times = [queue.oldest_due for queue in queues.values() if queue.oldest_due is not None]
        return Stats(dict(statuses.rows), min(times, default=None), queues)

    async def _find_by_tag(self, request: PruneRequest, old: Conditions) -> list[str]:
        first, *others = request.tags
        conditions = old.copy()
        conditions.add(WITH_TAG, tag_digest(first))
        for tag in others:
            conditions.add(WITH_OTHER_TAG, tag_digest(tag))
        if request.workflow is not None:
            conditions.add(_OF_WORKFLOW, request.workflow)
        condition = self._statements.all(conditions)
        statement = self._statements.bind(OLD_BY_TAG, condition, request.limit)
        return [key for (key,) in (await self._database.run_alone(statement)).rows]

    async def _find_by_group(self, request: PruneRequest, old: Conditions) -> list[str]:
        workflows = () if request.workflow is None else (request.workflow,)
        groups = await self._searches.groups(workflows, request.statuses)
        is_old = self._statements.all(old)
        keys: list[str] = []
        for start in range(0, len(groups), _GROUPS_PER_STATEMENT):
            remaining = request.limit - len(keys)
            rows = [
                (self._statements.bind(IN_GROUP, *group), is_old, remaining)
                for group in groups[start : start + _GROUPS_PER_STATEMENT]
            ]
            statement = self._statements.union(OLD_IN_GROUP, rows)
            keys += [key for (key,) in (await self._database.run_alone(statement)).rows[:remaining]]
            if len(keys) == request.limit:
                break
        return keys
