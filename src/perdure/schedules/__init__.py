"""When the runs of a schedule start: nominal times, jitter, and overlap policies.

Everything here is pure: it reads no clock and no store.
"""

from perdure.schedules.decisions import MAX_STARTS, Decision, RunEnd, ScheduleState, decide
from perdure.schedules.schedule import OnFailure, Overlap, Schedule, check_name
from perdure.schedules.timing import (
    Timing,
    first_time,
    next_time,
    planned_start,
    run_id_at,
    times_between,
    timing_of,
)

__all__ = [
    "MAX_STARTS",
    "Decision",
    "OnFailure",
    "Overlap",
    "RunEnd",
    "Schedule",
    "ScheduleState",
    "Timing",
    "check_name",
    "decide",
    "first_time",
    "next_time",
    "planned_start",
    "run_id_at",
    "times_between",
    "timing_of",
]
