"""Which runs want a worker, earliest first: the due index of stores that keep it in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False, kw_only=True)
class Planned:
    """What an agenda must know of a run; `line` is the agenda's own mark."""

    id: str
    workflow: str | None = None
    wake_at: datetime | None = None
    line: int = 0


R = TypeVar("R", bound=Planned)


class Agenda(Generic[R]):
    """Runs by wake time, apart for each workflow, so that asking for one skips none of another."""

    def __init__(self) -> None:
        self._lanes: dict[str | None, _Lane[R]] = {}
        self._lines = count(1)

    def put(self, run: R) -> None:
        """File a run under its wake time; where it was filed before no longer counts."""
        run.line = next(self._lines)
        if run.wake_at is None:
            return
        lane = self._lanes.get(run.workflow)
        if lane is None:
            lane = self._lanes[run.workflow] = _Lane()
        lane.push(run.wake_at, run)

    def drop(self, run: R) -> None:
        """Forget where a run was filed."""
        run.line = 0

    def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None, prefix: str
    ) -> list[R]:
        """Give the runs that are due and have the prefix, earliest first."""
        names: Iterable[str | None] = self._lanes if workflows is None else dict.fromkeys(workflows)
        lanes = [self._lanes[name] for name in names if name in self._lanes]
        seen: list[R] = []
        due: list[R] = []
        while len(due) < limit and (lane := _earliest(lanes, now)) is not None:
            run = lane.pop()
            seen.append(run)
            if run.id.startswith(prefix):
                due.append(run)
        for run in seen:
            self.put(run)
        return due


class _Lane(Generic[R]):
    """A heap of wake times whose outdated lines are dropped when they surface."""

    def __init__(self) -> None:
        self._lines: list[tuple[datetime, int, R]] = []
        self._roof = 64

    def push(self, wake_at: datetime, run: R) -> None:
        if len(self._lines) >= self._roof:
            self._sweep()
        heappush(self._lines, (wake_at, run.line, run))

    def first(self) -> datetime | None:
        lines = self._lines
        while lines and lines[0][1] != lines[0][2].line:
            heappop(lines)
        return lines[0][0] if lines else None

    def pop(self) -> R:
        return heappop(self._lines)[2]

    def _sweep(self) -> None:
        # Where nobody asks what is due, outdated lines never surface.
        self._lines = [line for line in self._lines if line[1] == line[2].line]
        heapify(self._lines)
        self._roof = max(64, 2 * len(self._lines))


def _earliest(lanes: Iterable[_Lane[R]], now: datetime) -> _Lane[R] | None:
    due = [(time, lane) for lane in lanes if (time := lane.first()) is not None and time <= now]
    return min(due, key=lambda timed: timed[0])[1] if due else None
