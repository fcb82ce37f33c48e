"""Runs that are due, found by an index on workflow and wake time."""

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.stores.mongo.schema import WAKE_INDEX, Collections
from perdure.stores.mongo.updates import IS_DUE, Document, has_prefix

_ID_AND_TIME = {"wakeAt": 1}


async def find_due(
    db: Collections,
    prefix: str,
    limit: int,
    workflows: Sequence[str] | None = None,
    is_due: Mapping[str, Any] = IS_DUE,
    *,
    fields: Mapping[str, int] = _ID_AND_TIME,
) -> list[Any]:
    """Return fields of up to `limit` due runs, earliest first."""
    names = await scheduled_workflows(db) if workflows is None else workflows
    chosen = {**is_due, **has_prefix(prefix), "workflow": {"$in": [*names]}}
    # In one batch: by default the server returns the first hundred, and waits to be asked for more.
    found = db.runs.find(chosen, fields, batch_size=limit + 1)
    return await found.sort("wakeAt").limit(limit).to_list()


async def scheduled_workflows(db: Collections) -> list[str | None]:
    """Return the names of all workflows that have runs with a wake time."""
    names: list[str | None] = [None]
    after: Document = {"$gte": ""}
    while True:
        # From name to name along the index: the server's `distinct` would examine every run.
        scheduled = {"workflow": after, "wakeAt": {"$type": "date"}}
        found = db.runs.find(scheduled, {"workflow": 1}).sort("workflow").limit(1)
        if not (first := await found.hint(WAKE_INDEX).to_list()):
            return names
        names.append(first[0]["workflow"])
        after = {"$gt": names[-1]}
