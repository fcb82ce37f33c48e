"""Limits per queue in a claim, and the order of runs that are enqueued together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from perdure.store import NewRun
from perdure.validation import check_limit, check_prefix

_MICROSECOND = timedelta(microseconds=1)


def queue_limits(queues: Mapping[str, int] | None, limit: int) -> dict[str, int]:
    """Return the limit for each queue; "" stands for runs in no queue."""
    limits = {"": limit} if queues is None else queues
    for name, most in limits.items():
        check_prefix(name, "queues")
        check_limit(most, "queues")
    return {name: min(most, limit) for name, most in limits.items() if min(most, limit) > 0}


def in_order(runs: Sequence[NewRun]) -> Sequence[NewRun]:
    """Return the runs with wake times that differ, so that they become due in this order.

    They differ by microseconds. Of runs that are due at once, the last gets the time of its
    creation and the others earlier times, so all of them are due.
    """
    if len(runs) == 1:
        return runs
    at_once = sum(run.wake_at is None for run in runs)
    runs_at = Counter[datetime]()
    spaced_runs: list[NewRun] = []
    for run in runs:
        if run.wake_at is None:
            at_once -= 1
            head_start = run.head_start + at_once * _MICROSECOND
            spaced_runs.append(replace(run, head_start=head_start) if at_once else run)
        else:
            spaced_runs.append(
                replace(run, wake_at=run.wake_at + runs_at[run.wake_at] * _MICROSECOND)
            )
            runs_at[run.wake_at] += 1
    return spaced_runs
