"""Due runs of `SqlStore`: each queue and workflow is a range of one index."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import Any, NamedTuple

from perdure.store import Due, NewRun, SupportedVersions
from perdure.stores._reading import Granted
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import search_statements as search
from perdure.stores.sql import statements as sql
from perdure.stores.sql.conditions import in_prefix
from perdure.stores.sql.creation import enqueued_row
from perdure.stores.sql.executor import chunks, to_micros
from perdure.stores.sql.leases import Leases

_NEWEST_VERSION = 2**62
# The maximum number of ranges that one statement reads, and of pairs of queue and workflow that one
# statement lists.
_RANGES, _PAIRS = 100, 500
# Names have at most 512 characters.
_AFTER_NAMES = "\U0010ffff" * 513


class _Range(NamedTuple):
    """Up to `most` runs of a queue that have these versions of a workflow.

    `None` stands for runs without a workflow.
    """

    queue: str
    kind: str | None
    first: int
    last: int
    most: int


class Schedule(Leases):
    """Creates runs that wait for a claim, and finds due runs."""

    async def enqueue(self, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs; return `False` for each id that existed."""
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(self._key(run.id), run)
        created_keys: set[str] = set()
        for chunk in chunks(sorted(first)):
            rows = [enqueued_row(key, first[key]) for key in chunk]
            created_keys |= await self._insert(rows, self._new_ticket())
        keys = [self._key(run.id) for run in runs]
        return [
            key in created_keys and first[key] is run for key, run in zip(keys, runs, strict=True)
        ]

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        """Return the unowned runs whose wake time is at or before `now`, earliest first."""
        rows = await self._due(to_microseconds(now, "now"), limit, supports, queues)
        return [Due(self._id(key), from_microseconds(wake_at)) for wake_at, key, _ in rows]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Granted]:
        """Return up to `limit` grants of runs that are due, earliest first."""
        grants: dict[str, Granted] = {}
        due = await self._due(None, limit, supports, queues)
        for chunk in chunks(due):
            ticket = self._new_ticket()
            keys = sorted(key for _, key, _ in chunk)
            wake_times = [wake_at for wake_at, _, _ in chunk]
            values = (None, owner, ticket, to_micros(ttl), *keys, *wake_times)
            await self._run_many(sql.CLAIM, len(chunk), *values)
            grants |= await self._read_grants(keys, owner, ticket)
        return [grants[id] for _, key, _ in due if (id := self._id(key)) in grants]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> list[str]:
        """Return queues with due runs, by name."""
        at = to_microseconds(now, "now")
        names: list[str] = []
        start: tuple[str, str] | None = (low, "")
        while start is not None and len(names) < limit:
            # A queue usually has a few workflows, and most queues found have due runs.
            most = min(5 * (limit - len(names)), _PAIRS)
            pairs, start = await self._pairs(start, high or _AFTER_NAMES, most)
            ranges = [_Range(queue, kind, 0, _NEWEST_VERSION, 1) for queue, kind in pairs]
            due = {queue for _, _, queue in await self._due_in(ranges, at, "")}
            names += sorted(due - {*names})
        return names[:limit]

    async def _due(
        self,
        now: int | None,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[tuple[Any, ...]]:
        """Return wake time, key and queue of runs that are due at `now`, by default at present."""
        if supports is None:
            ranges = await self._all_ranges(queues)
        else:
            ranges = self._supported(supports, queues)
        # A run that is due at present is unowned or orphaned.
        rows = await self._due_in(ranges, now, "" if now is None else search.NOT_LEASED)
        return _earliest(rows, limit, queues)

    async def _due_in(
        self, ranges: Sequence[_Range], now: int | None, condition: str
    ) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for chunk in chunks(ranges, _RANGES):
            parts: list[str] = []
            values: list[object] = []
            for range in chunk:
                part, part_values = self._range(range, now, condition)
                parts.append(part)
                values += part_values
            rows += (await self._run(" UNION ALL ".join(parts), *values)).rows
        return rows

    def _range(
        self, range: _Range, now: int | None, condition: str
    ) -> tuple[str, Sequence[object]]:
        """Return the statement that reads a range, and its values."""
        of_kind = search.OF_NO_KIND if range.kind is None else search.OF_KIND
        kinds = () if range.kind is None else (range.kind,)
        prefix = in_prefix(self._prefix)
        queue = range.queue
        values = (queue, queue, *kinds, range.first, range.last, now, *prefix.values, range.most)
        return search.DUE % (of_kind, f"{condition} AND {prefix.sql}"), values

    def _supported(
        self, supports: Sequence[SupportedVersions], queues: Mapping[str, int]
    ) -> Sequence[_Range]:
        """Return the ranges of the runs that a worker supports."""
        versions: dict[str, list[tuple[int, int]]] = {}
        for each in supports:
            # Every SupportedVersions of a workflow includes version 0.
            kind = self._kind(each.workflow)
            versions.setdefault(kind, [(0, 0)]).append((each.first, each.last))
        return [
            _Range(queue, kind, first, last, most)
            for queue, most in queues.items()
            for kind, intervals in versions.items()
            for first, last in _merge_intervals(intervals)
        ]

    async def _all_ranges(self, queues: Mapping[str, int]) -> Sequence[_Range]:
        """Return the ranges of all runs in these queues."""
        ranges: list[_Range] = []
        for queue, most in queues.items():
            # Runs without a workflow are in no queue.
            kinds: list[str | None] = [] if queue else [None]
            start: tuple[str, str] | None = (queue, "")
            while start is not None:
                pairs, start = await self._pairs(start, f"{queue}\x01")
                kinds += [kind for _, kind in pairs]
            ranges += (_Range(queue, kind, 0, _NEWEST_VERSION, most) for kind in kinds)
        return ranges

    async def _pairs(
        self, after: tuple[str, str], high: str, most: int = _PAIRS
    ) -> tuple[list[tuple[Any, ...]], tuple[str, str] | None]:
        """Return pairs of queue and workflow between two limits, and where to continue."""
        if self._statements.dialect.walks_recursively:
            rows = (await self._run(search.KINDS_BY_LOOKUP, *after, high, most)).rows
        else:
            rows = await self._next_kinds(*after, high, most)
        pairs = [pair for pair in rows if pair[1] and pair[0] is not None and pair[0] < high]
        return pairs, _next_start(rows[-1], high) if len(rows) == most else None

    async def _next_kinds(
        self, queue: str, kind: str, high: str, most: int
    ) -> Sequence[tuple[Any, ...]]:
        """Return the pairs after a given one, with one statement per pair."""
        rows: list[tuple[Any, ...]] = []
        while len(rows) < most:
            next_pairs = (await self._run(search.NEXT_KINDS, queue, kind, queue, high)).rows
            if not next_pairs:
                break
            queue, kind = min(next_pairs)
            rows.append((queue, kind))
        return rows


def _next_start(last: tuple[Any, ...], high: str) -> tuple[str, str] | None:
    """Return the pair after which to continue, given the last row."""
    queue, kind = last
    if queue is None or queue >= high:
        return None
    # No workflow means the end of the queue. No name sorts between it and that name followed by
    # U+0001.
    return (queue, kind) if kind is not None else (f"{queue}\x01", "")


def _earliest(
    rows: Sequence[tuple[Any, ...]], limit: int, queues: Mapping[str, int]
) -> list[tuple[Any, ...]]:
    """Return the first rows, within the limits of their queues."""
    by_queue = groupby(sorted(rows, key=lambda row: (row[2], row[0])), lambda row: row[2])
    due = [row for queue, group in by_queue for row in islice(group, queues[queue])]
    return sorted(due, key=lambda row: row[:2])[:limit]


def _merge_intervals(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge overlapping intervals: a run in two of them would be found twice."""
    current: tuple[int, int] | None = None
    for first, last in sorted(interval for interval in intervals if interval[0] <= interval[1]):
        if current is not None and first <= current[1] + 1:
            current = current[0], max(current[1], last)
            continue
        if current is not None:
            yield current
        current = first, last
    if current is not None:
        yield current
