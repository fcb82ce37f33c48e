"""Prune old runs, and count runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.store import QueueStats, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores._timestamps import from_microseconds
from perdure.stores.mongo.cleanup import Cleanup
from perdure.stores.mongo.leases import Epochs
from perdure.stores.mongo.schema import DUE_INDEX, STATUS_INDEX, Collections, gather_all
from perdure.stores.mongo.search import HEADLESS, STATUSES, stored_workflows
from perdure.stores.mongo.updates import (
    HAS_EXPIRED,
    HEADER,
    IS_DUE,
    Document,
    has_prefix,
    has_snapshot_status,
    incarnation_of,
    is_not_system,
    to_milliseconds,
)

_SNAPSHOT_STATUS = {"$ifNull": ["$snapshot.execution.state", "$snapshot.execution.status"]}
_QUEUE = {"$arrayElemAt": [{"$split": [{"$ifNull": ["$queue", ""]}, "/"]}, 0]}
_MICROSECONDS = {"$add": [{"$multiply": [{"$toLong": "$wakeAt"}, 1000]}, {"$ifNull": ["$turn", 0]}]}
_IS_LEASED = {"owner": {"$ne": None}, "$expr": {"$not": [HAS_EXPIRED]}}


class Maintenance:
    """The operations on many runs whose `_id` starts with `prefix`."""

    def __init__(self, prefix: str, epochs: Epochs, cleanup: Cleanup) -> None:
        self._mine: Document = {"$and": [has_prefix(prefix), is_not_system(prefix)]}
        self._epochs = epochs
        self._cleanup = cleanup

    async def prune(self, db: Collections, request: PruneRequest) -> int:
        """Delete old runs, or count them; return how many."""
        workflows = [request.workflow] if request.workflow else await stored_workflows(db)
        has_name = {"snapshot.workflowName": request.workflow} if request.workflow else {}
        headless = {**HEADLESS, "$and": [has_snapshot_status(request.statuses), has_name]}
        with_header = {"workflow": {"$in": workflows}, "status": {"$in": [*request.statuses]}}
        count = 0
        for condition in (with_header, headless):
            if remaining := request.limit - count:
                count += await self._prune(
                    db, {"$and": [condition, _is_old(request)]}, request, remaining
                )
        return count

    async def _prune(
        self, db: Collections, old: Document, request: PruneRequest, limit: int
    ) -> int:
        condition = {"$and": [old, self._mine]}
        cursor = db.runs.find(condition, HEADER, hint=STATUS_INDEX).limit(limit)
        runs = {run["_id"]: run async for run in cursor}
        if request.dry_run or not runs:
            return len(runs)
        result = await db.runs.delete_many({"_id": {"$in": [*runs]}, **old})
        if result.deleted_count:
            await self._clean_up_after(db, runs)
        return result.deleted_count

    async def _clean_up_after(self, db: Collections, runs: Mapping[str, Any]) -> None:
        existing = {run["_id"] async for run in db.runs.find({"_id": {"$in": [*runs]}}, {"_id": 1})}
        for key, run in runs.items():
            if key in existing:
                continue
            epoch = run.get("epoch", 0)
            self._epochs.end(epoch)
            self._cleanup.delete_logs(key, epoch)
            if run.get("messageCount"):
                self._cleanup.delete_messages(key, incarnation_of(run))

    async def stats(self, db: Collections) -> Stats:
        """Count the runs by status and queue, and find the oldest due run."""
        workflows = {"workflow": {"$in": await stored_workflows(db)}}
        with_header = {**workflows, "status": {"$in": [*STATUSES]}}
        is_running = {**workflows, "status": "running", **_IS_LEASED}
        # Runs with a header, and due runs, are counted from an index alone.
        statuses, headless, due, leased = await gather_all(
            [
                self._count(db, with_header, "$status", STATUS_INDEX),
                self._count(db, HEADLESS, _SNAPSHOT_STATUS, STATUS_INDEX),
                self._count(db, IS_DUE, _QUEUE, DUE_INDEX, oldest={"$min": _MICROSECONDS}),
                self._count(db, is_running, _QUEUE, STATUS_INDEX),
            ]
        )
        by_status = Counter[str]()
        for group in (*statuses, *headless):
            by_status[group["_id"] or "running"] += group["count"]
        by_queue = _by_queue(due, leased)
        oldest = [each.oldest_due for each in by_queue.values() if each.oldest_due is not None]
        return Stats(by_status, min(oldest, default=None), by_queue)

    async def _count(
        self, db: Collections, condition: Document, by: object, index: str, **accumulators: Document
    ) -> list[Any]:
        counting = {"$group": {"_id": by, "count": {"$sum": 1}, **accumulators}}
        groups = await db.runs.aggregate(
            [{"$match": {"$and": [condition, self._mine]}}, counting], hint=index
        )
        return await groups.to_list()


def _is_old(request: PruneRequest) -> Document:
    cutoff = {"$subtract": ["$$NOW", to_milliseconds(request.older_than)]}
    old: Document = {
        "updatedAt": {"$type": "date"},
        "$expr": {"$lt": ["$updatedAt", cutoff]},
    }
    return {**old, "tags": {"$all": [*request.tags]}} if request.tags else old


def _by_queue(due: Sequence[Any], leased: Sequence[Any]) -> dict[str, QueueStats]:
    leased_counts = {group["_id"]: group["count"] for group in leased}
    by_queue = {queue: QueueStats(leased=count) for queue, count in leased_counts.items()}
    for group in due:
        queue, oldest = group["_id"], from_microseconds(group["oldest"])
        by_queue[queue] = QueueStats(group["count"], leased_counts.get(queue, 0), oldest)
    return {queue: stats for queue, stats in by_queue.items() if not queue.startswith("~")}
