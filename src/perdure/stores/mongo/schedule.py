"""Find due runs by an index on queue, workflow and wake time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from perdure.store import SupportedVersions
from perdure.stores.mongo.schema import DUE_INDEX, Collections, aggregate_all
from perdure.stores.mongo.updates import (
    HAS_EXPIRED,
    HAS_WAKE_TIME,
    IS_DUE,
    QUEUE_DEFAULTS,
    Document,
    Pipeline,
    has_prefix,
    to_date,
    to_turn,
)

_FIELDS = {"queue": 1, "wakeAt": 1, "turn": 1}
_ORDER = {"wakeAt": 1, "turn": 1}
# The server merges at most 200 ranges of an index, and otherwise sorts all runs in them.
MAX_RANGES = 200
# How many pages of the index are read to find queues, before it is searched for each of them.
_MAX_PAGES = 3


async def find_due(
    db: Collections,
    prefix: str,
    limit: int,
    supports: Sequence[SupportedVersions] | None,
    queues: Mapping[str, int],
    is_due: Document = IS_DUE,
    *,
    fields: Mapping[str, int] = MappingProxyType({}),
) -> list[Any]:
    """Return queue, wake time and these fields of up to `limit` due runs, earliest first.

    `queues` limits how many runs of each queue are returned.
    """
    if supports is None:
        supported = [*_any_of(await _scheduled_workflows(db, queues))]
    else:
        supported = [*_supported(supports)]
    mine = {**is_due, **has_prefix(prefix)}
    searches = [
        ({"queue": queue, **each, **mine}, min(most, limit))
        for queue, most in queues.items()
        for each in supported
    ]
    if len(searches) == 1:
        return await _find_first(db, *searches[0], fields)
    parts: list[Pipeline] = [
        [{"$match": each}, {"$sort": _ORDER}, {"$limit": most}, {"$project": {**_FIELDS, **fields}}]
        for each, most in searches
    ]
    return _earliest(await aggregate_all(db.runs, parts), limit, queues)


async def _find_first(
    db: Collections, condition: Document, limit: int, fields: Mapping[str, int]
) -> list[Any]:
    # In one batch: by default the server returns only the first hundred, and more on request.
    cursor = db.runs.find(condition, {**_FIELDS, **fields}, batch_size=limit + 1, hint=DUE_INDEX)
    return await cursor.sort(_ORDER).limit(limit).to_list()


def _earliest(runs: Iterable[Any], limit: int, queues: Mapping[str, int]) -> list[Any]:
    earliest: dict[str, Any] = {}
    quotas = {**queues}
    for run in sorted(runs, key=lambda run: (run["wakeAt"], run.get("turn", 0))):
        if len(earliest) < limit and quotas[run["queue"]] and run["_id"] not in earliest:
            earliest[run["_id"]] = run
            quotas[run["queue"]] -= 1
    return [*earliest.values()]


def _supported(supports: Sequence[SupportedVersions]) -> Iterator[Document]:
    """Yield conditions for the workflows, grouped by equal versions."""
    for (first, last), workflows in _by_versions(supports).items():
        for any_of in _any_of(workflows):
            yield {**any_of, **_has_version(first, last)}


def _by_versions(supports: Sequence[SupportedVersions]) -> dict[tuple[int, int], list[str]]:
    """Return the workflows by their first and last supported version."""
    by_versions: dict[tuple[int, int], list[str]] = {}
    for supported in supports:
        by_versions.setdefault((supported.first, supported.last), []).append(supported.workflow)
    return by_versions


def is_claimable(supports: Sequence[SupportedVersions]) -> Document:
    """Return the expression for whether a run is in no queue and supported."""
    version = QUEUE_DEFAULTS["version"]
    groups = [
        {
            "$and": [
                {"$in": ["$workflow", {"$literal": workflows}]},
                {"$or": [{"$eq": [version, 0]}, {"$gte": [version, first]}]},
                {"$lte": [version, last]},
            ]
        }
        for (first, last), workflows in _by_versions(supports).items()
    ]
    return {"$and": [{"$eq": [QUEUE_DEFAULTS["queue"], ""]}, {"$or": groups}]}


def _has_version(first: int, last: int) -> Document:
    """Match runs whose version is in the range, or 0, which means not determined yet."""
    if first == last:
        return {"version": {"$in": [0, first]}}
    if first <= 1:
        return {"version": {"$lte": last}}
    return {"$or": [{"version": 0}, {"version": {"$gte": first, "$lte": last}}]}


def _any_of(workflows: Sequence[str] | Sequence[str | None]) -> Iterator[Document]:
    # A range for each; two for runs without a workflow.
    size = MAX_RANGES // 2
    for start in range(0, len(workflows), size):
        yield {"workflow": {"$in": [*workflows[start : start + size]]}}


async def _scheduled_workflows(db: Collections, queues: Iterable[str]) -> list[str | None]:
    """Return the names of all workflows that have runs with a wake time in these queues."""
    parts: list[Pipeline] = [
        [
            {"$match": {"queue": queue, "wakeAt": HAS_WAKE_TIME}},
            {"$sort": {"workflow": 1}},
            {"$group": {"_id": "$workflow"}},
        ]
        for queue in queues
    ]
    return [*{group["_id"] for group in await aggregate_all(db.runs, parts)}]


def is_due_at(now: datetime) -> Document:
    """Match runs without a live lease whose wake time is at or before `now`."""
    latest = to_date(now)
    is_free: list[Document] = [{"owner": None}, {"$expr": HAS_EXPIRED}]
    conditions: list[Document] = [{"$or": is_free}]
    if turn := to_turn(now):
        conditions.append({"$or": [{"wakeAt": {"$lt": latest}}, {"turn": {"$lte": turn}}]})
    return {"wakeAt": {**HAS_WAKE_TIME, "$lte": latest}, "$and": conditions}


async def due_queues(
    db: Collections, prefix: str, now: datetime, limit: int, low: str, high: str | None
) -> list[str]:
    """Return up to `limit` queues with due runs from `low` up to `high`, by name.

    Most queues have few due runs, so a page of the index usually contains enough queues. Otherwise
    the server skips from queue to queue along the index, in one round trip, but through all queues.
    """
    names: list[str] = []
    after: Document = {"$gte": low}
    for _ in range(_MAX_PAGES):
        page = await _queue_page(db, _queues_between(prefix, now, after, high), 2 * limit)
        names += dict.fromkeys(page)
        if len(names) >= limit or len(page) < 2 * limit:
            return names[:limit]
        after = {"$gt": names[-1]}
    skipping: Pipeline = [
        {"$match": _queues_between(prefix, now, after, high)},
        {"$sort": {"queue": 1}},
        {"$group": {"_id": "$queue"}},
        {"$sort": {"_id": 1}},
        {"$limit": limit - len(names)},
    ]
    groups = await db.runs.aggregate(skipping, hint=DUE_INDEX)
    return names + [group["_id"] async for group in groups]


def _queues_between(prefix: str, now: datetime, after: Document, high: str | None) -> Document:
    queue = after if high is None else {**after, "$lt": high}
    return {"queue": queue, "wakeAt": {**HAS_WAKE_TIME, "$lte": to_date(now)}, **has_prefix(prefix)}


async def _queue_page(db: Collections, condition: Document, size: int) -> list[str]:
    cursor = db.runs.find(condition, {"_id": 0, "queue": 1}, batch_size=size + 1, hint=DUE_INDEX)
    return [run["queue"] async for run in cursor.sort({"queue": 1}).limit(size)]
