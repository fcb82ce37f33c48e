"""Group failed runs by workflow, step, type of error, and message."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from perdure.clock import isoformat
from perdure.insights.model import ErrorGroup, ErrorGroups, RunRow
from perdure.insights.redaction import MASK, Redact
from perdure.insights.rows import row_of
from perdure.insights.terms import Term
from perdure.store import Query, RunSummary, SearchStore

EXAMINED = 2000
_PAGE = 500
_SHOWN_IDS = 20
_MOST_HOURS = 24 * 7
_HOUR = timedelta(hours=1)

_TYPE = re.compile(r"([A-Za-z_][\w.]*)(?:: |$)")
_NUMBER = re.compile(r"\b[0-9a-f]*\d[0-9a-f]{7,}\b|\d+", re.IGNORECASE)
_FOLDED = "#"


class _Key(NamedTuple):
    workflow: str
    step: str
    type: str
    message: str


async def error_groups(
    store: SearchStore, redact: Redact, now: datetime, window: timedelta
) -> ErrorGroups:
    """Return the failures of a time window in groups, largest first."""
    since = now - window
    runs, is_complete = await _failures(store, since)
    groups: dict[_Key, list[RunRow]] = {}
    for run in runs:
        row = row_of(run, redact)
        groups.setdefault(_key(row), []).append(row)
    error_groups = [_group(key, rows, since, now) for key, rows in groups.items()]
    error_groups.sort(key=lambda group: (-group.count, -group.last_at.timestamp()))
    return ErrorGroups(tuple(error_groups), len(runs), is_complete)


async def _failures(store: SearchStore, since: datetime) -> tuple[list[RunSummary], bool]:
    query, after = Query(statuses=("failed",), since=since), None
    runs: list[RunSummary] = []
    while len(runs) < EXAMINED:
        page = await store.search(query, min(_PAGE, EXAMINED - len(runs)), after=after)
        runs += page.runs
        after = page.cursor
        if after is None:
            return runs, True
    return runs, False


def _key(row: RunRow) -> _Key:
    match = _TYPE.match(row.error)
    name = match[1] if match else ""
    message = row.error[match.end() :] if match else row.error
    return _Key(row.workflow or "", row.ended_by, name, normalize(message))


def normalize(message: str) -> str:
    """Return a message in which numbers and hexadecimal ids are replaced by `#`."""
    return _NUMBER.sub(_FOLDED, message)


def _group(key: _Key, rows: Sequence[RunRow], since: datetime, now: datetime) -> ErrorGroup:
    times = [row.updated_at for row in rows]
    return ErrorGroup(
        workflow=key.workflow,
        step=key.step,
        type=key.type,
        message=key.message,
        count=len(rows),
        first_at=min(times),
        last_at=max(times),
        run_ids=tuple(row.id for row in rows[:_SHOWN_IDS]),
        query=_query(key, since),
        by_hour=_by_hour(times, since, now),
    )


def _query(key: _Key, since: datetime) -> str:
    """Return the text of a query that finds the runs of a group."""
    terms = [Term("status", ("failed",))]
    if key.workflow:
        terms.append(Term("workflow", (key.workflow,)))
    if key.step:
        terms.append(Term("step", (key.step,)))
    terms += (Term("error", (text,)) for text in (key.type, _literal(key.message)) if text)
    return " ".join(map(str, [*terms, Term("since", (isoformat(since),))]))


def _literal(message: str) -> str:
    """Return the longest part of a message that is the same in all runs of a group."""
    parts = re.split(f"{_FOLDED}|{MASK}", message)
    return max((part.strip() for part in parts), key=len, default="")


def _by_hour(times: Iterable[datetime], since: datetime, now: datetime) -> tuple[int, ...]:
    hours = min(max(-((since - now) // _HOUR), 1), _MOST_HOURS)
    counts = [0] * hours
    for time in times:
        # A run may have been updated after `now` was read, or before the first hour shown.
        counts[max(hours - 1 - max((now - time) // _HOUR, 0), 0)] += 1
    return tuple(counts)
