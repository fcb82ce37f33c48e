"""Hints that a run may have become due, from the changes that a replica set tells of."""

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.stores.mongo.schema import Collections

# The end of a lease comes with time: nothing tells of it. Whoever leases a run sets its owner.
_MAY_BE_DUE = {
    "$or": [
        {"operationType": {"$in": ["insert", "replace"]}, "fullDocument.owner": None},
        {
            "operationType": "update",
            "updateDescription.updatedFields.wakeAt": {"$exists": True},
            "updateDescription.updatedFields.owner": {"$exists": False},
        },
    ]
}
_TIMES = {
    "inserted": "$fullDocument.wakeAt",
    "updated": "$updateDescription.updatedFields.wakeAt",
    "clusterTime": 1,
}
# The server tells the moment of a change in whole seconds.
_SOON = timedelta(seconds=1)


async def notifications(db: Collections) -> AsyncIterator[None]:
    """Yield at once, for what became due before anybody listened, and then with every change."""
    async with await db.runs.watch([{"$match": _MAY_BE_DUE}, {"$project": _TIMES}]) as changes:
        yield
        async for change in changes:
            if _is_due(change):
                yield


def _is_due(change: Mapping[str, Any]) -> bool:
    wake_at = change.get("inserted") or change.get("updated")
    if not isinstance(wake_at, datetime):
        return False
    changed_at = datetime.fromtimestamp(change["clusterTime"].time, UTC)
    return wake_at <= changed_at + _SOON
