"""Search, summarize and count runs by their headers, without reading snapshots."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, RunSummary
from perdure.stores._prefix import end_of_prefix
from perdure.stores._searching import MAX_EXAMINED, Position, SearchResult
from perdure.stores.mysql.database import Database
from perdure.stores.mysql.literals import Statement, read_datetime
from perdure.stores.mysql.rows import read_names
from perdure.stores.mysql.statements import Conditions, Statements
from perdure.stores.mysql.walks import HEADER, IN_GROUP, Group, Walk, add_listed

# Up to this many runs are read by id and sorted, rather than found by walking an index.
_SELECTIVE = 1_000
# How many runs each attempt to fill a page examines; 0 stands for the size of the page. Most pages
# are full long before the maximum is reached.
_ATTEMPTS = (0, 2_000, MAX_EXAMINED)
# With more groups, a walk along all runs is cheaper than one along each group.
_MAX_GROUPS = 200

COUNT_IDS = """
    SELECT COUNT(*) FROM (
        SELECT id FROM {runs} FORCE INDEX (PRIMARY) WHERE id >= %s AND id < %s LIMIT %s
    ) AS few
"""
# A loose index scan: one seek per group, however many runs it has.
GROUPS = """
    SELECT workflow, status FROM {runs} FORCE INDEX (by_workflow) WHERE %s GROUP BY workflow, status
"""
_OF_WORKFLOWS = "workflow IN (%s)"
COUNT_GROUP = """
    (SELECT COUNT(*), COALESCE(SUM(matches), 0) FROM (
        SELECT %s AS matches FROM {runs} AS run FORCE INDEX (by_workflow) WHERE %s LIMIT %s
    ) AS walked)
"""
# A revision is the epoch, its last entry, the number of messages, and whether the run has an owner.
SUMMARIES = """
    SELECT run.id, %s, CONCAT_WS('.', run.epoch, COALESCE((
        SELECT entry.n FROM {journal} AS entry
        WHERE entry.run = run.id AND entry.epoch = run.epoch ORDER BY entry.n DESC LIMIT 1
    ), run.folded), run.messages, run.owner IS NOT NULL)
    FROM {runs} AS run FORCE INDEX (PRIMARY) WHERE run.id IN (%s)
"""


class Searches:
    """Reads the headers of the runs whose stored ids begin with `prefix`."""

    def __init__(self, database: Database, statements: Statements, prefix: str) -> None:
        self._database = database
        self._statements = statements
        self._prefix = prefix

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Walk along the index that suits the query."""
        walk = Walk(self._statements, query, self._prefix, after)
        low, high = self._prefix + query.prefix, end_of_prefix(self._prefix + query.prefix)
        if not query.tags and high is not None and await self._is_selective(low, high):
            return await self._find(walk.by_id(low, high, limit))
        groups: Sequence[Group] = ()
        if not query.tags and (query.workflows or query.statuses):
            groups = await self.groups(query.workflows, query.statuses)
            if not groups:
                return SearchResult(())
        result = SearchResult(())
        for depth in _ATTEMPTS:
            result = await self._find(_along(walk, query, groups, limit, depth))
            if result.stopped_at is None:
                break
        return result

    async def summaries(self, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return the summaries of runs with their revisions, in order."""
        keys = [self._prefix + id for id in ids]
        result = await self._database.run_alone(self._statements.bind(SUMMARIES, HEADER, [*keys]))
        summaries = {key: self._summary(key, *columns) for key, *columns in result.rows}
        return [summaries.get(key) for key in keys]

    async def counts(self, query: Query, cap: int) -> list[Count]:
        """Count the runs of each group, up to `cap`, along an index."""
        groups = await self.groups(query.workflows, query.statuses)
        counts: list[Count] = []
        for start in range(0, len(groups), _MAX_GROUPS):
            counts += await self._counts(groups[start : start + _MAX_GROUPS], cap)
        return counts

    async def groups(self, workflows: Sequence[str], statuses: Sequence[RunStatus]) -> list[Group]:
        """Return the groups that have runs of these workflows and statuses; empty means all."""
        conditions = Conditions()
        if workflows:
            conditions.add(_OF_WORKFLOWS, [*workflows])
        statement = self._statements.bind(GROUPS, self._statements.all(conditions))
        groups = (Group(*row) for row in (await self._database.run_alone(statement)).rows)
        return [group for group in groups if not statuses or group.status in statuses]

    async def _counts(self, groups: Sequence[Group], cap: int) -> list[Count]:
        shown_runs = Conditions()
        add_listed(shown_runs, self._prefix)
        depth = max(MAX_EXAMINED // len(groups), cap) + 1
        matches = self._statements.all(shown_runs)
        rows = [(matches, self._statements.bind(IN_GROUP, *group), depth) for group in groups]
        result = await self._database.run_alone(self._statements.union(COUNT_GROUP, rows))
        return [
            Count(*group, min(int(count), cap), capped=count > cap or number == depth)
            for group, (number, count) in zip(groups, result.rows, strict=True)
            if count
        ]

    async def _is_selective(self, low: str, high: str) -> bool:
        statement = self._statements.bind(COUNT_IDS, low, high, _SELECTIVE + 1)
        [(count,)] = (await self._database.run_alone(statement)).rows
        return bool(count <= _SELECTIVE)

    async def _find(self, statement: Statement) -> SearchResult:
        runs: list[RunSummary] = []
        for time, key, is_last, *columns in (await self._database.run_alone(statement)).rows:
            # Beyond the last place of any one group, the results are incomplete.
            if is_last:
                return SearchResult(runs, Position(read_datetime(time), self._id(key)))
            runs.append(self._summary(key, *columns))
        return SearchResult(runs)

    def _summary(self, key: str, *columns: Any) -> RunSummary:
        """Return the summary of a run from the columns of `HEADER` and an optional revision."""
        updated_at, status, workflow, owner, version, queue, tags, summary, *others = columns
        created_at, wake_at, awaits, takeovers, *revision = others
        return RunSummary(
            self._id(key),
            read_datetime(updated_at),
            status,
            workflow,
            "",
            owner,
            version,
            queue,
            read_names(tags),
            summary or b"",
            _time(created_at),
            _time(wake_at),
            read_names(awaits),
            takeovers,
            *revision,
        )

    def _id(self, key: str) -> str:
        return key.removeprefix(self._prefix)


def _time(naive: datetime | None) -> datetime | None:
    return None if naive is None else read_datetime(naive)


def _along(walk: Walk, query: Query, groups: Sequence[Group], limit: int, depth: int) -> Statement:
    """Return the statement of a search along an index that examines up to `depth` runs."""
    walks = len(groups) if 0 < len(groups) <= _MAX_GROUPS else 1
    depth = min(max(depth // walks, 2 * limit), MAX_EXAMINED // walks)
    if query.tags:
        return walk.by_tag(limit, depth)
    if walks == len(groups):
        return walk.by_group(groups, limit, depth)
    return walk.by_update(limit, depth)
