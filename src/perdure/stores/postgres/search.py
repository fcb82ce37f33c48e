"""Search, summarize and count runs by their headers, without reading snapshots."""

from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

from perdure import codec
from perdure.snapshot import RunStatus
from perdure.store import Count, Query, RunSummary
from perdure.stores._prefix import end_of_prefix
from perdure.stores._searching import MAX_EXAMINED, Position, SearchResult
from perdure.stores.postgres.append import Fetch
from perdure.stores.postgres.statements import Statements, compose
from perdure.stores.postgres.walks import HEADER, HEADER_COLUMNS, Group, Walk

# Up to this many runs are read by id and sorted, rather than found by walking an index.
_SELECTIVE = 1_000

_STATUSES: Sequence[RunStatus] = get_args(RunStatus)

COUNT_IDS = """
    SELECT count(*) FROM (
        SELECT FROM {runs} AS run WHERE run.id >= $1 AND run.id < $2 LIMIT $3
    ) AS run
"""

# A loose index scan: one lookup per workflow. The last row is NULL, for runs without a workflow.
WORKFLOWS = """
    WITH RECURSIVE known (workflow) AS (
        SELECT ''::text
        UNION ALL
        SELECT (
            SELECT {workflow} FROM {runs} AS run
            WHERE {workflow} > known.workflow
            ORDER BY {workflow}
            LIMIT 1
        )
        FROM known WHERE known.workflow IS NOT NULL
    )
    SELECT workflow FROM known WHERE workflow IS DISTINCT FROM ''
"""

# A revision is the epoch, its last entry, the number of messages, and whether the run has an owner.
SUMMARIES = compose(
    """
    SELECT run.id, {header}, format(
        '%s.%s.%s.%s', run.epoch, coalesce((
            SELECT entry.n FROM {journal} AS entry
            WHERE entry.run = run.id AND entry.epoch = run.epoch
            ORDER BY entry.n DESC
            LIMIT 1
        ), run.folded_n), run.messages, (run.owner IS NOT NULL)::integer
    ) AS revision
    FROM {runs} AS run WHERE run.id = ANY ($1::text[])
    """,
    header=HEADER,
)


class Searches:
    """Reads the headers of the runs whose stored ids begin with `prefix`."""

    def __init__(self, fetch: Fetch, statements: Statements, prefix: str) -> None:
        self._fetch = fetch
        self._statements = statements
        self._prefix = prefix

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Walk along the index that suits the query."""
        low, high = self._prefix + query.prefix, end_of_prefix(self._prefix + query.prefix)
        walk = Walk(query, self._prefix, MAX_EXAMINED, after)
        if query.tags:
            statement = walk.by_tag(query.tags[0], limit)
        elif high is not None and await self._is_selective(low, high):
            statement = walk.by_id(low, high, limit)
        elif query.statuses or query.workflows:
            groups = await self.groups(query.workflows, query.statuses)
            walk = Walk(query, self._prefix, _depth(groups), after)
            statement = walk.by_group(groups, limit)
        else:
            statement = walk.by_update(limit)
        return self._result(await self._fetch_walk(walk, statement), limit)

    async def summaries(self, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return the summaries of runs with their revisions, in order."""
        keys = [self._prefix + id for id in ids]
        rows = await self._fetch(self._statements.sql(SUMMARIES), keys)
        summaries = {row["id"]: self._summary(row, row["revision"]) for row in rows}
        return [summaries.get(key) for key in keys]

    async def counts(self, query: Query, cap: int) -> list[Count]:
        """Count the runs of each group, up to `cap`, along an index."""
        groups = await self.groups(query.workflows, query.statuses)
        walk = Walk(query, self._prefix, max(_depth(groups), cap + 1))
        rows = await self._fetch_walk(walk, walk.counts(groups))
        return [
            Count(workflow, status, min(count, cap), capped=count > cap or is_partial)
            for workflow, status, count, is_partial in rows
            if count
        ]

    async def groups(self, workflows: Sequence[str], statuses: Sequence[RunStatus]) -> list[Group]:
        """Return the groups of these workflows and statuses; empty means all."""
        names: Sequence[str | None] = workflows
        if not workflows:
            names = [name for (name,) in await self._fetch(self._statements.sql(WORKFLOWS))]
        return [Group(*group) for group in product(names, statuses or _STATUSES)]

    async def _is_selective(self, low: str, high: str) -> bool:
        # With another collation, the ids with a prefix are not a range.
        if self._statements.id_collation != "C":
            return False
        values = (low, high, _SELECTIVE + 1)
        [(count,)] = await self._fetch(self._statements.sql(COUNT_IDS), *values)
        return bool(count <= _SELECTIVE)

    async def _fetch_walk(self, walk: Walk, statement: str) -> Sequence[Any]:
        return await self._fetch(self._statements.sql(statement), *walk.values)

    def _result(self, rows: Sequence[Any], limit: int) -> SearchResult:
        runs: list[RunSummary] = []
        for row in rows:
            if row["matches"]:
                runs.append(self._summary(row))
            # Beyond the last place of any one group, the results are incomplete.
            if row["is_last"] and len(runs) < limit:
                return SearchResult(runs, Position(row["time"], self._id(row["id"])))
        return SearchResult(runs)

    def _summary(self, row: Any, revision: str = "") -> RunSummary:
        columns = {name: row[name] for name in HEADER_COLUMNS}
        columns |= {name: _names(row[name]) for name in ("tags", "awaits")}
        return RunSummary(id=self._id(row["id"]), revision=revision, **columns)

    def _id(self, key: str) -> str:
        return key.removeprefix(self._prefix)


def _depth(groups: Sequence[Group]) -> int:
    """Return how many runs of each group to examine, so that the total stays bounded."""
    return max(1, MAX_EXAMINED // len(groups))


def _names(array: str) -> tuple[str, ...]:
    names: Any = codec.loads(array.encode()) if array != "[]" else ()
    return tuple(names)
