"""Search runs by status, workflow, tag, id and time, counting every examined run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from perdure.store import Query, RunSummary
from perdure.stores._prefix import end_of_prefix
from perdure.stores._searching import (
    MAX_EXAMINED,
    Position,
    SearchResult,
    find,
    position_of,
    shows_system_runs,
)
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item
from perdure.stores.redis.node import Value
from perdure.stores.redis.replies import (
    read_revised_summary,
    read_summary,
    to_json,
    without_none,
    workflow_argument,
)
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.server import Call

# A script blocks all other clients, so it examines at most this many runs, and is then continued.
_MAX_RUNS = 2000

# If at most this many ids have the prefix, all of their runs are read.
_FEW = 1000

_MICROSECOND = timedelta(microseconds=1)


class _Mark(NamedTuple):
    """A place in a search: a time in microseconds, and a stored id."""

    time: int
    id: bytes


@dataclass(slots=True)
class _Walk:
    """A walk over a group of shards: where it stopped, what it found, how many runs are left."""

    keys: Sequence[bytes]
    mark: _Mark | None
    remaining: int
    runs: list[RunSummary] = field(default_factory=list)

    def add(self, reply: Sequence[Any], prefix: str) -> None:
        """Add what one call found."""
        stop, examined_count, descriptions = reply
        self.mark = None if stop is None else _Mark(int(stop[0]), stop[1])
        self.remaining -= examined_count
        self.runs += [read_summary(each, prefix) for each in descriptions]


class Searches:
    """Searches among the runs of one store."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._prefix = runs.prefix

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find up to `limit` runs."""
        if self._prefix + query.prefix:
            few = await self._few(query.prefix)
            if few is not None:
                return find(few, query, limit, after)
        walks = await self._walk(query, limit, after)
        return self._combine(query, limit, walks)

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        """Return runs by id."""
        answers = await self._runs.each(scripts.SUMMARIES, [Item(id, ()) for id in ids])
        return [answer and read_revised_summary(answer, self._prefix) for answer in answers]

    async def _few(self, prefix: str) -> Sequence[RunSummary] | None:
        """Return all runs whose ids begin with the prefix, or `None` if there are many."""
        values = (*id_range(self._prefix + prefix), _FEW)
        groups = [[self._runs.keys.ids(shard) for shard in group] for group in self._runs.groups]
        replies = await self._runs.server.run(scripts.IDS, [Call(keys, values) for keys in groups])
        if sum(count for count, _ in replies) > _FEW:
            return None
        return [read_summary(each, self._prefix) for _, some in replies for each in some]

    async def _walk(self, query: Query, limit: int, after: Position | None) -> Sequence[_Walk]:
        """Walk over all groups of shards until each has found enough, or has no more to examine."""
        walks = active = self._walks(after)
        while active:
            calls = [self._call(query, limit, walk) for walk in active]
            replies = await self._runs.server.run(scripts.SEARCH, calls)
            for walk, reply in zip(active, replies, strict=True):
                walk.add(reply, self._prefix)
            active = [walk for walk in active if walk.mark is not None and walk.remaining > 0]
        return walks

    def _walks(self, after: Position | None) -> Sequence[_Walk]:
        """Return the walks over all groups of shards, at their start."""
        start = None
        if after is not None:
            start = _Mark(to_microseconds(after.time), (self._prefix + after.id).encode())
        most = MAX_EXAMINED // len(self._runs.groups)
        groups = [[self._runs.keys.lists(shard) for shard in group] for group in self._runs.groups]
        return [_Walk(keys, start, most) for keys in groups]

    def _call(self, query: Query, limit: int, walk: _Walk) -> Call:
        mark: tuple[Value, Value] = ("", "") if walk.mark is None else walk.mark
        hidden_prefix = "" if shows_system_runs(query) else self._prefix + "~"
        values = (
            limit - len(walk.runs),
            min(_MAX_RUNS, walk.remaining),
            self._prefix + query.prefix,
            hidden_prefix,
            int(not query.oldest_first),
            *_bounds(query, walk.mark),
            *mark,
            _filters(query),
        )
        return Call(walk.keys, values)

    def _combine(self, query: Query, limit: int, walks: Sequence[_Walk]) -> SearchResult:
        """Return the runs that all walks found, up to where the first of them stopped."""
        runs = [run for walk in walks for run in walk.runs]
        newest_first = not query.oldest_first
        runs.sort(key=lambda run: position_of(query, run), reverse=newest_first)
        stops = [self._position(query, walk.mark) for walk in walks if walk.mark is not None]
        if not stops:
            return SearchResult(runs[:limit])
        stop = max(stops) if newest_first else min(stops)
        is_reached = stop.__le__ if newest_first else stop.__ge__
        complete = [run for run in runs if is_reached(position_of(query, run))]
        return SearchResult(complete[:limit], None if len(complete) >= limit else stop)

    def _position(self, query: Query, mark: _Mark) -> Position:
        """Return the position at which a walk has stopped.

        A stored id without the prefix cannot be part of a position. Either all or none of the ids
        with the prefix come before it, so the position is then at the end or the start of its time.
        """
        prefix = self._prefix.encode()
        time = from_microseconds(mark.time)
        if mark.id.startswith(prefix):
            return Position(time, mark.id.decode()[len(self._prefix) :])
        return Position(time + _MICROSECOND if mark.id > prefix else time, "\x01")


def id_range(prefix: str) -> tuple[str, str]:
    """Return the range of ids with a prefix, as the server's lexicographic ranges are written."""
    end = end_of_prefix(prefix)
    return "[" + prefix, "+" if end is None else "(" + end


def _bounds(query: Query, mark: _Mark | None) -> tuple[Value, Value]:
    """Return the first and the last time of a walk, in its order."""
    # A search by tag is ordered by creation, but these refer to the last update.
    since = None if query.tags or query.since is None else to_microseconds(query.since)
    until = None if query.tags or query.until is None else to_microseconds(query.until)
    low: Value = "-inf" if since is None else since
    high: Value = "+inf" if until is None else f"({until}"
    if mark is not None and query.oldest_first:
        low = mark.time if since is None else max(since, mark.time)
    elif mark is not None and (until is None or mark.time < until):
        high = mark.time
    return (low, high) if query.oldest_first else (high, low)


def _filters(query: Query) -> bytes:
    """Return what a script compares, as JSON."""
    filters = {
        "statuses": query.statuses or None,
        "workflows": [workflow_argument(each) for each in query.workflows] or None,
        "queue": query.queue,
        "tags": query.tags or None,
        "since": None if query.since is None else to_microseconds(query.since),
        "before": None if query.until is None else to_microseconds(query.until),
    }
    return to_json(without_none(filters))
