"""What happens next: runs that will wake, and events that runs wait for."""

import asyncio
from collections import Counter
from datetime import datetime, timedelta

from perdure.insights.due import due_runs, rows_of
from perdure.insights.model import Agenda, AgendaHour, AwaitedEvent, RunRow
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.store import Query, SearchStore

EXAMINED = 1000
_MAX_SHOWN = 20
_MAX_RUNS = 3


async def agenda(store: SearchStore, redact: Redact, now: datetime, hours: int) -> Agenda:
    """Return what happens in the next hours, based on at most `EXAMINED` runs of each kind."""
    end = now + timedelta(hours=hours)
    due, waiting = await asyncio.gather(
        due_runs(store, end, EXAMINED),
        store.search(Query(statuses=("waiting",), oldest_first=True), EXAMINED),
    )
    rows = [row for row in await rows_of(store, due, redact, now) if row.wake_at is not None]
    rows.sort(key=lambda row: row.wake_at or now)
    return Agenda(
        next=tuple(rows[:_MAX_SHOWN]),
        hours=_by_hour(rows, now),
        events=_events([row_of(run, redact) for run in waiting.runs]),
        examined=len(due) + len(waiting.runs),
        is_complete=len(due) < EXAMINED and waiting.cursor is None,
    )


def _by_hour(rows: list[RunRow], now: datetime) -> tuple[AgendaHour, ...]:
    # Overdue runs belong to the current hour.
    times = (max(row.wake_at, now) for row in rows if row.wake_at is not None)
    hours = Counter(time.replace(minute=0, second=0, microsecond=0) for time in times)
    return tuple(AgendaHour(hour, count) for hour, count in sorted(hours.items()))


def _events(rows: list[RunRow]) -> tuple[AwaitedEvent, ...]:
    """Return the events that runs wait for; the runs are sorted by their last update."""
    waiting: dict[str, list[RunRow]] = {}
    for row in rows:
        for event in dict.fromkeys(row.awaits):
            waiting.setdefault(event, []).append(row)
    events = sorted(waiting.items(), key=lambda each: len(each[1]), reverse=True)
    return tuple(_event(event, runs) for event, runs in events)


def _event(event: str, runs: list[RunRow]) -> AwaitedEvent:
    oldest_at = min(row.updated_at for row in runs)
    return AwaitedEvent(event, len(runs), oldest_at, tuple(row.id for row in runs[:_MAX_RUNS]))
