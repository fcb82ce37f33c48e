"""The due index of a memory store: runs by wake time, earliest first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False, kw_only=True)
class Indexed:
    """The fields of a run that a `DueIndex` uses.

    `version` is the number of the run's current index entry; entries with another one are stale.
    """

    id: str
    workflow: str | None = None
    wake_at: datetime | None = None
    version: int = 0


R = TypeVar("R", bound=Indexed)


class DueIndex(Generic[R]):
    """Runs by wake time, in one heap per workflow, so that a query skips no run of another."""

    def __init__(self) -> None:
        self._heaps: dict[str | None, _WakeHeap[R]] = {}
        self._versions = count(1)

    def put(self, run: R) -> None:
        """Index a run under its wake time; its previous entry becomes stale."""
        run.version = next(self._versions)
        if run.wake_at is None:
            return
        heap = self._heaps.get(run.workflow)
        if heap is None:
            heap = self._heaps[run.workflow] = _WakeHeap()
        heap.push(run.wake_at, run)

    def remove(self, run: R) -> None:
        """Make the run's entry stale."""
        run.version = 0

    def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None, prefix: str
    ) -> list[R]:
        """Return up to `limit` due runs whose ids have the prefix, earliest first."""
        names: Iterable[str | None] = self._heaps if workflows is None else dict.fromkeys(workflows)
        heaps = [self._heaps[name] for name in names if name in self._heaps]
        popped: list[R] = []
        due: list[R] = []
        while len(due) < limit and (heap := _earliest(heaps, now)) is not None:
            run = heap.pop()
            popped.append(run)
            if run.id.startswith(prefix):
                due.append(run)
        for run in popped:
            self.put(run)
        return due


class _WakeHeap(Generic[R]):
    """A heap of wake times whose stale entries are dropped when they reach the top."""

    def __init__(self) -> None:
        self._entries: list[tuple[datetime, int, R]] = []
        self._compact_at = 64

    def push(self, wake_at: datetime, run: R) -> None:
        if len(self._entries) >= self._compact_at:
            self._compact()
        heappush(self._entries, (wake_at, run.version, run))

    def first(self) -> datetime | None:
        entries = self._entries
        while entries and entries[0][1] != entries[0][2].version:
            heappop(entries)
        return entries[0][0] if entries else None

    def pop(self) -> R:
        return heappop(self._entries)[2]

    def _compact(self) -> None:
        # Without queries no stale entry ever reaches the top, and the heap would grow forever.
        self._entries = [entry for entry in self._entries if entry[1] == entry[2].version]
        heapify(self._entries)
        self._compact_at = max(64, 2 * len(self._entries))


def _earliest(heaps: Iterable[_WakeHeap[R]], now: datetime) -> _WakeHeap[R] | None:
    due = [(time, heap) for heap in heaps if (time := heap.first()) is not None and time <= now]
    return min(due, key=lambda timed: timed[0])[1] if due else None
