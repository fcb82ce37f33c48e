"""Due runs of `SqlStore`: each queue and workflow is a range of one index."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import md5
from itertools import groupby, islice
from typing import Any, NamedTuple

from perdure.store import Drivable, Due, NewRun
from perdure.stores._reading import Granted
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.sql import search_statements as search
from perdure.stores.sql import statements as sql
from perdure.stores.sql.conditions import in_prefix
from perdure.stores.sql.creation import enqueued_row
from perdure.stores.sql.executor import chunks, to_micros
from perdure.stores.sql.leases import Leases

_NEWEST_VERSION = 2**62
# How many ranges one statement reads, and how many pairs of queue and workflow another lists.
_RANGES, _PAIRS = 100, 500
# Names have at most 512 characters.
_AFTER_NAMES = "\U0010ffff" * 513


class _Range(NamedTuple):
    """The runs of a queue that have these versions of a workflow, which is `None` if they have
    none; at most `most` of them.
    """

    queue: str
    kind: str | None
    first: int
    last: int
    most: int


class Schedule(Leases):
    """Creates runs that wait for a claim, and finds those that are due."""

    async def enqueue(self, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs; return `False` for each id that existed."""
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(self._key(run.id), run)
        created: set[str] = set()
        for chunk in chunks(sorted(first)):
            rows = [enqueued_row(key, first[key]) for key in chunk]
            created |= await self._insert(rows, self._new_ticket())
        keys = [self._key(run.id) for run in runs]
        return [key in created and first[key] is run for key, run in zip(keys, runs, strict=True)]

    async def due(
        self,
        now: datetime,
        limit: int,
        drives: Sequence[Drivable] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        """Return the unowned runs whose wake time is at or before `now`, earliest first."""
        rows = await self._due(to_microseconds(now, "now"), limit, drives, queues)
        return [Due(self._id(key), from_microseconds(wake_at)) for wake_at, key, _ in rows]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        drives: Sequence[Drivable] | None,
        queues: Mapping[str, int],
    ) -> list[Granted]:
        """Return up to `limit` grants of runs that are due, earliest first."""
        granted: dict[str, Granted] = {}
        due = await self._due(None, limit, drives, queues)
        for chunk in chunks(due):
            ticket = self._new_ticket()
            keys = sorted(key for _, key, _ in chunk)
            wake_times = [wake_at for wake_at, _, _ in chunk]
            values = (None, owner, ticket, to_micros(ttl), *keys, *wake_times)
            await self._run_many(sql.CLAIM, len(chunk), *values)
            granted |= await self._read_granted(keys, owner, ticket)
        return [granted[id] for _, key, _ in due if (id := self._id(key)) in granted]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> list[str]:
        """Return queues with due runs, by name."""
        at = to_microseconds(now, "now")
        names: list[str] = []
        start: tuple[str, str] | None = (low, "")
        while start is not None and len(names) < limit:
            pairs, start = await self._pairs(*start, high or _AFTER_NAMES)
            ranges = [_Range(queue, kind, 0, _NEWEST_VERSION, 1) for queue, kind in pairs]
            due = {queue for _, _, queue in await self._due_in(ranges, at, "")}
            names += sorted(due - {*names})
        return names[:limit]

    async def _due(
        self,
        now: int | None,
        limit: int,
        drives: Sequence[Drivable] | None,
        queues: Mapping[str, int],
    ) -> list[tuple[Any, ...]]:
        """Return wake time, key and queue of runs that are due at `now`, or at present."""
        if drives is None:
            ranges = await self._all_ranges(queues)
        else:
            ranges = self._drivable(drives, queues)
        # What is due at present is unowned or orphaned.
        rows = await self._due_in(ranges, now, "" if now is None else search.NOT_LEASED)
        by_queue = groupby(sorted(rows, key=lambda row: (row[2], row[0])), lambda row: row[2])
        due = [row for queue, group in by_queue for row in islice(group, queues[queue])]
        return sorted(due, key=lambda row: row[:2])[:limit]

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
        values = (range.queue, *kinds, range.first, range.last, now, *prefix.values, range.most)
        return search.DUE % (of_kind, f"{condition} AND {prefix.sql}"), values

    def _drivable(self, drives: Sequence[Drivable], queues: Mapping[str, int]) -> Sequence[_Range]:
        """Return the ranges of what a worker can drive."""
        versions: dict[str, list[tuple[int, int]]] = {}
        for drivable in drives:
            # Every Drivable of a workflow includes version 0.
            versions.setdefault(self._kind(drivable.workflow), [(0, 0)]).append(
                (drivable.first, drivable.last)
            )
        return [
            _Range(queue, kind, first, last, most)
            for queue, most in queues.items()
            for kind, intervals in versions.items()
            for first, last in _joined(intervals)
        ]

    def _kind(self, workflow: str) -> str:
        """Return a workflow as it is in the index."""
        if not self._statements.dialect.hashes_workflows:
            return workflow
        return md5(workflow.encode(), usedforsecurity=False).hexdigest()

    async def _all_ranges(self, queues: Mapping[str, int]) -> Sequence[_Range]:
        """Return the ranges of all runs in these queues."""
        ranges: list[_Range] = []
        for queue, most in queues.items():
            # Runs without a workflow are in no queue.
            kinds: list[str | None] = [] if queue else [None]
            start: tuple[str, str] | None = (queue, "")
            while start is not None:
                pairs, start = await self._pairs(*start, f"{queue}\x01")
                kinds += [kind for _, kind in pairs]
            ranges += (_Range(queue, kind, 0, _NEWEST_VERSION, most) for kind in kinds)
        return ranges

    async def _pairs(
        self, queue: str, kind: str, high: str
    ) -> tuple[list[tuple[str, str]], tuple[str, str] | None]:
        """Return queues with their workflows, from after this pair to below `high`; and the pair
        after which to continue.
        """
        if self._statements.dialect.finds_distinct:
            values = (queue, queue, kind, high, _PAIRS)
            rows = (await self._run(search.KINDS_DISTINCT, *values)).rows
        else:
            rows = (await self._run(search.KINDS_BY_LOOKUP, queue, kind, high, _PAIRS)).rows
        pairs = [
            (queue, kind) for queue, kind in rows if kind and queue is not None and queue < high
        ]
        if len(rows) < _PAIRS:
            return pairs, None
        last_queue, last_kind = rows[-1]
        if last_queue is None or last_queue >= high:
            return pairs, None
        # Without a workflow the queue is at its end; no name is between it and the next.
        return pairs, (last_queue, last_kind) if last_kind is not None else (
            f"{last_queue}\x01",
            "",
        )


def _joined(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the intervals without overlaps: a run in two of them would be found twice."""
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
