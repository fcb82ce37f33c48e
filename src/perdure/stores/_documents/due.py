"""Finding runs that need a worker, through their wake lines."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from heapq import heappop, heappush
from typing import Generic

import msgspec

from perdure.errors import StoreCorrupted
from perdure.store import SupportedVersions
from perdure.stores._documents.records import H, Wake
from perdure.stores._documents.runs import unconsumed_messages
from perdure.stores._documents.storage import Scan, Storage, StoredRun
from perdure.stores._reading import FIRST_SETBACK, LONGEST_SETBACK, reading

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)
_FIRST_SETBACK, _LONGEST_SETBACK = FIRST_SETBACK // _MICROSECOND, LONGEST_SETBACK // _MICROSECOND
_MOST_SETBACKS = 10_000


class Planner(Generic[H]):
    """Determines when runs need a worker. Runs that cannot be read are logged once and delayed.

    A run whose head cannot be read cannot even be leased, unlike a run whose snapshot cannot be
    read, so only its wake line records the delay.
    """

    def __init__(self, storage: Storage[H]) -> None:
        self._storage = storage
        self._setbacks: dict[str, tuple[int, int]] = {}

    async def plans(self, lines: Sequence[Wake], now: int) -> list[Wake | None]:
        """Return when, and in which queue, the run of each line needs a worker."""
        heads = await self._storage.heads([line.id for line in lines])
        pairs = zip(lines, heads, strict=True)
        return [await self._plan(line, head, now) for line, head in pairs]

    async def _plan(self, line: Wake, head: H | StoreCorrupted | None, now: int) -> Wake | None:
        if head is None:
            return None
        try:
            if isinstance(head, StoreCorrupted):
                raise head
            wake_at = head.wake_at
            if head.awaits:
                with reading(line.id, msgspec.MsgspecError):
                    wake_at = await wake_time(self._storage.run(line.id), head)
        except StoreCorrupted as error:
            return line._replace(at=self._set_back(line.id, error, now))
        return None if wake_at is None else head.wake(wake_at)

    def _set_back(self, id: str, error: StoreCorrupted, now: int) -> int:
        """Return when to try again; the delay grows with every attempt."""
        until, delay = self._setbacks.pop(id, (0, 0))
        if not delay:
            logger.error("%s; it is left out of claims for a while", error, exc_info=error)
        if until <= now:
            delay = min(2 * delay, _LONGEST_SETBACK) or _FIRST_SETBACK
            until = now + delay
        self._setbacks[id] = (until, delay)
        if len(self._setbacks) > _MOST_SETBACKS:
            del self._setbacks[next(iter(self._setbacks))]
        return until


class DueSearch(Generic[H]):
    """The runs of some queues that need a worker at a given time, earliest first.

    A line only says where to look: the run's head says when it needs a worker. Lines of workflows
    and versions that are not supported are skipped, so that their runs are not read.
    """

    def __init__(
        self,
        storage: Storage[H],
        planner: Planner[H],
        prefix: str,
        supports: Sequence[SupportedVersions] | None,
        queues: Iterable[str],
        at: int,
        now: int,
    ) -> None:
        self._storage = storage
        self._planner = planner
        self._latest = max(at, now)
        self._now = now
        runs = _Filter(prefix, supports)
        self._queues = {
            queue: _QueueSearch(queue, storage.wakes.scan(queue, at, now, runs.accepts), runs, at)
            for queue in queues
        }

    async def next(self, limit: int, most: Mapping[str, int]) -> list[Wake]:
        """Return up to `limit` more runs, within the limits of their queues; none at the end."""
        quotas = dict(most)
        wakes: list[Wake] = []
        while len(wakes) < limit:
            searches = [self._queues[queue] for queue in quotas if quotas[queue] > 0]
            await self._read(searches, limit - len(wakes))
            ready = [(search.first, search) for search in searches if search.first is not None]
            if not ready:
                break
            _, search = min(ready, key=lambda pair: pair[0])
            wakes.append(search.pop())
            quotas[search.queue] -= 1
        return wakes

    async def queues(self) -> list[str]:
        """Return the queues that have runs to claim."""
        await self._read([*self._queues.values()], len(self._queues))
        return [search.queue for search in self._queues.values() if search.first is not None]

    def mark_claimed(self, wake: Wake) -> None:
        """Note that a run was claimed, so that its lines are no longer needed."""
        self._queues[wake.queue].scan.mark_claimed(wake.id)

    async def tidy(self) -> None:
        """Remove the lines that turned out to be out of date."""

        async def plan(line: Wake) -> Wake | None:
            (current,) = await self._planner.plans([line], self._now)
            return current

        for search in self._queues.values():
            await search.scan.tidy(plan, self._now)

    async def _read(self, searches: Sequence["_QueueSearch"], count: int) -> None:
        """Read lines and their runs until each search knows its first run."""
        while unknown := [search for search in searches if search.needs_lines]:
            share = max(count, self._storage.read_ahead) // len(unknown) or 1
            lines = await self._gather(unknown, share)
            unread = [(search, line) for search in unknown for line in lines[search.queue]]
            plans = await self._planner.plans([line for _, line in unread], self._latest)
            for (search, line), plan in zip(unread, plans, strict=True):
                search.add(line, plan)

    async def _gather(
        self, searches: Sequence["_QueueSearch"], count: int
    ) -> Mapping[str, Collection[Wake]]:
        if len(searches) == 1:
            return {searches[0].queue: await searches[0].read(count)}
        lines = await self._storage.gather(lambda search: search.read(count), searches)
        return {search.queue: each for search, each in zip(searches, lines, strict=True)}


class _QueueSearch:
    """The search in one queue.

    An outdated line can announce a run too early. The run is then held back until the lines have
    been read up to its actual time.
    """

    def __init__(self, queue: str, scan: Scan, runs: "_Filter", at: int) -> None:
        self.queue = queue
        self.scan = scan
        self._runs = runs
        self._at = at
        self._read: set[str] = set()
        self._read_until = 0
        self._is_at_end = False
        self._due: list[Wake] = []

    @property
    def first(self) -> Wake | None:
        """The earliest run, or `None` while an unread line may be earlier."""
        if not self._due:
            return None
        is_known = self._is_at_end or self._due[0].at <= self._read_until
        return self._due[0] if is_known else None

    @property
    def needs_lines(self) -> bool:
        return self.first is None and not self._is_at_end

    def pop(self) -> Wake:
        return heappop(self._due)

    async def read(self, count: int) -> Collection[Wake]:
        """Return up to `count` more lines, one for each run."""
        lines = await self.scan.next(count)
        self._is_at_end = len(lines) < count
        if lines:
            self._read_until = lines[-1].at
        unread: dict[str, Wake] = {}
        for line in lines:
            if line.id not in self._read:
                unread.setdefault(line.id, line)
        self._read.update(unread)
        return unread.values()

    def add(self, line: Wake, plan: Wake | None) -> None:
        """Add the run of a line if it is due and in this queue."""
        if plan is None or plan.at > self._at:
            self.scan.mark_outdated(line.id, plan)
            return
        if plan[2:] != line[2:]:
            # Otherwise, workers that cannot execute the run would read it again and again.
            self.scan.mark_outdated(line.id, plan)
        if plan.queue == self.queue and self._runs.accepts(plan):
            heappush(self._due, plan)


class _Filter:
    """Selects the runs that have the store's prefix and that the worker can execute."""

    def __init__(self, prefix: str, supports: Sequence[SupportedVersions] | None) -> None:
        self._prefix = prefix
        self._versions: dict[str | None, list[SupportedVersions]] | None = None
        if supports is not None:
            self._versions = {}
            for each in supports:
                self._versions.setdefault(each.workflow, []).append(each)

    def accepts(self, wake: Wake) -> bool:
        if not wake.id.startswith(self._prefix):
            return False
        if self._versions is None:
            return True
        supported = self._versions.get(wake.workflow)
        if supported is None:
            return False
        return not wake.version or any(
            each.first <= wake.version <= each.last for each in supported
        )


async def wake_time(run: StoredRun[H], head: H) -> int | None:
    """Return when a run needs a worker: a message that it awaits wakes it sooner."""
    if not head.awaits:
        return head.wake_at
    messages = await unconsumed_messages(run, head)
    times = (message.sent_at for message in messages if message.name in head.awaits)
    return min(times, default=head.wake_at)
