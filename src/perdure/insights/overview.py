"""The store at a glance, from a few concurrent, bounded reads."""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from perdure.insights.attention import long_waits, lost_workers, paused, without_worker
from perdure.insights.due import due_runs, oldest_due, rows_of
from perdure.insights.model import Lag, Overview, RunRow, Tally, WorkerRow
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.presence import Switches, WorkerPresence
from perdure.snapshot import RunStatus
from perdure.store import Count, Query, SearchStore

CAP, CAP_OF_ENDED = 10_000, 1_000
"""The maximum number of runs counted for each workflow and status; many runs are over."""

DUE = 200
LAST_DAY = 500
LONG_WAITS = 200
_FAILURES = 10
_DAY = timedelta(days=1)
_ENDED: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
_LIVE: tuple[RunStatus, ...] = ("queued", "running", "suspended", "waiting", "paused")


async def overview(
    store: SearchStore,
    redact: Redact,
    now: datetime,
    workers: Sequence[WorkerRow],
    presences: Sequence[WorkerPresence],
    switches: Switches,
) -> Overview:
    """Return counts, the latest ends and failures, and what needs attention."""
    live, ended_runs, due, failures, waits, last_day = await asyncio.gather(
        store.counts(Query(statuses=_LIVE), CAP),
        store.counts(Query(statuses=_ENDED), CAP_OF_ENDED),
        due_runs(store, now, DUE),
        store.search(Query(statuses=("failed",)), _FAILURES),
        store.search(Query(statuses=("waiting",), until=now - _DAY), LONG_WAITS),
        _ended_since(store, now - _DAY),
    )
    tallies = tally([*live, *ended_runs])
    rows = await rows_of(store, due, redact, now)
    attention = [
        *without_worker(rows, len(due) == DUE, presences, switches.paused),
        *long_waits(waits.runs, waits.cursor is not None),
        *paused(tallies.get("paused"), switches),
        *lost_workers(workers),
    ]
    return Overview(
        now=now,
        counts=tallies,
        last_day=last_day,
        due=len(rows),
        oldest_due=await oldest_due(store, due, now),
        workers=tuple(workers),
        failures=tuple(row_of(run, redact) for run in failures.runs),
        attention=tuple(attention),
        due_capped=len(due) == DUE,
        lags=_lags(rows),
    )


def _lags(due: Iterable[RunRow]) -> dict[str, Lag]:
    lags: dict[str, Lag] = {}
    for row in due:
        # A run with a priority has a wake time before its creation.
        due_at = row.wake_at or row.lease_expires_at
        at = max(filter(None, (due_at, row.created_at)), default=row.updated_at)
        lag = lags.get(row.workflow or "", Lag(0, at))
        lags[row.workflow or ""] = Lag(lag.due + 1, min(lag.oldest, at))
    return lags


def tally(counts: Iterable[Count]) -> dict[str, Tally]:
    """Return the number of runs by status, over all workflows."""
    totals: dict[str, Tally] = {}
    for each in counts:
        total = totals.get(each.status, Tally(0))
        totals[each.status] = Tally(total.count + each.count, total.capped or each.capped)
    return totals


async def _ended_since(store: SearchStore, since: datetime) -> dict[str, Tally]:
    # Not with `counts`, which would read up to 20,000 headers because of the time.
    pages = await asyncio.gather(
        *(store.search(Query(statuses=(status,), since=since), LAST_DAY) for status in _ENDED)
    )
    pages_by_status = zip(_ENDED, pages, strict=True)
    return {
        status: Tally(len(page.runs), page.cursor is not None) for status, page in pages_by_status
    }
