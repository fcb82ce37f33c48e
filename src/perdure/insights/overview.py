"""The store at a glance, from a few bounded reads that run at the same time."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from perdure.insights.model import Attention, Overview, RunRow, Tally, WorkerRow
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.insights.schedule import due_runs, rows_of
from perdure.insights.state import knows
from perdure.insights.terms import Term
from perdure.insights.words import count_words
from perdure.presence import Switches, WorkerPresence
from perdure.snapshot import RunStatus
from perdure.store import Count, Query, SearchStore

CAP, CAP_OF_ENDED = 10_000, 1_000
"""Up to how many runs of a workflow and status are counted; those that are over are many."""

DUE = 200
LAST_DAY = 500
LONG_WAITS = 500
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
    """Return the counts, what ended and failed last, and what needs attention."""
    live, ended, due, failures, waits, last_day = await asyncio.gather(
        store.counts(Query(statuses=_LIVE), CAP),
        store.counts(Query(statuses=_ENDED), CAP_OF_ENDED),
        due_runs(store, now, DUE),
        store.search(Query(statuses=("failed",)), _FAILURES),
        store.search(Query(statuses=("waiting",), until=now - _DAY), LONG_WAITS),
        _ended_since(store, now - _DAY),
    )
    tallies = tally([*live, *ended])
    attention = [
        *without_worker(await rows_of(store, due, redact), presences, switches.paused),
        *_long_waits(row_of(run, redact) for run in waits.runs),
        *_paused(tallies, switches),
        *_lost(workers),
    ]
    return Overview(
        now=now,
        counts=tallies,
        last_day=last_day,
        due=len(due),
        oldest_due=min((each.wake_at for each in due), default=None),
        workers=tuple(workers),
        failures=tuple(row_of(run, redact) for run in failures.runs),
        attention=tuple(attention),
        due_capped=len(due) == DUE,
    )


def tally(counts: Iterable[Count]) -> dict[str, Tally]:
    """Return the number of runs by status, of all workflows together."""
    totals: dict[str, Tally] = {}
    for each in counts:
        known = totals.get(each.status, Tally(0))
        totals[each.status] = Tally(known.count + each.count, known.capped or each.capped)
    return totals


async def _ended_since(store: SearchStore, since: datetime) -> dict[str, Tally]:
    # Not by `counts`: with a time, it reads up to 20,000 headers.
    pages = await asyncio.gather(
        *(store.search(Query(statuses=(status,), since=since), LAST_DAY) for status in _ENDED)
    )
    found = zip(_ENDED, pages, strict=True)
    return {status: Tally(len(page.runs), page.cursor is not None) for status, page in found}


def without_worker(
    rows: Sequence[RunRow], workers: Sequence[WorkerPresence], paused: frozenset[str]
) -> Iterable[Attention]:
    """Yield what is due although no live worker can take it."""
    if rows and not workers:
        yield Attention(f"{_are(len(rows))} due; no worker is running", "", rows[0].id)
        return
    groups: dict[tuple[str, int], list[RunRow]] = {}
    for row in rows:
        name = row.workflow or ""
        if name not in paused and not any(knows(each, name, row.version) for each in workers):
            groups.setdefault((name, row.version), []).append(row)
    for (workflow, version), members in groups.items():
        what = f"{count_words(len(members), 'run')} of {workflow} v{version}"
        text = f"{what} {_verb(len(members))} due; no live worker knows it"
        terms = Term("workflow", (workflow,)), Term("version", (str(version),))
        yield Attention(text, " ".join(map(str, terms)), members[0].id)


def _long_waits(rows: Iterable[RunRow]) -> Iterable[Attention]:
    events = Counter(event for row in rows for event in row.awaits)
    for event, count in events.most_common(5):
        has = "has" if count == 1 else "have"
        text = f'{count_words(count, "run")} {has} waited for "{event}" for over a day'
        terms = Term("status", ("waiting",)), Term("waiting", (event,)), Term("older", ("1d",))
        yield Attention(text, " ".join(map(str, terms)))


def _paused(tallies: dict[str, Tally], switches: Switches) -> Iterable[Attention]:
    if "paused" in tallies:
        count = tallies["paused"].count
        yield Attention(f"{_are(count)} paused", "status:paused")
    for name in sorted(switches.paused):
        yield Attention(f'Workflow "{name}" is paused', str(Term("workflow", (name,))))


def _lost(workers: Iterable[WorkerRow]) -> Iterable[Attention]:
    for worker in workers:
        if worker.state == "lost":
            text = f"Worker {worker.id} disappeared without stopping"
            yield Attention(text, str(Term("owner", (worker.id,))))


def _are(count: int) -> str:
    return f"{count_words(count, 'run')} {_verb(count)}"


def _verb(count: int) -> str:
    return "is" if count == 1 else "are"
