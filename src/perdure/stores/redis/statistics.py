"""Count runs and queues, and delete old runs."""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, cast

from perdure.snapshot import RunStatus
from perdure.store import Count, Query, QueueStats, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores._searching import MAX_EXAMINED, SearchResult, position_of
from perdure.stores._timestamps import from_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item
from perdure.stores.redis.keys import SHARDS
from perdure.stores.redis.node import Value
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.search import Searches, id_range
from perdure.stores.redis.server import Call

_MICROSECOND = timedelta(microseconds=1)

# A script blocks all other clients, so it deletes at most this many runs.
_PRUNED_AT_ONCE = 200


@dataclass(slots=True)
class _QueueTally:
    """The numbers of one queue; the oldest wake time in microseconds."""

    due: int = 0
    leased: int = 0
    oldest: int | None = None

    def add(self, due: int, leased: int, oldest: int | None) -> None:
        self.due += due
        self.leased += leased
        times = [time for time in (self.oldest, oldest) if time is not None]
        self.oldest = min(times, default=None)


class _Tally:
    """Runs by list, and by queue."""

    def __init__(self) -> None:
        self.lists: Counter[bytes] = Counter()
        self.queues: defaultdict[str, _QueueTally] = defaultdict(_QueueTally)

    def add(self, lists: Sequence[Any], queues: Sequence[Any]) -> None:
        """Add what a script has counted."""
        for list, number in _split_rows(lists, 2):
            self.lists[list] += number
        for queue, due, leased, oldest in _split_rows(queues, 4):
            self.add_queue(queue, due, leased, oldest)

    def add_queue(self, queue: bytes, due: int, leased: int, oldest: bytes) -> None:
        """Add numbers of a queue; "" stands for no wake time."""
        name = queue.decode()
        if not name.startswith("~"):
            self.queues[name.partition("/")[0]].add(due, leased, int(oldest) if oldest else None)

    def stats(self) -> Stats:
        by_status: Counter[str] = Counter()
        for list, number in self.lists.items():
            by_status[_status_and_workflow(list)[0]] += number
        by_queue = {
            name: QueueStats(tally.due, tally.leased, _time(tally.oldest))
            for name, tally in self.queues.items()
            if tally.due or tally.leased
        }
        oldest = [queue.oldest_due for queue in by_queue.values() if queue.oldest_due is not None]
        return Stats(by_status, min(oldest, default=None), by_queue)


class Statistics:
    """Counts and prunes the runs of one store.

    Without a prefix, runs are counted by the sizes of indexes; with a prefix, one by one.
    """

    def __init__(self, runs: Runs, searches: Searches) -> None:
        self._runs = runs
        self._searches = searches

    async def stats(self) -> Stats:
        """Count the runs by status and queue."""
        tally = _Tally()
        if self._runs.prefix:
            async for _ in self._count_by_id(tally):
                pass
        else:
            lists = await self._lists()
            tally.lists = _sizes(lists)
            await self._count_due(tally)
            await self._count_leased(tally, lists)
        return tally.stats()

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        """Count runs by workflow and status."""
        is_partial = False
        if self._runs.prefix:
            tally = _Tally()
            async for examined_count in self._count_by_id(tally):
                is_partial = examined_count >= MAX_EXAMINED
                if is_partial:
                    break
            lists = tally.lists
        else:
            lists = _sizes(await self._lists())
        return [*_counts(lists, query, cap, is_partial)]

    async def prune(self, request: PruneRequest) -> int:
        """Delete runs that are over and old, or count them."""
        before = await self._runs.now() - request.older_than // _MICROSECOND
        if before <= 0:
            return 0
        query = Query(
            statuses=tuple(request.statuses),
            workflows=() if request.workflow is None else (request.workflow,),
            tags=tuple(request.tags),
            until=from_microseconds(before),
            oldest_first=True,
        )
        pruned_count = 0
        after = None
        while pruned_count < request.limit:
            most = min(_PRUNED_AT_ONCE, request.limit - pruned_count)
            result = await self._searches.search(query, most, after)
            pruned_count += await self._prune(result, before, request.dry_run)
            if len(result.runs) < most and result.stopped_at is None:
                break
            after = result.stopped_at or position_of(query, result.runs[-1])
        return pruned_count

    async def _prune(self, result: SearchResult, before: int, dry_run: bool) -> int:
        items = [Item(run.id, ()) for run in result.runs]
        if dry_run or not items:
            return len(items)
        return sum(await self._runs.each(scripts.PRUNE, items, before))

    async def _lists(self) -> Sequence[tuple[int, bytes, int]]:
        """Return the shard, the name and the size of each list."""
        calls = [Call([self._runs.keys.lists(shard)], ()) for shard in range(SHARDS)]
        replies = await self._runs.server.run(scripts.COUNTS, calls)
        return [
            (shard, list, number)
            for shard, rows in enumerate(replies)
            for list, number in _split_rows(rows, 2)
        ]

    async def _count_due(self, tally: _Tally) -> None:
        starts: Mapping[int, Value] = dict.fromkeys(range(SHARDS), "")
        while starts:
            calls = [
                Call([self._runs.keys.wakes(shard)], (start,)) for shard, start in starts.items()
            ]
            replies = await self._runs.server.run(scripts.BACKLOG, calls)
            for queue, due, oldest in chain.from_iterable(
                _split_rows(rows, 3) for _, rows in replies
            ):
                tally.add_queue(queue, due, 0, oldest)
            following = zip(starts, replies, strict=True)
            starts = {shard: last for shard, (last, _) in following if last is not None}

    async def _count_leased(self, tally: _Tally, lists: Sequence[tuple[int, bytes, int]]) -> None:
        """Count the owned runs, all of which are in the lists of running runs."""
        for shard, list, number in lists:
            if _status_and_workflow(list)[0] == "running":
                key = self._runs.keys.list(shard, list)
                for offset in range(0, number, 1000):
                    [(_, _, queues)] = await self._tally([Call([key], ("~", offset, ""))])
                    for queue, _, leased, _ in _split_rows(queues, 4):
                        tally.add_queue(queue, 0, leased, b"")

    async def _count_by_id(self, tally: _Tally) -> AsyncIterator[int]:
        """Count the runs with this prefix; yield how many were examined so far."""
        prefix = self._runs.prefix
        low, high = id_range(prefix)
        starts: Mapping[int, Value] = dict.fromkeys(range(SHARDS), low)
        while starts:
            calls = [
                Call([self._runs.keys.ids(shard)], (prefix + "~", start, high))
                for shard, start in starts.items()
            ]
            replies = await self._tally(calls)
            for _, lists, queues in replies:
                tally.add(lists, queues)
            following = zip(starts, replies, strict=True)
            starts = {shard: b"(" + last for shard, (last, *_) in following if last is not None}
            yield tally.lists.total()

    async def _tally(self, calls: Sequence[Call]) -> Sequence[Any]:
        return await self._runs.server.run(scripts.TALLY, calls)


def _sizes(lists: Sequence[tuple[int, bytes, int]]) -> Counter[bytes]:
    """Return the total sizes of lists over all shards."""
    sizes: Counter[bytes] = Counter()
    for _, list, number in lists:
        sizes[list] += number
    return sizes


def _split_rows(rows: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield rows that a script returned as one list."""
    return (rows[at : at + width] for at in range(0, len(rows), width))


def _status_and_workflow(list: bytes) -> tuple[RunStatus, str | None]:
    status, _, workflow = list.decode().partition(":")
    return cast(RunStatus, status), workflow[1:] if workflow else None


def _counts(lists: Counter[bytes], query: Query, cap: int, is_partial: bool) -> Iterator[Count]:
    for list, number in lists.items():
        status, workflow = _status_and_workflow(list)
        is_included = (not query.statuses or status in query.statuses) and (
            not query.workflows or workflow in query.workflows
        )
        if number and is_included:
            yield Count(workflow, status, min(number, cap), capped=is_partial or number > cap)


def _time(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else from_microseconds(microseconds)
