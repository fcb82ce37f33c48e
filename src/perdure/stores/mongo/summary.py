"""The summary of a run, read from its document without the snapshot."""

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.store import RunSummary
from perdure.stores.mongo.documents import UNIX_EPOCH
from perdure.stores.mongo.journal import slots_between
from perdure.stores.mongo.schema import Collections, aggregate_all
from perdure.stores.mongo.updates import (
    STATUS_FIELDS,
    Pipeline,
    incarnation_of,
    status_of,
    wake_time,
)

FIELDS = {
    **STATUS_FIELDS,
    "snapshot.workflowName": 1,
    **dict.fromkeys(("workflow", "owner", "queue", "version", "tags", "summary", "awaits"), 1),
    **dict.fromkeys(("updatedAt", "createdAt", "wakeAt", "turn", "expired"), 1),
}
REVISION_FIELDS = {"incarnation": 1, "epoch": 1, "settled": 1, "messageCount": 1}


def summary_of(run: Any, prefix: str, revision: str = "") -> RunSummary:
    """Return a run's summary; its id does not include the prefix."""
    return RunSummary(
        id=run["_id"][len(prefix) :],
        updated_at=run.get("updatedAt") or UNIX_EPOCH,
        status=status_of(run),
        workflow=_workflow_of(run),
        owner=run.get("owner"),
        version=run.get("version", 0),
        queue=run.get("queue", ""),
        tags=tuple(run.get("tags", ())),
        summary=run.get("summary", b""),
        created_at=run.get("createdAt"),
        wake_at=wake_time(run),
        awaits=tuple(run.get("awaits", ())),
        takeovers=len(run.get("expired", ())),
        revision=revision,
    )


def _workflow_of(run: Mapping[str, Any]) -> str | None:
    has_header = run.get("status") is not None
    workflow: str | None = (
        run.get("workflow") if has_header else run.get("snapshot", {}).get("workflowName")
    )
    return workflow


def revision_of(run: Mapping[str, Any], last_slot: str) -> str:
    """Return a string that changes with every grant, release, entry, rest and message."""
    settled_at: Mapping[str, int] = run.get("settled", {})
    last = last_slot or settled_at.get("n", "")
    is_owned = run.get("owner") is not None
    epoch, messages = run.get("epoch", 0), run.get("messageCount", 0)
    return f"{incarnation_of(run)}.{epoch}.{last}.{messages}.{is_owned:d}"


async def last_slots(db: Collections, runs: Iterable[Any]) -> dict[str, str]:
    """Return the last slot of the current log of each run that has one, by `_id`."""
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
