"""Minimal snapshots and deltas to store, in the engine's JSON format."""

import json
from datetime import datetime
from typing import Any

from perdure.clock import isoformat
from perdure.snapshot import ExecutionBlock, Metadata, PendingWait, RunStatus, Snapshot, StepRecord

AT = "2030-01-01T00:00:00.000Z"


def snapshot(
    *keys: str,
    status: RunStatus = "running",
    workflow: str | None = None,
    wake_at: datetime | None = None,
    event: str | None = None,
    metadata: Metadata | None = None,
    **values: Any,
) -> Snapshot:
    """Return a snapshot with these steps; `values` are steps with their values."""
    steps: dict[str, StepRecord] = {key: {"ok": True, "value": key} for key in keys}
    steps |= {key: {"ok": True, "value": value} for key, value in values.items()}
    result: Snapshot = {"formatVersion": 1, "steps": steps, "execution": _execution(status)}
    if workflow is not None:
        result["workflowName"] = workflow
    if wake_at is not None or event is not None:
        result["execution"]["pending"] = [_pending(wake_at, event)]
    if metadata is not None:
        result["metadata"] = metadata
    return result


def with_step(key: str, value: object) -> Snapshot:
    """Return a snapshot with one step that returned this value."""
    return {
        "formatVersion": 1,
        "steps": {key: {"ok": True, "value": value}},
        "execution": _execution("running"),
    }


def _execution(status: RunStatus) -> ExecutionBlock:
    match status:
        case "running" | "completed" | "failed":
            return {"status": status, "lastUpdated": AT}
        case "queued" | "suspended" | "waiting" | "paused":
            return {"status": "running", "lastUpdated": AT, "state": status}
        case "cancelled":
            return {"status": "failed", "lastUpdated": AT, "state": status}


def _pending(wake_at: datetime | None, event: str | None) -> PendingWait:
    pending: PendingWait = {"id": "pause", "kind": "sleep" if event is None else "event"}
    if wake_at is not None:
        pending["wakeAt"] = isoformat(wake_at)
    if event is not None:
        pending["event"] = event
    return pending


def delta(*keys: str, **values: Any) -> bytes:
    """Return the JSON of a journal entry that records these steps."""
    return as_json(snapshot(*keys, **values))


def as_json(value: object) -> bytes:
    """Return a value as UTF-8 encoded JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
