"""Check queries, read and write their cursors, and answer them in Python where no database can."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, get_args

from msgspec.structs import replace

from perdure.clock import as_utc, parse_iso
from perdure.errors import InvalidArgument
from perdure.snapshot import RunStatus
from perdure.store import Count, Page, Query, RunSummary
from perdure.stores._prefix import end_of_prefix
from perdure.validation import check_flag, check_id, check_prefix

MAX_EXAMINED = 20_000
"""The maximum number of runs that one search examines."""


class Position(NamedTuple):
    """The position of a run in a search: the time by which it is ordered, and its id."""

    time: datetime
    id: str


class SearchResult(NamedTuple):
    """The runs that a backend found, in order.

    `stopped_at` is the last run that was examined, if the search stopped after examining
    `MAX_EXAMINED` runs. It is `None` if the search found enough runs or reached the end.
    """

    runs: Sequence[RunSummary]
    stopped_at: Position | None = None


def check_query(query: Query) -> Query:
    """Return the query, its times in UTC, or raise `InvalidArgument`."""
    if not isinstance(query, Query):
        raise InvalidArgument("query", query, "a perdure.store.Query")
    check_prefix(query.prefix)
    check_flag(query.oldest_first, "oldest_first")
    for status in query.statuses:
        if status not in get_args(RunStatus):
            raise InvalidArgument("statuses", status, f"any of {', '.join(get_args(RunStatus))}")
    for workflow in query.workflows:
        check_id(workflow, "workflows")
    for tag in query.tags:
        check_id(tag, "tags")
    if query.queue:
        check_id(query.queue, "queue")
    return replace(
        query,
        statuses=tuple(dict.fromkeys(query.statuses)),
        workflows=tuple(dict.fromkeys(query.workflows)),
        tags=tuple(dict.fromkeys(query.tags)),
        since=None if query.since is None else as_utc(query.since, "since"),
        until=None if query.until is None else as_utc(query.until, "until"),
    )


def is_counted_by_index(query: Query) -> bool:
    """Return whether the query filters by status and workflow only."""
    return query == Query(statuses=query.statuses, workflows=query.workflows)


def shows_system_runs(query: Query) -> bool:
    """Return whether the query finds ids that begin with `~`."""
    return query.prefix.startswith("~")


def page_of(query: Query, result: SearchResult, limit: int) -> Page:
    """Return the results of a search for up to `limit` runs as a page."""
    runs = tuple(with_cursor(query, run) for run in result.runs)
    if len(runs) == limit:
        return Page(runs, runs[-1].cursor)
    if result.stopped_at is None:
        return Page(runs)
    return Page(runs, _cursor(result.stopped_at), result.stopped_at.time)


def with_cursor(query: Query, run: RunSummary) -> RunSummary:
    """Return the run with the cursor that continues the query after it."""
    return replace(run, cursor=_cursor(position_of(query, run)))


def position_of(query: Query, run: RunSummary) -> Position:
    """Return the position of a run in the results of the query."""
    time = run.created_at if query.tags else None
    return Position(run.updated_at if time is None else time, run.id)


def _cursor(position: Position) -> str:
    return f"{position.time.isoformat()} {position.id}"


def read_cursor(cursor: str | None) -> Position | None:
    """Return the position in a cursor, or raise `InvalidArgument`."""
    if cursor is None:
        return None
    time, _, id = cursor.partition(" ") if isinstance(cursor, str) else ("", "", "")
    if not id:
        raise InvalidArgument("after", cursor, "the cursor of a page or of a listed run")
    return Position(parse_iso(time, "after"), id)


def matches(query: Query, run: RunSummary) -> bool:
    """Return whether a run matches the query."""
    return (
        run.id.startswith(query.prefix)
        and (shows_system_runs(query) or not run.id.startswith("~"))
        and (not query.statuses or run.status in query.statuses)
        and (not query.workflows or run.workflow in query.workflows)
        and (query.queue is None or run.queue == query.queue)
        and all(tag in run.tags for tag in query.tags)
        and (query.since is None or run.updated_at >= query.since)
        and (query.until is None or run.updated_at < query.until)
    )


def find(
    runs: Iterable[RunSummary], query: Query, limit: int, after: Position | None
) -> SearchResult:
    """Search these runs; all of them are examined."""
    candidates = ((position_of(query, run), run) for run in runs if matches(query, run))
    if after is not None:
        oldest_first = query.oldest_first
        candidates = (
            each for each in candidates if each[0] != after and (each[0] > after) == oldest_first
        )
    sorted_runs = sorted(candidates, key=lambda each: each[0], reverse=not query.oldest_first)
    return SearchResult([run for _, run in sorted_runs[:limit]])


def count(runs: Iterable[RunSummary], query: Query, cap: int) -> list[Count]:
    """Count the runs that match, by workflow and status, up to `cap` each."""
    groups: Counter[tuple[str | None, RunStatus]] = Counter()
    groups.update((run.workflow, run.status) for run in runs if matches(query, run))
    return [
        Count(workflow, status, min(number, cap), capped=number > cap)
        for (workflow, status), number in groups.items()
    ]


def queue_ranges(prefix: str, after: str) -> Iterator[tuple[str, str | None]]:
    """Yield the ranges of queue names, ends excluded, that have the prefix and come after a name.

    Names that begin with `~` are left out, unless the prefix does.
    """
    # A name contains no NUL, so nothing sorts between a name and that name followed by U+0001.
    first = max(prefix, after + "\x01")
    ranges: Sequence[tuple[str, str | None]] = [(first, end_of_prefix(prefix))]
    if not prefix:
        ranges = [(first, "~"), (max(first, "\x7f"), None)]
    return ((low, high) for low, high in ranges if high is None or low < high)
