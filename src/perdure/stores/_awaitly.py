"""What awaitly may have put where a snapshot lies."""

from datetime import datetime
from typing import Any, cast

from perdure.resume import deserialize_state, records_of
from perdure.snapshot import Snapshot, new_snapshot


def as_snapshot(document: Any, updated_at: datetime) -> Snapshot:
    """Give a stored document as a snapshot; a serialized resume state becomes one."""
    if isinstance(document, dict) and document.get("kind") == "ResumeState":
        snapshot = new_snapshot(now=updated_at)
        snapshot["steps"] = records_of(deserialize_state(document))
        return snapshot
    return cast(Snapshot, document)
