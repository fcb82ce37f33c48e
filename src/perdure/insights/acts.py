"""The audit trail: what operators did, in the run it was done to and in documents beside it."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.insights.model import Act
from perdure.insights.redaction import Redact


def acts_of(metadata: Mapping[str, Any], run_id: str, redact: Redact) -> tuple[Act, ...]:
    """Return the acts that a run keeps, newest first."""
    stored = metadata.get("acts")
    found = (read_act(each, redact) for each in (stored if isinstance(stored, list) else ()))
    acts = [replace(act, run_id=run_id) for act in found if act is not None]
    return tuple(newest_first(acts))


def act_count_of(metadata: Mapping[str, Any], kept: int) -> int:
    """Return how many acts a run has had; it keeps only the last ones."""
    count = metadata.get("actCount")
    return max(count, kept) if type(count) is int else kept


def read_act(stored: object, redact: Redact) -> Act | None:
    """Return a stored act, or `None` if it cannot be read."""
    try:
        act = msgspec.convert(stored, Act)
    except msgspec.ValidationError:
        return None
    return replace(
        act, why=redact.text(act.why), was=redact.text(act.was), refused=redact.text(act.refused)
    )


def newest_first(acts: Iterable[Act]) -> list[Act]:
    """Return acts by their time; of two at the same time, the one that was stored last first."""
    found = list(acts)
    found.reverse()
    found.sort(key=lambda act: act.at, reverse=True)
    return found
