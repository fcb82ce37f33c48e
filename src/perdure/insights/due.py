"""Find runs by their wake times: due now, or later."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from perdure.insights.model import RunRow
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.snapshot import is_over
from perdure.store import Due, SearchStore, can_queue, can_schedule

QUEUES = 100
"""The maximum number of queues that are searched for due runs."""

_LEVEL = timedelta(days=1)
"""The smallest head start of a priority level."""


async def due_runs(store: SearchStore, until: datetime, limit: int) -> list[Due]:
    """Return up to `limit` runs of all queues that are due at `until`, earliest first."""
    if not can_schedule(store):
        return []
    if not can_queue(store):
        return list(await store.due(until, limit))
    names = await store.queues(until, QUEUES)
    queues = {"": limit, **dict.fromkeys(names, limit)}
    return list(await store.due(until, limit, queues=queues))


async def rows_of(
    store: SearchStore, due: list[Due], redact: Redact, now: datetime
) -> list[RunRow]:
    """Return the rows of runs that are not over and that no process owns at `now`.

    This includes runs whose lease has expired, which any worker can take.
    """
    summaries = await store.summaries([each.id for each in due]) if due else ()
    rows = [row_of(run, redact) for run in summaries if run is not None]
    return [row for row in rows if not is_over(row.status) and _can_be_claimed(row, now)]


def _can_be_claimed(row: RunRow, now: datetime) -> bool:
    if row.owner is None:
        return row.wake_at is not None
    return row.lease_expires_at is not None and row.lease_expires_at <= now


async def oldest_due(store: SearchStore, due: Sequence[Due], now: datetime) -> datetime | None:
    """Return since when the longest-waiting of these runs has been due.

    A priority is a head start of days: a run with a priority has been due since it was created, not
    since its wake time.
    """
    early = [each.id for each in due if each.wake_at <= now - _LEVEL]
    summaries = await store.summaries(early) if early else ()
    creation_times = {run.id: run.created_at for run in summaries if run is not None}
    times = (max(each.wake_at, creation_times.get(each.id) or each.wake_at) for each in due)
    return min(times, default=None)
