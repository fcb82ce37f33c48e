"""Find runs by their headers, along an index and with bounded effort.

A search reads a page of an index and filters it here. If that is not enough, it asks for the
position of a run further on, and lets the server filter the runs up to it: first a few, then as
many as a search may examine. Changes in between do not make it skip a run, because a position is a
time and an id, not an offset.

Runs that awaitly wrote have no workflow and status fields: both are in their snapshots. They are in
a separate range.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import get_args

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, RunSummary
from perdure.stores._searching import (
    MAX_EXAMINED,
    Position,
    SearchResult,
    count,
    find,
    matches,
    shows_system_runs,
)
from perdure.stores.mongo.schedule import MAX_RANGES
from perdure.stores.mongo.schema import (
    STATUS_INDEX,
    TAG_INDEX,
    UPDATE_INDEX,
    Collections,
    aggregate_all,
)
from perdure.stores.mongo.summary import (
    FIELDS,
    REVISION_FIELDS,
    last_slots,
    revision_of,
    summary_of,
)
from perdure.stores.mongo.updates import (
    Document,
    Pipeline,
    has_prefix,
    has_snapshot_status,
    is_not_system,
)
from perdure.stores.mongo.walk import Walk, all_of, updated_between

STATUSES: Sequence[RunStatus] = get_args(RunStatus)
HEADLESS = {"workflow": None, "status": None}

# Up to this many runs with a prefix are all read, and sorted here.
_FEW = 1_000


class Searcher:
    """Finds runs whose `_id` starts with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    async def search(
        self, db: Collections, query: Query, limit: int, after: Position | None
    ) -> SearchResult:
        """Return up to `limit` runs that match, in order."""
        few = await self._few(db, query)
        if few is not None:
            return find(few, query, limit, after)
        walk = await self._walk(db, query)
        size = min(MAX_EXAMINED, limit + 10 if _is_plain(query) else 4 * limit)
        page = await walk.page(after, None, size)
        runs = [*islice((run for run in page if matches(query, run)), limit)]
        if len(runs) == limit or len(page) < size:
            return SearchResult(runs)
        return await _search_on(walk, runs, limit, walk.position_of(page[-1]), size)

    async def summaries(self, db: Collections, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return runs by id, with their revisions."""
        keys = [self._prefix + id for id in ids]
        fields = {**FIELDS, **REVISION_FIELDS}
        cursor = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
        runs = {run["_id"]: run async for run in cursor}
        slots = await last_slots(db, [run for run in runs.values() if run.get("owner")])
        summaries = {
            key: summary_of(run, self._prefix, revision_of(run, slots.get(key, "")))
            for key, run in runs.items()
        }
        return [summaries.get(key) for key in keys]

    async def counts(self, db: Collections, query: Query, cap: int) -> list[Count]:
        """Count runs by workflow and status, up to `cap` each."""
        workflows = query.workflows or await stored_workflows(db)
        statuses = query.statuses or STATUSES
        groups: list[tuple[str | None, RunStatus]] = [
            (workflow, status) for workflow in workflows for status in statuses
        ]
        mine = all_of(has_prefix(self._prefix), is_not_system(self._prefix))
        groups_counts = await aggregate_all(db.runs, _counting(groups, mine, cap))
        numbers = {groups[each["_id"]]: each["count"] for each in groups_counts}
        counts = [
            Count(workflow, status, min(number, cap), capped=number > cap)
            for (workflow, status), number in numbers.items()
        ]
        cursor = db.runs.find({**HEADLESS, **mine}, FIELDS, hint=STATUS_INDEX).limit(MAX_EXAMINED)
        headless = [summary_of(run, self._prefix) async for run in cursor]
        return _add_counts(counts, count(headless, query, cap), cap)

    async def _few(self, db: Collections, query: Query) -> list[RunSummary] | None:
        """Return all runs with the prefix if there are only a few."""
        mine = has_prefix(self._prefix + query.prefix)
        if not mine or await db.runs.count_documents(mine, limit=_FEW + 1, hint="_id_") > _FEW:
            return None
        return [summary_of(run, self._prefix) async for run in db.runs.find(mine, FIELDS)]

    async def _walk(self, db: Collections, query: Query) -> Walk:
        rest = self._filter(query)
        if query.tags:
            by_tag = [({"tags": query.tags[0]}, rest)]
            return Walk(db.runs, self._prefix, query, TAG_INDEX, "createdAt", by_tag)
        if not (query.workflows or query.statuses):
            return Walk(db.runs, self._prefix, query, UPDATE_INDEX, "updatedAt", [({}, rest)])
        workflows = query.workflows or await stored_workflows(db)
        ranges = [(each, rest) for each in _ranges(workflows, query.statuses or STATUSES)]
        ranges.append((HEADLESS, all_of(rest, _headless_filter(query))))
        return Walk(db.runs, self._prefix, query, STATUS_INDEX, "updatedAt", ranges)

    def _filter(self, query: Query) -> Document:
        """Match the conditions that the ranges of the index do not cover."""
        conditions = [has_prefix(self._prefix + query.prefix)]
        if not shows_system_runs(query):
            # Not as two ranges of ids: the server would read the index once for each of them.
            conditions.append({"$nor": [has_prefix(f"{self._prefix}~")]})
        if query.queue is not None:
            conditions.append({"queue": query.queue or {"$in": ["", None]}})
        if query.tags:
            conditions += updated_between(query.since, query.until)
            conditions.append({"tags": {"$all": [*query.tags]}})
            conditions.append({"status": {"$in": [*query.statuses]}} if query.statuses else {})
            conditions.append({"workflow": {"$in": [*query.workflows]}} if query.workflows else {})
        return all_of(*conditions)


async def stored_workflows(db: Collections) -> list[str | None]:
    """Return the names of all workflows that have runs, by one seek in the index for each."""
    distinct: Pipeline = [{"$sort": {"workflow": 1}}, {"$group": {"_id": "$workflow"}}]
    return [group["_id"] async for group in await db.runs.aggregate(distinct, hint=STATUS_INDEX)]


async def _search_on(
    walk: Walk, runs: list[RunSummary], limit: int, last: Position, examined_count: int
) -> SearchResult:
    """Continue a search that has found these runs, until enough are found or examined."""
    for size in _stretches(examined_count, len(walk.ranges)):
        stop = await walk.further(last, size)
        runs += await walk.page(last, stop, limit - len(runs), filtered=True)
        if len(runs) == limit or stop is None:
            return SearchResult(runs)
        last = stop
    return SearchResult(runs, last)


def _stretches(examined_count: int, ranges: int) -> Iterator[int]:
    """Yield how many runs to examine next, first fewer than allowed, as they may suffice."""
    few = min(10 * examined_count, MAX_EXAMINED - examined_count)
    return (size for size in (few, MAX_EXAMINED - examined_count - few) if size >= ranges)


def _is_plain(query: Query) -> bool:
    """Return whether all runs in the ranges match, except for the engine's own."""
    return not query.tags and query.queue is None and not query.prefix


def _ranges(workflows: Sequence[str | None], statuses: Sequence[RunStatus]) -> Iterator[Document]:
    """Yield conditions for which the server can merge the ranges."""
    # A range for each pair; two for runs without a workflow.
    size = MAX_RANGES // (2 * len(statuses))
    for start in range(0, len(workflows), size):
        some = [*workflows[start : start + size]]
        yield {"workflow": {"$in": some}, "status": {"$in": [*statuses]}}


def _headless_filter(query: Query) -> Document:
    status = has_snapshot_status(query.statuses) if query.statuses else {}
    workflow = {"snapshot.workflowName": {"$in": [*query.workflows]}} if query.workflows else {}
    return all_of(status, workflow)


def _counting(
    groups: Sequence[tuple[str | None, RunStatus]], mine: Document, cap: int
) -> list[Pipeline]:
    return [
        [
            {"$match": {"workflow": workflow, "status": status, **mine}},
            {"$limit": cap + 1},
            {"$group": {"_id": position, "count": {"$sum": 1}}},
        ]
        for position, (workflow, status) in enumerate(groups)
    ]


def _add_counts(counts: Sequence[Count], others: Sequence[Count], cap: int) -> list[Count]:
    """Return the sums of two lists of counts, up to `cap`."""
    sums = {(each.workflow, each.status): each for each in counts}
    for other in others:
        key = (other.workflow, other.status)
        one = sums.get(key, Count(*key, 0))
        total = one.count + other.count
        sums[key] = Count(*key, min(total, cap), one.capped or other.capped or total > cap)
    return [*sums.values()]
