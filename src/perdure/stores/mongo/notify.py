"""Notifications about runs that may have become due, from the change stream of a replica set."""

from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.errors import StoreClosed
from perdure.stores.mongo.connection import Connection
from perdure.stores.mongo.schema import Collections

# An update that leases a run sets its owner. The expiry of a lease does not change a document, so
# nothing is sent: workers find those runs by polling.
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
# The server reports the time of a change in whole seconds.
_CLUSTER_TIME_PRECISION = timedelta(seconds=1)


async def notifications(connection: Connection[Collections]) -> AsyncGenerator[None]:
    """Yield once at the start, for runs that are already due, and then for every change."""
    pipeline: list[Mapping[str, Any]] = [{"$match": _MAY_BE_DUE}, {"$project": _TIMES}]
    try:
        with connection.listen() as db:
            async with await db.runs.watch(pipeline) as changes:
                yield
                async for change in changes:
                    if _is_due(change):
                        yield
    except StoreClosed:
        if not connection.is_closed:
            raise


def _is_due(change: Mapping[str, Any]) -> bool:
    wake_at = change.get("inserted") or change.get("updated")
    if not isinstance(wake_at, datetime):
        return False
    changed_at = datetime.fromtimestamp(change["clusterTime"].time, UTC)
    return wake_at <= changed_at + _CLUSTER_TIME_PRECISION
