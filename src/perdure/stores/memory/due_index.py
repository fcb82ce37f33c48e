"""The due index of a memory store: runs by queue, workflow, version and wake time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush, merge
from itertools import count
from typing import Generic, TypeVar

from perdure.store import SupportedVersions


@dataclass(slots=True, eq=False, kw_only=True)
class IndexedRun:
    """The fields of a run that a `DueIndex` uses.

    `entry` is the number of the run's current index entry; entries with another one are stale.
    """

    id: str
    workflow: str | None = None
    queue: str = ""
    version: int = 0
    wake_at: datetime | None = None
    entry: int = 0


R = TypeVar("R", bound=IndexedRun)


class DueIndex(Generic[R]):
    """Runs by wake time.

    Each queue, workflow and version has its own heap, so that a query reads only relevant runs.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[tuple[str | None, int], _WakeHeap[R]]] = {}
        self._entries = count(1)

    def put(self, run: R) -> None:
        """Index a run under its wake time; its previous entry becomes stale."""
        run.entry = next(self._entries)
        if run.wake_at is None:
            return
        heaps = self._queues.setdefault(run.queue, {})
        heap = heaps.get((run.workflow, run.version))
        if heap is None:
            heap = heaps[run.workflow, run.version] = _WakeHeap()
        heap.push(run.wake_at, run)

    def remove(self, run: R) -> None:
        """Make the run's entry stale."""
        run.entry = 0

    def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        prefix: str,
    ) -> list[R]:
        """Return up to `limit` due runs whose ids begin with the prefix, earliest first."""
        runs = self.take(now, limit, supports, queues, prefix)
        for run in runs:
            self.put(run)
        return runs

    def take(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
        prefix: str,
    ) -> list[R]:
        """Remove the runs that `due` would return, and return them.

        A claim indexes them again under another time: `due` would leave a stale entry for each.
        """
        runs_by_queue = [
            self._take_from(queue, most, now, supports, prefix) for queue, most in queues.items()
        ]
        runs = [*merge(*runs_by_queue, key=_wake_time)]
        for run in runs[limit:]:
            self.put(run)
        return runs[:limit]

    def queues(self, now: datetime, prefix: str) -> list[str]:
        """Return the queues with due runs whose ids begin with the prefix, by name."""
        queues = [*self._queues]
        return sorted(queue for queue in queues if self.due(now, 1, None, {queue: 1}, prefix))

    def _take_from(
        self,
        queue: str,
        limit: int,
        now: datetime,
        supports: Sequence[SupportedVersions] | None,
        prefix: str,
    ) -> list[R]:
        """Remove up to `limit` due runs of a queue, and return them, earliest first."""
        heaps = self._queues.get(queue, {})
        supported_heaps = [heap for key, heap in heaps.items() if _is_supported(*key, supports)]
        runs: list[R] = []
        other_runs: list[R] = []
        while len(runs) < limit and (heap := _earliest(supported_heaps, now)) is not None:
            run = heap.pop()
            (runs if run.id.startswith(prefix) else other_runs).append(run)
        self._drop_empty(queue)
        for run in other_runs:
            self.put(run)
        return runs

    def _drop_empty(self, queue: str) -> None:
        heaps = self._queues.pop(queue, {})
        if nonempty_heaps := {key: heap for key, heap in heaps.items() if heap.first() is not None}:
            self._queues[queue] = nonempty_heaps


class _WakeHeap(Generic[R]):
    """A heap of wake times whose stale entries are dropped when they reach the top."""

    def __init__(self) -> None:
        self._entries: list[tuple[datetime, int, R]] = []
        self._compact_at = 64

    def push(self, wake_at: datetime, run: R) -> None:
        if len(self._entries) >= self._compact_at:
            self._compact()
        heappush(self._entries, (wake_at, run.entry, run))

    def first(self) -> datetime | None:
        entries = self._entries
        while entries and entries[0][1] != entries[0][2].entry:
            heappop(entries)
        return entries[0][0] if entries else None

    def pop(self) -> R:
        return heappop(self._entries)[2]

    def _compact(self) -> None:
        # Without queries no stale entry ever reaches the top, and the heap would grow forever.
        self._entries = [entry for entry in self._entries if entry[1] == entry[2].entry]
        heapify(self._entries)
        self._compact_at = max(64, 2 * len(self._entries))


def _earliest(heaps: Iterable[_WakeHeap[R]], now: datetime) -> _WakeHeap[R] | None:
    earliest, earliest_time = None, now
    for heap in heaps:
        time = heap.first()
        if time is not None and (time <= now if earliest is None else time < earliest_time):
            earliest, earliest_time = heap, time
    return earliest


def _wake_time(run: IndexedRun) -> datetime:
    assert run.wake_at is not None, "a run in the index has a wake time"
    return run.wake_at


def _is_supported(
    workflow: str | None, version: int, supports: Sequence[SupportedVersions] | None
) -> bool:
    return supports is None or any(
        supported.workflow == workflow
        and (not version or supported.first <= version <= supported.last)
        for supported in supports
    )
