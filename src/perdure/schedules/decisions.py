"""What a schedule does when it wakes up: which runs it starts, cancels and skips."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.schedules.timing import (
    Timing,
    gap_after,
    next_time,
    planned_start,
    skip_periods,
)

RunEnd: TypeAlias = Literal["completed", "failed", "cancelled", "deleted"]

GRACE = timedelta(minutes=1)
"""A time counts as missed only if it is late by more than this, or if the next time has come."""

MAX_STARTS = 100
"""The maximum number of runs that start in one write."""

MAX_TIMES = 1000
"""The maximum number of times decided on in one write: each takes some 50 µs with cron."""

MAX_BUFFER = 1000
MAX_OPEN = 1000


class ScheduleState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a schedule: all times up to `last` were decided on.

    `latest` is the time of the run that was started last. `open` are the times whose runs are not
    known to be over; `buffer` the times whose runs start after those. `missed` counts the times at
    which no worker was running, `skipped` those that were left out because a run was not over.
    """

    last: datetime
    latest: datetime | None = None
    open: tuple[datetime, ...] = ()
    buffer: tuple[datetime, ...] = ()
    started: int = 0
    missed: int = 0
    skipped: int = 0


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The runs to cancel and then to start, by their nominal times, and the state afterwards.

    `wake_at` is when to decide again; `None` means never. `pause` is why the schedule pauses.
    """

    state: ScheduleState
    wake_at: datetime | None = None
    starts: tuple[datetime, ...] = ()
    cancels: tuple[datetime, ...] = ()
    pause: str = ""


def decide(
    name: str,
    timing: Timing,
    state: ScheduleState,
    now: datetime,
    ends: Mapping[datetime, RunEnd],
    max_starts: int = MAX_STARTS,
) -> Decision:
    """Return what to do now. `ends` are the open runs that are over."""
    state = replace(state, open=tuple(time for time in state.open if time not in ends))
    failed_times = [time for time, end in ends.items() if end == "failed"]
    if failed_times and timing.on_failure == "pause":
        return Decision(state, now, pause=f"the run of {max(failed_times)} failed")
    starter = _Starter(timing.overlap, state)
    has_more = starter.decide_due(name, timing, now, max_starts)
    state = starter.state()
    wake_at = now if has_more else _next_wake(name, timing, state)
    return Decision(state, wake_at, tuple(starter.starts), tuple(starter.cancels))


def _next_wake(name: str, timing: Timing, state: ScheduleState) -> datetime | None:
    time = next_time(timing, state.last)
    return None if time is None else planned_start(timing, name, time)


def is_missed(name: str, timing: Timing, time: datetime, now: datetime) -> bool:
    """Return whether it is too late to start the run of a nominal time."""
    delay = now - planned_start(timing, name, time)
    return delay > timing.catch_up and delay >= min(GRACE, gap_after(timing, time))


class _Starter:
    """Applies the overlap policy to one time after another."""

    def __init__(self, overlap: str, state: ScheduleState) -> None:
        self._overlap = overlap
        self._state = state
        self._last = state.last
        self._open = list(state.open)
        self._buffer = list(state.buffer)
        self._missed_count = self._skipped_count = 0
        self.starts: list[datetime] = []
        self.cancels: list[datetime] = []

    def decide_due(self, name: str, timing: Timing, now: datetime, max_starts: int) -> bool:
        """Decide on the times that are due; return whether there are more."""
        if self._buffer and not self._open:
            self._start(self._buffer.pop(0))
        # Times whose jitter may not be over, or that are within the grace period, are handled
        # below.
        latest_missed = (
            now - max(timing.catch_up, GRACE) - timing.jitter - timedelta(milliseconds=1)
        )
        self._missed_count, self._last = skip_periods(timing, self._last, latest_missed)
        for _ in range(MAX_TIMES):
            time = next_time(timing, self._last)
            if time is None or planned_start(timing, name, time) > now:
                return False
            if len(self.starts) >= max_starts:
                return True
            self._last = time
            if is_missed(name, timing, time, now):
                self._missed_count += 1
            else:
                self._apply(time)
        return True

    def _apply(self, time: datetime) -> None:
        if self._overlap == "allow" or not (self._open or self._buffer):
            self._start(time)
        elif self._overlap == "cancel":
            self._replace(time)
        elif len(self._buffer) < _buffer_size(self._overlap):
            self._buffer.append(time)
        else:
            self._skipped_count += 1

    def _start(self, time: datetime) -> None:
        self.starts.append(time)
        self._open.append(time)

    def _replace(self, time: datetime) -> None:
        """Start a run in place of the open ones."""
        # Do not start runs that would be cancelled at once.
        self._skipped_count += len(self.starts)
        self.cancels += (each for each in self._open if each not in self.starts)
        self.starts, self._open = [], []
        self._start(time)

    def state(self) -> ScheduleState:
        """Return the state after these decisions."""
        state = self._state
        return ScheduleState(
            last=self._last,
            latest=self.starts[-1] if self.starts else state.latest,
            open=tuple(self._open[-MAX_OPEN:]),
            buffer=tuple(self._buffer),
            started=state.started + len(self.starts),
            missed=state.missed + self._missed_count,
            skipped=state.skipped + self._skipped_count,
        )


def _buffer_size(overlap: str) -> int:
    return {"buffer_one": 1, "buffer_all": MAX_BUFFER}.get(overlap, 0)
