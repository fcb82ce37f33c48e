"""The operations that find, count and prune runs by their headers; see `runs`.

A search walks an index in order, a part at a time, until it has found enough runs or has examined
`MAX_EXAMINED` runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple, TypeAlias, cast, get_args

import msgspec
from msgspec.structs import replace

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, QueueStats, RunSummary, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores._prefix import end_of_prefix
from perdure.stores._searching import MAX_EXAMINED, Position, SearchResult, shows_system_runs
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sqlite import search_statements as sql
from perdure.stores.sqlite.runs import MICROSECOND, Verb, Verbs, json_text, read_stamp, to_stamp
from perdure.stores.sqlite.statements import Statement, Value

# The place of a run in a walk: its time, as it is stored, and its key.
Place: TypeAlias = tuple[Any, str]

_ALL_STATUSES: Sequence[RunStatus] = get_args(RunStatus)

# If at most this many runs have a prefix, they are all read by id.
_FEW = 1000
# How many runs a search with filters examines per result that it needs, and the factor by which
# this grows with each statement.
_FIRST_PART, _GROWTH = 4, 8
# SQLite merges up to 500 ranges in one statement.
_MAX_RANGES = 256

# A blob sorts after all text, and so after all keys.
_AFTER_KEYS = b""
_UPDATES: tuple[Place, Place] = ("", ""), ("~", "")
_CREATIONS: tuple[Place, Place] = (-(2**63), ""), (2**63 - 1, "")
_LAST_CHARACTER = "\U0010ffff"


class _Walk(NamedTuple):
    """An index, or ranges of one, along which a search walks.

    `query` contains the conditions that the walk itself does not cover, `low` and `high` are its
    ends.
    """

    arm: str
    arms: int
    values: dict[str, Value]
    query: Query
    low: Place
    high: Place

    def after(self, place: Place) -> "_Walk":
        """Return the rest of the walk after a place."""
        if self.query.oldest_first:
            return self._replace(low=max(self.low, place))
        return self._replace(high=min(self.high, place))


class SearchVerbs(Verbs):
    """The operations that use only headers."""

    def search(self, query: Query, limit: int, after: Position | None) -> Verb[SearchResult]:
        """Find up to `limit` runs."""
        if self._prefix + query.prefix:
            runs = yield from self._search_few(query, limit, after)
            if runs is not None:
                return SearchResult(runs)
        walk = yield from self._walk(query)
        return (yield from self._search(self._start(walk, after), query, limit))

    def summaries(self, ids: Sequence[str]) -> Verb[Sequence[RunSummary | None]]:
        """Return runs by id, with their revisions."""
        keys = [self._prefix + id for id in ids]
        [outcome] = yield [self._statement(sql.SUMMARIES, ids=json_text(keys))]
        runs: dict[str, RunSummary] = {}
        for *columns, epoch, n, message in outcome.rows:
            run = self._summary(columns)
            revision = f"{epoch}.{n}.{message}.{run.owner is not None:d}"
            runs[self._prefix + run.id] = replace(run, revision=revision)
        return [runs.get(key) for key in keys]

    def counts(self, query: Query, cap: int) -> Verb[Sequence[Count]]:
        """Count runs by workflow and status."""
        values = (self._id_values(Query()) if self._prefix else self._system_range(Query())) | {
            "statuses": json_text(query.statuses or _ALL_STATUSES),
            "workflows": json_text(query.workflows or None),
            "cap": cap,
            "part": cap + MAX_EXAMINED,
        }
        template = sql.COUNTS_OF_PREFIX if self._prefix else sql.COUNTS
        [groups] = yield [self._statement(template, **values)]
        return [
            Count(workflow, status, number, capped=bool(is_capped))
            for workflow, status, number, is_capped in groups.rows
            if number or is_capped
        ]

    def prune(self, request: PruneRequest) -> Verb[int]:
        """Delete old runs, or count them; return how many."""
        delete, count = sql.PRUNE_BY_STATUS, sql.COUNT_BY_STATUS
        values = self._prune_values(request)
        if request.tags:
            delete, count = sql.PRUNE_BY_TAG, sql.COUNT_BY_TAG
            values["tag"] = request.tags[0]
        [outcome] = yield [self._statement(count if request.dry_run else delete, **values)]
        return cast("int", outcome.rows[0][0]) if request.dry_run else outcome.changed

    def stats(self) -> Verb[Stats]:
        """Count the runs by status and queue."""
        id_values, now = self._id_values(Query()), self._now()
        statuses, due, leased = yield [
            self._statement(sql.STATUSES, **id_values),
            self._statement(sql.DUE_QUEUES, now=now, **id_values),
            self._statement(sql.LEASED_QUEUES, now=now, **id_values),
        ]
        by_status = Counter[str]()
        for status, number in statuses.rows:
            by_status[status] += number
        by_queue = _queue_stats(due.rows, leased.rows)
        oldest = [queue.oldest_due for queue in by_queue.values() if queue.oldest_due is not None]
        return Stats(by_status, min(oldest, default=None), by_queue)

    def _prune_values(self, request: PruneRequest) -> dict[str, Value]:
        """Return the values that select the runs to prune."""
        return {
            **self._id_values(Query()),
            "statuses": json_text(request.statuses),
            "workflows": None if request.workflow is None else json_text([request.workflow]),
            "tags": json_text(request.tags or None),
            "older_than": request.older_than // MICROSECOND,
            "limit": request.limit,
            "now": self._now(),
        }

    def _search_few(
        self, query: Query, limit: int, after: Position | None
    ) -> Verb[Sequence[RunSummary] | None]:
        """Return the runs if few have the prefix; `None` if there are more."""
        arm = sql.BY_PREFIX_AND_CREATION if query.tags else sql.BY_PREFIX_AND_UPDATE
        walk = self._start(_Walk(arm, 1, {}, query, *_ends(query)), after)
        part = self._part(walk, query, _FEW + 1, limit)
        prefix = self._id_range(query)
        count, runs = yield [self._statement(sql.COUNT_PREFIX, part=_FEW + 1, **prefix), part]
        return None if count.rows[0][0] > _FEW else self._read_part(runs.rows)[1]

    def _walk(self, query: Query) -> Verb[_Walk]:
        """Return the walk that examines the fewest runs."""
        ends = _ends(query)
        if query.tags:
            rest = replace(query, tags=query.tags[1:])
            return _Walk(sql.BY_TAG, 1, {"tag": query.tags[0]}, rest, *ends)
        rest = replace(query, since=None, until=None)
        groups = yield from self._groups(query)
        if not 0 < len(groups) <= _MAX_RANGES:
            return _Walk(sql.BY_UPDATE, 1, {}, rest, *ends)
        values: dict[str, Value] = {}
        for n, (workflow, status) in enumerate(groups):
            values |= {f"workflow{n}": workflow, f"status{n}": status}
        rest = replace(rest, statuses=(), workflows=())
        return _Walk(sql.BY_STATUS, len(groups), values, rest, *ends)

    def _groups(self, query: Query) -> Verb[Sequence[tuple[str | None, RunStatus]]]:
        """Return the pairs of workflow and status of a query, if it has any."""
        workflows: Sequence[str | None] = query.workflows
        if not workflows:
            if not query.statuses:
                return []
            [outcome] = yield [self._statement(sql.WORKFLOWS, limit=_MAX_RANGES + 1)]
            workflows = [workflow for (workflow,) in outcome.rows]
        return [*product(workflows, query.statuses or _ALL_STATUSES)]

    def _start(self, walk: _Walk, after: Position | None) -> _Walk:
        if after is None:
            return walk
        by_creation = isinstance(walk.low[0], int)
        time = to_microseconds(after.time) if by_creation else to_stamp(after.time)
        return walk.after((time, self._prefix + after.id))

    def _search(self, walk: _Walk, query: Query, limit: int) -> Verb[SearchResult]:
        """Walk until enough runs are found, the end is reached, or too many runs were examined."""
        is_filtered = self._prefix or replace(walk.query, oldest_first=False) != Query()
        part = _FIRST_PART * limit if is_filtered else limit
        runs: list[RunSummary] = []
        remaining = MAX_EXAMINED
        while True:
            part = min(part, remaining)
            [outcome] = yield [self._part(walk, query, part, limit - len(runs))]
            last, matching = self._read_part(outcome.rows)
            runs += matching
            if last is None or last[0] < part or len(runs) == limit:
                return SearchResult(runs)
            remaining -= part
            if not remaining:
                return SearchResult(runs, self._position(last[1]))
            walk = walk.after(last[1])
            part *= _GROWTH

    def _part(self, walk: _Walk, query: Query, part: int, limit: int) -> Statement:
        """Return the statement that examines the next runs of a walk."""
        template = sql.OLDEST_FIRST if query.oldest_first else sql.NEWEST_FIRST
        (low, low_id), (high, high_id) = walk.low, walk.high
        ends = {"low": low, "low_id": low_id, "high": high, "high_id": high_id}
        values = {**walk.values, **ends, **self._id_values(query), **_filters(query)}
        return Statement(
            self._statements.sql(template, walk.arm, walk.arms),
            {**values, "part": part, "limit": limit},
        )

    def _read_part(
        self, rows: Sequence[tuple[Any, ...]]
    ) -> tuple[tuple[int, Place] | None, Sequence[RunSummary]]:
        """Return how many runs were examined, the last one's place, and the runs that match."""
        if not rows:
            return None, []
        examined_count, time, key, *_ = rows[0]
        return (examined_count, (time, key)), [self._summary(row[2:]) for row in rows[1:]]

    def _summary(self, row: Sequence[Any]) -> RunSummary:
        key, listed_at, status, workflow, *header, created_at, wake_at, awaits, takeovers = row
        owner, version, queue, tags, summary = header
        return RunSummary(
            *(self._id(key), read_stamp(listed_at), status, workflow),
            owner=owner,
            version=version,
            queue=queue,
            tags=_read_names(tags),
            summary=summary,
            created_at=_time_or_none(created_at),
            wake_at=_time_or_none(wake_at),
            awaits=_read_names(awaits),
            takeovers=takeovers,
        )

    def _id_values(self, query: Query) -> dict[str, Value]:
        """Return the values that select ids: the prefix, and whether to show system runs."""
        return self._id_range(query) | self._system_range(query)

    def _system_range(self, query: Query) -> dict[str, Value]:
        """Return the range of ids that are not shown: the engine's own, or none."""
        system = self._prefix + "~"
        start = _AFTER_KEYS if shows_system_runs(query) else system
        return {"system": start, "system_end": end_of_prefix(system)}

    def _id_range(self, query: Query) -> dict[str, Value]:
        prefix = self._prefix + query.prefix
        end = end_of_prefix(prefix)
        return {"prefix": prefix, "prefix_end": _AFTER_KEYS if end is None else end}

    def _position(self, place: Place) -> Position:
        """Return a place as the position after which a search continues."""
        time, key = place
        at = from_microseconds(time) if isinstance(time, int) else read_stamp(time)
        if key.startswith(self._prefix):
            return Position(at, self._id(key))
        # The run has another prefix: continue before or after all ids of this one.
        return Position(at, "\x01" if key < self._prefix else _LAST_CHARACTER)


def _ends(query: Query) -> tuple[Place, Place]:
    """Return the ends of the walk that answers a query, both excluded."""
    low, high = _CREATIONS if query.tags else _UPDATES
    if not query.tags:
        # No key is empty: all runs of that time come after this place.
        low = low if query.since is None else (to_stamp(query.since), "")
        high = high if query.until is None else (to_stamp(query.until), "")
    return low, high


def _filters(query: Query) -> dict[str, Value]:
    return {
        "statuses": json_text(query.statuses or None),
        "workflows": json_text(query.workflows or None),
        "queue": query.queue,
        "tags": json_text(query.tags or None),
        "since": None if query.since is None else to_stamp(query.since),
        "until": None if query.until is None else to_stamp(query.until),
    }


def _queue_stats(
    due: Sequence[tuple[Any, ...]], leased: Sequence[tuple[Any, ...]]
) -> Mapping[str, QueueStats]:
    queues = {
        name: QueueStats(number, 0, from_microseconds(oldest)) for name, number, oldest in due
    }
    for name, number in leased:
        queues[name] = replace(queues.get(name, QueueStats()), leased=number)
    return queues


def _time_or_none(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else from_microseconds(microseconds)


def _read_names(text: str | None) -> tuple[str, ...]:
    if text is None or text == "[]":
        return ()
    return msgspec.json.decode(text, type=tuple[str, ...])
