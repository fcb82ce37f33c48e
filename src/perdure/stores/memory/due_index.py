"""The due index of a memory store: runs by queue, workflow, version and wake time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush, merge
from itertools import count, islice
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
        due: list[list[R]] = []
        for queue, most in queues.items():
            runs = self._due_in(queue, now, supports)
            due.append([*islice((run for run in runs if run.id.startswith(prefix)), most)])
        return [*islice(merge(*due, key=_wake_time), limit)]

    def queues(self, now: datetime, prefix: str) -> list[str]:
        """Return the queues with due runs whose ids begin with the prefix, by name."""
        return sorted(
            queue
            for queue in [*self._queues]
            if any(run.id.startswith(prefix) for run in self._due_in(queue, now, None))
        )

    def _due_in(
        self, queue: str, now: datetime, supports: Sequence[SupportedVersions] | None
    ) -> Iterator[R]:
        """Yield the due runs of a queue, earliest first; they stay in the index."""
        heaps = self._queues.get(queue, {})
        supported_heaps = [heap for key, heap in heaps.items() if _is_supported(*key, supports)]
        popped_runs: list[R] = []
        try:
            while (heap := _earliest(supported_heaps, now)) is not None:
                popped_runs.append(heap.pop())
                yield popped_runs[-1]
        finally:
            self._drop_empty(queue)
            for run in popped_runs:
                self.put(run)

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
    due = [(time, heap) for heap in heaps if (time := heap.first()) is not None and time <= now]
    return min(due, key=lambda pair: pair[0])[1] if due else None


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
