"""Searches of `SqlStore`: walks along an index, a part at a time.

A walk ends when enough runs were found, or `MAX_EXAMINED` runs were examined. The database filters
out most runs that do not match; the others are filtered here, so that each rule is written only
once.
"""

from base64 import b64decode
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple, TypeAlias, get_args

from msgspec.structs import replace

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, RunSummary
from perdure.stores._searching import MAX_EXAMINED, Position, SearchResult, find, matches
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import search_statements as sql
from perdure.stores.sql.conditions import (
    Condition,
    all_of,
    in_prefix,
    is_shown,
    of_group,
    of_header,
    updated_between,
)
from perdure.stores.sql.executor import Executor, chunks, digest, read_names

_ALL_STATUSES: Sequence[RunStatus] = get_args(RunStatus)
_ALL_WORKFLOWS = 2**31 - 1
_LAST_CHARACTER = "\U0010ffff"
# If at most this many runs have a prefix, they are all read by id.
_FEW = 1000
# How many runs a search with filters examines first, and the factor by which this grows.
_FIRST_PART, _GROWTH = 250, 4
# The maximum number of ranges that one statement merges, or counts.
_MAX_RANGES, _COUNTED_RANGES = 100, 50


# The time by which a search orders a run, and the run's key.
_Place: TypeAlias = tuple[int, str]


class _Walk(NamedTuple):
    """The index ranges of a search.

    `above` and `below` name the conditions for places on either side of a given one; `filters` are
    the conditions that the ranges do not cover.
    """

    range: str
    above: str
    below: str
    groups: Sequence[Condition]
    filters: Condition


class Search(Executor):
    """Finds and counts runs by their headers."""

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find up to `limit` runs."""
        if self._prefix + query.prefix:
            runs = await self._few(query)
            if runs is not None:
                return find(runs, query, limit, after)
        place = None if after is None else (to_microseconds(after.time), self._prefix + after.id)
        return await self._search(await self._walk(query), query, limit, place)

    async def _search(
        self, walk: _Walk, query: Query, limit: int, place: _Place | None
    ) -> SearchResult:
        """Walk until enough runs are found, the end is reached, or too many runs were examined."""
        is_filtered = self._prefix or query.queue is not None or query.prefix or query.tags
        part = max(limit, _FIRST_PART) if is_filtered else limit
        runs: list[RunSummary] = []
        examined_count = 0
        while True:
            part, remaining = min(part, MAX_EXAMINED - examined_count), limit - len(runs)
            rows = await self._part(walk, query, place, part, remaining)
            runs += self._matching(query, rows)
            is_at_end = not rows or (len(rows) < remaining and rows[-1][0] < part)
            if len(runs) == limit or is_at_end:
                return SearchResult(runs)
            n, time, key, *_ = rows[-1]
            examined_count, place = examined_count + n, (time, key)
            if examined_count >= MAX_EXAMINED:
                return SearchResult(runs, self._position(time, key))
            part = max(part, _FIRST_PART) * _GROWTH

    async def summaries(self, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return runs by id, with their revisions."""
        keys = [self._key(id) for id in ids]
        runs: dict[str, RunSummary] = {}
        for chunk in chunks(keys):
            result = await self._run_many(sql.SUMMARIES, len(chunk), *chunk)
            for epoch, n, message, *columns in result.rows:
                run = self._summary(*columns)
                revision = f"{epoch}.{n}.{message}.{run.owner is not None:d}"
                runs[self._prefix + run.id] = replace(run, revision=revision)
        return [runs.get(key) for key in keys]

    async def counts(self, query: Query, cap: int) -> list[Count]:
        """Count runs by workflow and status."""
        groups = await self._groups(query, None)
        counts = await self._count(groups, cap + 1)
        # Too few of the examined runs are visible: examine more.
        unclear = [group for group, (total, n) in counts.items() if n <= cap < total]
        most = cap + MAX_EXAMINED
        counts |= await self._count(unclear, most)
        return [
            Count(*group, min(n, cap), capped=n > cap or (group in unclear and total == most))
            for group, (total, n) in counts.items()
            if n or (group in unclear and total == most)
        ]

    async def _few(self, query: Query) -> list[RunSummary] | None:
        """Return all runs whose ids begin with the prefix, unless there are too many."""
        ids = in_prefix(self._prefix + query.prefix)
        result = await self._run(sql.COUNT_IDS % ids.sql, *ids.values, _FEW + 1)
        [(number,)] = result.rows
        if number > _FEW:
            return None
        rows = (await self._run(sql.BY_ID % ids.sql, *ids.values, _FEW)).rows
        return [self._summary(*row) for row in rows]

    async def _walk(self, query: Query) -> _Walk:
        """Return the walk that examines the fewest runs."""
        ids = is_shown(self._prefix, query)
        times = [*updated_between(query)]
        if query.tags:
            tags = [Condition("tag.tag = ?", [digest(query.tags[0])])]
            filters = all_of([*ids, *of_header(query), *times])
            return _Walk(sql.BY_TAG, "$tagged_above", "$tagged_below", tags, filters)
        places = ("$updated_above", "$updated_below")
        if query.statuses or query.workflows:
            groups = await self._groups(query, _MAX_RANGES)
            if len(groups) <= _MAX_RANGES:
                ranges = [all_of([self._of_group(*group), *times]) for group in groups]
                others = replace(query, statuses=(), workflows=())
                return _Walk(
                    sql.BY_GROUP,
                    *places,
                    ranges,
                    all_of([*ids, *of_header(others)]),
                )
        return _Walk(
            sql.BY_UPDATE,
            *places,
            [all_of(times)],
            all_of([*ids, *of_header(query)]),
        )

    async def _groups(
        self, query: Query, most: int | None
    ) -> Sequence[tuple[str | None, RunStatus]]:
        """Return the groups that a query covers; stop once there are more than `most` workflows."""
        workflows: Sequence[str | None] = query.workflows or await self._workflows(most)
        return [*product(workflows, query.statuses or _ALL_STATUSES)]

    def _of_group(self, workflow: str | None, status: RunStatus) -> Condition:
        return of_group(None if workflow is None else self._kind(workflow), status)

    async def _workflows(self, most: int | None) -> list[str | None]:
        """Return the workflows that runs have, and `None` for those without one."""
        limit = _ALL_WORKFLOWS if most is None else most + 1
        if self._statements.dialect.walks_recursively:
            rows = (await self._run(sql.WORKFLOWS_BY_LOOKUP, limit)).rows
        else:
            rows = await self._next_workflows(limit)
        return [*dict.fromkeys([*(workflow for (workflow,) in rows), None])]

    async def _next_workflows(self, limit: int) -> Sequence[tuple[Any, ...]]:
        """Return the workflows that runs have, with one statement per workflow."""
        rows: list[tuple[Any, ...]] = []
        kind = ""
        while len(rows) < limit and (next_rows := (await self._run(sql.NEXT_WORKFLOW, kind)).rows):
            rows += next_rows
            kind = self._kind(next_rows[0][0])
        return rows

    async def _part(
        self, walk: _Walk, query: Query, place: _Place | None, part: int, limit: int
    ) -> Sequence[tuple[Any, ...]]:
        """Return the next rows of a walk: the runs that match, and the last one in any case."""
        order = "ASC" if query.oldest_first else "DESC"
        side = walk.above if query.oldest_first else walk.below
        after = [] if place is None else [Condition(side, [place[0], *place])]
        groups = [all_of([group, *after]) for group in walk.groups]
        ranges = [walk.range % {"conditions": group.sql, "order": order} for group in groups]
        values = [value for group in groups for value in (*group.values, part)]
        parts = {"filters": walk.filters.sql, "order": order, "ranges": " UNION ALL ".join(ranges)}
        values += part, *walk.filters.values, part, limit
        return (await self._run(sql.SEARCH % parts, *values)).rows

    def _matching(self, query: Query, rows: Sequence[tuple[Any, ...]]) -> Iterator[RunSummary]:
        for _, time, _, key, *columns in rows:
            if key is None:
                continue
            run = self._summary(key, *columns)
            # A tag of an earlier run with the same id has a different time.
            is_current = not query.tags or run.created_at == from_microseconds(time)
            if is_current and matches(query, run):
                yield run

    async def _count(
        self, groups: Sequence[tuple[str | None, RunStatus]], most: int
    ) -> dict[tuple[str | None, RunStatus], tuple[int, int]]:
        """Return how many runs of each group were examined, up to `most`, and are visible."""
        ids = all_of(is_shown(self._prefix, Query()))
        counts: dict[tuple[str | None, RunStatus], tuple[int, int]] = {}
        for chunk in chunks(groups, _COUNTED_RANGES):
            conditions = [self._of_group(*group) for group in chunk]
            parts = [sql.COUNT_GROUP % (ids.sql, condition.sql) for condition in conditions]
            values: list[object] = []
            for place, condition in enumerate(conditions):
                values += place, *ids.values, *condition.values, most
            rows = (await self._run(" UNION ALL ".join(parts), *values)).rows
            counts |= {chunk[place]: (total, n) for place, total, n in rows}
        return counts

    def _summary(
        self,
        key: str,
        updated_at: int,
        status: RunStatus,
        workflow: str | None,
        owner: str | None,
        version: int,
        queue: str,
        tags: str | None,
        summary: str | None,
        created_at: int,
        wake_at: int | None,
        awaits_text: str | None,
        takeovers: int,
    ) -> RunSummary:
        return RunSummary(
            id=self._id(key),
            updated_at=from_microseconds(updated_at),
            status=status,
            workflow=workflow,
            owner=owner,
            version=version,
            queue=queue,
            tags=read_names(tags),
            summary=b64decode(summary or ""),
            created_at=from_microseconds(created_at),
            wake_at=_time_or_none(wake_at),
            awaits=read_names(awaits_text),
            takeovers=takeovers,
        )

    def _position(self, time: int, key: str) -> Position:
        """Return a place as the position after which a search continues."""
        at = from_microseconds(time)
        if key.startswith(self._prefix):
            return Position(at, self._id(key))
        # The run has another prefix: continue before or after all ids of this one.
        return Position(at, "\x01" if key < self._prefix else _LAST_CHARACTER)


def _time_or_none(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else from_microseconds(microseconds)
