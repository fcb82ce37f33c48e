"""Search, count and prune runs by their heads.

There is no index: every search reads all heads, but nothing else.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.snapshot import is_over
from perdure.store import Count, Query, QueueStats, RunSummary, Stats
from perdure.stores._backend import PruneRequest
from perdure.stores._documents.due import wake_time
from perdure.stores._documents.records import H
from perdure.stores._documents.runs import DocumentRuns
from perdure.stores._reading import reading
from perdure.stores._searching import Position, SearchResult, count, find
from perdure.stores._timestamps import from_microseconds

logger = logging.getLogger(__name__)


class DocumentHeaders(DocumentRuns[H]):
    """Finds runs by the contents of their heads."""

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find runs, and then check which of them a message has woken."""
        heads = {self.public_id(head.id): head for head in await self._all(query.prefix)}
        summaries = (head.to_summary(self.prefix) for head in heads.values())
        runs = find(summaries, query, limit, after).runs
        times = await self._wake_times([heads[run.id] for run in runs])
        return SearchResult([_waking_at(run, times.get(self.prefix + run.id)) for run in runs])

    async def summaries(self, ids: Sequence[str]) -> list[RunSummary | None]:
        """Return runs by id, with their revisions; `None` for runs that cannot be read."""
        return await self.storage.gather(self._summarize, await self.heads(ids))

    async def counts(self, query: Query, cap: int) -> list[Count]:
        """Count runs by workflow and status."""
        return count((head.to_summary(self.prefix) for head in await self._all()), query, cap)

    async def stats(self, now: int) -> Stats:
        """Count runs by status and queue."""
        heads = await self._mine()
        wake_times = await self._wake_times(heads)
        by_queue: dict[str, QueueStats] = {}
        for head in heads:
            wake_at = wake_times.get(head.id, head.wake_at)
            if wake_at is not None and not head.queue.startswith("~"):
                name = head.queue.partition("/")[0]
                queue = by_queue.get(name, QueueStats())
                by_queue[name] = _count_run(queue, wake_at, now, is_owned=head.owner is not None)
        by_queue = {name: queue for name, queue in by_queue.items() if queue != QueueStats()}
        oldest = [queue.oldest_due for queue in by_queue.values() if queue.oldest_due is not None]
        by_status = Counter[str](head.status for head in heads)
        return Stats(by_status, min(oldest, default=None), by_queue)

    async def old(self, request: PruneRequest, before: int) -> list[str]:
        """Return the ids of the runs to prune that were last written before `before`."""
        ids = [
            self.public_id(head.id)
            for head in await self._mine()
            if head.status in request.statuses
            and head.updated_at < before
            and request.workflow in (None, head.workflow)
            and all(tag in head.tags for tag in request.tags)
        ]
        return ids[: request.limit]

    async def prune(self, id: str, before: int) -> bool:
        """Delete a run if it is still over and was last written before `before`."""
        run = self.run(id)
        async with run.lock():
            return await self._delete(
                run, lambda head: is_over(head.status) and head.updated_at < before
            )

    async def _all(self, prefix: str = "") -> Sequence[H]:
        return await self.storage.all_heads(self.prefix + prefix)

    async def _mine(self) -> list[H]:
        """Return the heads of this store's runs, without the engine's own."""
        system = self.prefix + "~"
        return [head for head in await self._all() if not head.id.startswith(system)]

    async def _summarize(self, head: H | StoreCorrupted | None) -> RunSummary | None:
        if isinstance(head, StoreCorrupted):
            logger.error("%s; it has no summary", head, exc_info=head)
            return None
        if head is None:
            return None
        progress = await self.storage.run(head.id).progress(head)
        revision = f"{head.epoch}.{head.base[1]}.{head.is_closed:d}.{progress}"
        summary = _waking_at(head.to_summary(self.prefix), await self._wake_time(head))
        return replace(summary, revision=revision)

    async def _wake_times(self, heads: Sequence[H]) -> dict[str, int]:
        """Return the wake times of runs that messages have woken, by id."""
        waiting = [head for head in heads if head.awaits]
        times = await self.storage.gather(self._wake_time, waiting)
        pairs = zip(waiting, times, strict=True)
        return {head.id: time for head, time in pairs if time is not None}

    async def _wake_time(self, head: H) -> int | None:
        """Return when a run is due; an unreadable inbox is ignored."""
        try:
            with reading(head.id, msgspec.MsgspecError):
                return await wake_time(self.storage.run(head.id), head)
        except StoreCorrupted:
            return head.wake_at


def _waking_at(run: RunSummary, wake_at: int | None) -> RunSummary:
    return run if wake_at is None else replace(run, wake_at=from_microseconds(wake_at))


def _count_run(queue: QueueStats, wake_at: int, now: int, *, is_owned: bool) -> QueueStats:
    """Return the statistics of a queue with one more run counted."""
    if wake_at > now:
        return replace(queue, leased=queue.leased + is_owned)
    time = from_microseconds(wake_at)
    return replace(queue, due=queue.due + 1, oldest_due=min(queue.oldest_due or time, time))
