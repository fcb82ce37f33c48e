"""Priorities: each level is a head start of one day."""

from datetime import timedelta

from perdure.errors import InvalidArgument
from perdure.validation import check_int

MAX_PRIORITY = 1000


def check_priority(priority: object) -> int:
    """Check a priority."""
    # A negative head start would delay the run: stores derive its wake time from it.
    if (level := check_int(priority, "priority", minimum=0)) > MAX_PRIORITY:
        raise InvalidArgument("priority", priority, f"an int from 0 to {MAX_PRIORITY}")
    return level


def head_start(priority: int) -> timedelta:
    """Return how far a run with this priority is ahead of others that are due."""
    return timedelta(days=priority)
