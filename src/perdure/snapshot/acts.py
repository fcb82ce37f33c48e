"""The acts of operators stored in a run: who intervened, how, and why."""

from typing import Any, Final

from perdure.snapshot.format import Metadata

MAX_ACTS: Final = 200
"""How many acts are kept in a run; the oldest are dropped."""


def acts_of(metadata: Metadata | None) -> list[dict[str, Any]]:
    """Return the acts stored in a run, oldest first."""
    acts = (metadata or {}).get("acts")
    return [act for act in acts if isinstance(act, dict)] if isinstance(acts, list) else []


def with_act(metadata: Metadata, act: dict[str, Any]) -> Metadata:
    """Return the metadata that changes when an act is added to a run."""
    count = int(metadata.get("actCount") or 0) + 1
    return {"acts": [*acts_of(metadata), act][-MAX_ACTS:], "actCount": count}
