"""The deadline of a run: a time in its metadata after which it fails.

A deadline given as a duration counts from when the run first executes, so that the time in a queue
does not count. From then on it is a fixed time, which neither a suspension nor a pause extends.
`step.continue_as_new` keeps it.
"""

from datetime import datetime, timedelta
from typing import Any

from perdure.clock import Clock, Duration, as_utc, isoformat, parse_duration, parse_iso
from perdure.engine.history import History
from perdure.errors import InvalidDuration
from perdure.snapshot import Metadata

_TIME, _DURATION = "deadline", "deadlineAfter"
LONGEST = timedelta(days=36_525)
LIMIT = "deadlineOfParent"
"""The metadata name of a child run's inherited deadline."""


def check_deadline(deadline: Duration) -> timedelta:
    """Check the deadline of a workflow, which counts from when a run first executes."""
    duration = parse_duration(deadline, "deadline")
    if not duration:
        raise InvalidDuration("deadline", deadline, "a positive duration")
    # It is added to a later time, which must exist.
    if duration > LONGEST:
        raise InvalidDuration("deadline", deadline, "a duration of at most 100 years")
    return duration


def deadline_metadata(deadline: Duration | datetime | None) -> dict[str, Any]:
    """Return the deadline as metadata of a new run."""
    if deadline is None:
        return {}
    if isinstance(deadline, datetime):
        return {_TIME: isoformat(as_utc(deadline, "deadline"))}
    return {_DURATION: check_deadline(deadline).total_seconds()}


def deadline_of(metadata: Metadata | None) -> datetime | None:
    """Return when a run must have ended, if that is already fixed."""
    deadline = (metadata or {}).get(_TIME)
    return parse_iso(deadline) if isinstance(deadline, str) else None


def fix_deadline(history: History, clock: Clock, default: timedelta | None) -> datetime | None:
    """Return when the run must have ended; if this fixes it, it is stored with the next write."""
    metadata = history.metadata
    if _TIME in metadata:
        return deadline_of(metadata)
    seconds, limit = metadata.get(_DURATION), metadata.get(LIMIT)
    duration = timedelta(seconds=seconds) if isinstance(seconds, int | float) else default
    times = [] if duration is None else [clock.now() + duration]
    times += [parse_iso(limit)] if isinstance(limit, str) else []
    if not times:
        return None
    deadline = min(times)
    history.set_metadata(_TIME, isoformat(deadline))
    return deadline


def inherited_deadline(parent: Metadata, deadline: Duration | datetime | None) -> dict[str, Any]:
    """Return the deadline of a child run as metadata: the earlier of its own and its parent's."""
    metadata = deadline_metadata(deadline)
    limit = deadline_of(parent)
    if limit is None:
        return metadata
    if (own := deadline_of(metadata)) is not None:
        return {_TIME: isoformat(min(own, limit))}
    return {**metadata, LIMIT: isoformat(limit)}


def drop_passed_deadline(metadata: Metadata, now: datetime) -> None:
    """Remove a deadline that has passed, so that a retried run gets a new one."""
    for name in (_TIME, LIMIT):
        deadline = metadata.get(name)
        if isinstance(deadline, str) and parse_iso(deadline) <= now:
            del metadata[name]
