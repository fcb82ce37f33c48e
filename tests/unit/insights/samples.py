"""Snapshots as they are stored."""

from datetime import UTC, datetime
from typing import Any

from perdure import codec
from perdure.snapshot import new_snapshot


def new_snapshot_json(workflow: str, **metadata: Any) -> bytes:
    """Return the snapshot of a run that was not started, as JSON."""
    return codec.dumps(
        new_snapshot(workflow, now=datetime(2026, 11, 3, 9, tzinfo=UTC), metadata=metadata)
    )
