"""Runs found by what is in their headers, along an index and with bounded effort.

A search reads a page of an index and filters it here. If that is not enough, it asks for the
position of a run further on, and lets the server filter those up to it: first a stretch, then as
many as a search may examine. No change in between makes it skip a run, because a position is a time
and an id, not a number of runs.

Runs that awaitly wrote have neither workflow nor status: both are in their snapshots. They are in
a range of their own.
"""

from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from heapq import merge
from itertools import islice
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, RunSummary
from perdure.stores._searching import (
    EXAMINED,
    Found,
    Position,
    count,
    find,
    matches,
    position_of,
    shows_system_runs,
)
from perdure.stores.mongo.documents import UNIX_EPOCH
from perdure.stores.mongo.journal import slots_between
from perdure.stores.mongo.schedule import MAX_RANGES
from perdure.stores.mongo.schema import (
    STATUS_INDEX,
    TAG_INDEX,
    UPDATE_INDEX,
    Collections,
    aggregate_all,
    gather_all,
)
from perdure.stores.mongo.updates import (
    STATUS_FIELDS,
    Document,
    Pipeline,
    has_prefix,
    has_snapshot_status,
    incarnation_of,
    is_not_system,
    status_of,
    to_date,
    wake_time,
)

STATUSES: Sequence[RunStatus] = get_args(RunStatus)
HEADLESS = {"workflow": None, "status": None}

_FIELDS = {
    **STATUS_FIELDS,
    "snapshot.workflowName": 1,
    **dict.fromkeys(("workflow", "owner", "queue", "version", "tags", "summary", "awaits"), 1),
    **dict.fromkeys(("updatedAt", "createdAt", "wakeAt", "turn", "expired"), 1),
}
_REVISION_FIELDS = {"incarnation": 1, "epoch": 1, "settled": 1, "messageCount": 1}
# Up to so many ids with a prefix are all read, and sorted here.
_FEW = 1_000


class _Walk(NamedTuple):
    """A way along an index: ranges of it, each with what else the runs in it must match."""

    hint: str
    by: str
    ranges: Sequence[tuple[Document, Document]]


class Searcher:
    """Finds runs whose `_id` starts with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    async def search(
        self, db: Collections, query: Query, limit: int, after: Position | None
    ) -> Found:
        """Return up to `limit` runs that match, in order."""
        few = await self._few(db, query)
        if few is not None:
            return find(few, query, limit, after)
        walk = await self._walk(db, query)
        size = min(EXAMINED, limit + 10 if _is_plain(query) else 4 * limit)
        page = await self._page(db, walk, query, after, None, size)
        runs = [*islice((run for run in page if matches(query, run)), limit)]
        if len(runs) == limit or len(page) < size:
            return Found(runs)
        last: Position | None = position_of(query, page[-1])
        for more in _stretches(size, len(walk.ranges)):
            stop = await self._stop(db, walk, query, last, more)
            left = limit - len(runs)
            runs += await self._page(db, walk, query, last, stop, left, filtered=True)
            last = stop
            if len(runs) == limit or stop is None:
                return Found(runs)
        return Found(runs, last)

    async def summaries(self, db: Collections, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return runs by id, with their revisions."""
        keys = [self._prefix + id for id in ids]
        fields = {**_FIELDS, **_REVISION_FIELDS}
        found = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
        runs = {run["_id"]: run async for run in found}
        slots = await _last_slots(db, [run for run in runs.values() if run.get("owner")])
        summaries = {
            key: replace(self._summary(run), revision=_revision(run, slots.get(key, "")))
            for key, run in runs.items()
        }
        return [summaries.get(key) for key in keys]

    async def counts(self, db: Collections, query: Query, cap: int) -> list[Count]:
        """Count runs by workflow and status, up to `cap` each."""
        workflows = query.workflows or await stored_workflows(db)
        groups = [(name, status) for name in workflows for status in query.statuses or STATUSES]
        mine = _and(has_prefix(self._prefix), is_not_system(self._prefix))
        parts: list[Pipeline] = [
            [
                {"$match": {"workflow": workflow, "status": status, **mine}},
                {"$limit": cap + 1},
                {"$group": {"_id": position, "count": {"$sum": 1}}},
            ]
            for position, (workflow, status) in enumerate(groups)
        ]
        counted = await aggregate_all(db.runs, parts)
        counts = [
            Count(workflow, status, min(each["count"], cap), capped=each["count"] > cap)
            for each in counted
            for workflow, status in [groups[each["_id"]]]
        ]
        headless = db.runs.find({**HEADLESS, **mine}, _FIELDS, hint=STATUS_INDEX).limit(EXAMINED)
        return _added(
            counts, count([self._summary(run) async for run in headless], query, cap), cap
        )

    async def _few(self, db: Collections, query: Query) -> list[RunSummary] | None:
        """Return all runs with the prefix if they are few."""
        mine = has_prefix(self._prefix + query.prefix)
        if not mine or await db.runs.count_documents(mine, limit=_FEW + 1, hint="_id_") > _FEW:
            return None
        return [self._summary(run) async for run in db.runs.find(mine, _FIELDS)]

    async def _walk(self, db: Collections, query: Query) -> _Walk:
        rest = self._filter(query)
        if query.tags:
            return _Walk(TAG_INDEX, "createdAt", [({"tags": query.tags[0]}, rest)])
        if not (query.workflows or query.statuses):
            return _Walk(UPDATE_INDEX, "updatedAt", [({}, rest)])
        workflows = query.workflows or await stored_workflows(db)
        statuses = query.statuses or STATUSES
        size = MAX_RANGES // (2 * len(statuses))
        ranges: list[tuple[Document, Document]] = [
            ({"workflow": {"$in": [*some]}, "status": {"$in": [*statuses]}}, rest)
            for some in (
                workflows[start : start + size] for start in range(0, len(workflows), size)
            )
        ]
        ranges.append((HEADLESS, _and(rest, _headless_filter(query))))
        return _Walk(STATUS_INDEX, "updatedAt", ranges)

    async def _page(
        self,
        db: Collections,
        walk: _Walk,
        query: Query,
        after: Position | None,
        stop: Position | None,
        limit: int,
        *,
        filtered: bool = False,
    ) -> list[RunSummary]:
        """Return the first runs between two positions, the second of them included."""
        bounds = self._bounds(walk, query, after, stop)
        works: list[Awaitable[list[Any]]] = [
            db.runs.find(
                _and(chosen, *bounds, rest if filtered else {}),
                _FIELDS,
                hint=walk.hint,
                batch_size=limit + 1,
            )
            .sort(_order(walk, query))
            .limit(limit)
            .to_list()
            for chosen, rest in walk.ranges
        ]
        found = [map(self._summary, part) for part in await gather_all(works)]
        if len(found) == 1:
            return [*found[0]]
        ordered = merge(
            *found, key=lambda run: position_of(query, run), reverse=not query.oldest_first
        )
        return [*islice(ordered, limit)]

    async def _stop(
        self, db: Collections, walk: _Walk, query: Query, after: Position | None, size: int
    ) -> Position | None:
        """Return the position of the last run to be examined; `None` if there are not so many."""
        bounds = self._bounds(walk, query, after, None, in_index=True)
        works: list[Awaitable[list[Any]]] = [
            db.runs.find(_and(chosen, *bounds), {walk.by: 1}, hint=walk.hint)
            .sort(_order(walk, query))
            .skip(size // len(walk.ranges) - 1)
            .limit(1)
            .to_list()
            for chosen, _ in walk.ranges
        ]
        positions = [
            Position(run.get(walk.by) or UNIX_EPOCH, run["_id"][len(self._prefix) :])
            for part in await gather_all(works)
            for run in part
        ]
        nearest = min if query.oldest_first else max
        return nearest(positions, default=None)

    def _bounds(
        self,
        walk: _Walk,
        query: Query,
        after: Position | None,
        stop: Position | None,
        *,
        in_index: bool = False,
    ) -> list[Document]:
        """Return the conditions that bound the walk; with `in_index`, no run is read for them."""
        bounds: list[Document] = []
        later, earlier = ("$gt", "$lt") if query.oldest_first else ("$lt", "$gt")
        for position, beyond in ((after, later), (stop, earlier)):
            if position is not None:
                bound = Position(to_date(position.time), self._prefix + position.id)
                bounds.append(_beyond(walk.by, bound, beyond, position is stop, in_index))
        if walk.by == "updatedAt":
            bounds += _between(query.since, query.until)
        return bounds

    def _filter(self, query: Query) -> Document:
        """Match what the ranges of the index do not."""
        conditions = [self._is_mine(query)]
        if query.queue is not None:
            conditions.append({"queue": query.queue or {"$in": ["", None]}})
        if query.tags:
            conditions += _between(query.since, query.until)
            conditions.append({"tags": {"$all": [*query.tags]}})
            if query.statuses:
                conditions.append({"status": {"$in": [*query.statuses]}})
            if query.workflows:
                conditions.append({"workflow": {"$in": [*query.workflows]}})
        return _and(*conditions)

    def _is_mine(self, query: Query) -> Document:
        mine = has_prefix(self._prefix + query.prefix)
        if shows_system_runs(query):
            return mine
        # Not as two ranges of ids: the server would read the index once for each of them.
        return _and(mine, {"$nor": [has_prefix(f"{self._prefix}~")]})

    def _summary(self, run: Any) -> RunSummary:
        has_header = run.get("status") is not None
        return RunSummary(
            id=run["_id"][len(self._prefix) :],
            updated_at=run.get("updatedAt") or UNIX_EPOCH,
            status=status_of(run),
            workflow=run.get("workflow") if has_header else _snapshot_workflow(run),
            owner=run.get("owner"),
            version=run.get("version", 0),
            queue=run.get("queue", ""),
            tags=tuple(run.get("tags", ())),
            summary=run.get("summary", b""),
            created_at=run.get("createdAt"),
            wake_at=wake_time(run),
            awaits=tuple(run.get("awaits", ())),
            takeovers=len(run.get("expired", ())),
        )


async def stored_workflows(db: Collections) -> list[str | None]:
    """Return the names of all workflows that have runs, by one seek in the index for each."""
    distinct: Pipeline = [{"$sort": {"workflow": 1}}, {"$group": {"_id": "$workflow"}}]
    return [group["_id"] async for group in await db.runs.aggregate(distinct, hint=STATUS_INDEX)]


def _stretches(examined: int, ranges: int) -> Iterator[int]:
    """Yield how many runs to examine next: not all that are allowed, if some of them may do."""
    few = min(10 * examined, EXAMINED - examined)
    return (size for size in (few, EXAMINED - examined - few) if size >= ranges)


def _is_plain(query: Query) -> bool:
    """Return whether all runs in the ranges match, except for the engine's own."""
    return not query.tags and query.queue is None and not query.prefix


def _and(*conditions: Document) -> Document:
    chosen = [condition for condition in conditions if condition]
    return chosen[0] if len(chosen) == 1 else {"$and": chosen} if chosen else {}


def _headless_filter(query: Query) -> Document:
    status = has_snapshot_status(query.statuses) if query.statuses else {}
    workflow = {"snapshot.workflowName": {"$in": [*query.workflows]}} if query.workflows else {}
    return _and(status, workflow)


def _between(since: datetime | None, until: datetime | None) -> list[Document]:
    # In milliseconds a time is not before `since` if it is not before the next one, rounded up.
    after = [] if since is None else [{"updatedAt": {"$gte": to_date(since, "since")}}]
    before = [] if until is None else [{"updatedAt": {"$lt": to_date(until, "until")}}]
    return after + before


def _beyond(
    by: str, position: Position, operator: str, is_included: bool, in_index: bool
) -> Document:
    """Match runs on one side of a position."""
    same = {"$lt": "$lte", "$gt": "$gte"}
    bound = {by: {same[operator]: position.time}}
    if in_index:
        # As one of two ranges: the server reads the index once for each of them, and no runs.
        id = {same[operator] if is_included else operator: position.id}
        return {**bound, "$or": [{by: {operator: position.time}}, {"_id": id}]}
    opposite = {"$lt": "$gt", "$gt": "$lt"}[operator]
    id = {opposite if is_included else same[opposite]: position.id}
    return {**bound, "$nor": [{by: position.time, "_id": id}]}


def _order(walk: _Walk, query: Query) -> dict[str, int]:
    direction = 1 if query.oldest_first else -1
    return {walk.by: direction, "_id": direction}


def _snapshot_workflow(run: Mapping[str, Any]) -> str | None:
    workflow: str | None = run.get("snapshot", {}).get("workflowName")
    return workflow


def _revision(run: Mapping[str, Any], last_slot: str) -> str:
    """Return a string that differs after every grant, release, entry, rest and message."""
    settled: Mapping[str, int] = run.get("settled", {})
    last = last_slot or settled.get("n", "")
    owned = run.get("owner") is not None
    epoch, messages = run.get("epoch", 0), run.get("messageCount", 0)
    return f"{incarnation_of(run)}.{epoch}.{last}.{messages}.{owned:d}"


async def _last_slots(db: Collections, runs: Iterable[Any]) -> dict[str, str]:
    """Return the last slot of the logs of runs that have an owner."""
    parts: list[Pipeline] = [
        [
            {"$match": {"_id": slots_between(run["_id"], run["epoch"], run["epoch"])}},
            {"$sort": {"_id": -1}},
            {"$limit": 1},
            {"$project": {"_id": 1}},
        ]
        for run in runs
    ]
    slots = [each["_id"].split("\0") for each in await aggregate_all(db.journal, parts)]
    return {run: slot for run, _, slot in slots}


def _added(counts: Sequence[Count], others: Sequence[Count], cap: int) -> list[Count]:
    """Return the counts with those of other runs."""
    sums = {(each.workflow, each.status): each for each in counts}
    for other in others:
        key = (other.workflow, other.status)
        total = other.count + (sums[key].count if key in sums else 0)
        is_capped = other.capped or total > cap or (key in sums and sums[key].capped)
        sums[key] = Count(*key, min(total, cap), capped=is_capped)
    return [*sums.values()]
