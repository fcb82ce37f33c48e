"""Documents that awaitly stores in place of a snapshot."""

from datetime import datetime
from typing import Any, cast

from perdure.resume import deserialize_state, records_of
from perdure.snapshot import Snapshot, new_snapshot


def as_snapshot(document: Any, updated_at: datetime) -> Snapshot:
    """Return a stored document as a snapshot, converting it if it is a serialized resume state."""
    if isinstance(document, dict) and document.get("kind") == "ResumeState":
        snapshot = new_snapshot(now=updated_at)
        snapshot["steps"] = records_of(deserialize_state(document))
        return snapshot
    return cast(Snapshot, document)
