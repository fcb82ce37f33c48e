"""Runs by their wake times: those that are due, and those that will be."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from perdure.insights.model import RunRow
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.snapshot import is_over
from perdure.store import Due, SearchStore, can_queue, can_schedule

QUEUES = 100
"""How many queues are asked for their next runs."""

_LEVEL = timedelta(days=1)
"""What a level of priority is worth, at least."""


async def due_runs(store: SearchStore, until: datetime, limit: int) -> list[Due]:
    """Return up to `limit` runs that are due at a time, of all queues, earliest first."""
    if not can_schedule(store):
        return []
    if not can_queue(store):
        return list(await store.due(until, limit))
    names = await store.queues(until, QUEUES)
    queues = {"": limit, **dict.fromkeys(names, limit)}
    return list(await store.due(until, limit, queues=queues))


async def rows_of(store: SearchStore, due: list[Due], redact: Redact) -> list[RunRow]:
    """Return the rows of runs that are still unowned and not over."""
    found = await store.summaries([each.id for each in due]) if due else ()
    rows = [row_of(run, redact) for run in found if run is not None and run.owner is None]
    return [row for row in rows if not is_over(row.status) and row.wake_at is not None]


async def oldest_due(store: SearchStore, due: Sequence[Due], now: datetime) -> datetime | None:
    """Return since when the one of these runs is due that has waited longest.

    A priority is a head start of days: such a run is due since it was created, not since its wake
    time.
    """
    early = [each.id for each in due if each.wake_at <= now - _LEVEL]
    found = await store.summaries(early) if early else ()
    created = {run.id: run.created_at for run in found if run is not None}
    times = (max(each.wake_at, created.get(each.id) or each.wake_at) for each in due)
    return min(times, default=None)
