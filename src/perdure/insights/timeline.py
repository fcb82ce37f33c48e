"""Where the bars of a run's timeline are drawn, in percent of its width.

Steps take milliseconds and waits take days. So long periods without a running step are drawn short,
and the axis shows how long they were.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal, TypeAlias

from perdure.insights.model import InFlight, RunFacts, StepRow, WaitFacts

Look: TypeAlias = Literal["ok", "failed", "wait", "open"]
Span: TypeAlias = tuple[datetime, datetime]

_MOMENT = timedelta(milliseconds=1)
# Idle time is drawn at most as long as this share of the busy time, or as the longest step: a wait
# is not drawn shorter than a step that took less time.
_LONGEST_IDLE = 0.18
# Shorter busy time is treated as this long. Otherwise 0.2 ms would be drawn as long as 10 s.
_LEAST_BUSY = timedelta(seconds=1)
_MIN_WIDTH = 0.6
_MAX_TICKS = 12
_WAITS = {"sleep", "event", "retry", "approval", "callback"}
IDLE = _WAITS | {"call", "result", "map"}
"""The kinds of steps during which the run is suspended."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Collapsed idle time: where its middle is drawn, and how long it was."""

    x: float
    width: float
    length: timedelta


class Scale:
    """Maps times to percent; idle time is collapsed where it is long.

    Idle time is split at the `marks`, and each part is collapsed separately, so that a wait stays
    visible next to a much longer one.
    """

    def __init__(
        self, begin: datetime, end: datetime, busy: Iterable[Span], marks: Iterable[datetime] = ()
    ) -> None:
        steps = list(busy)
        spans = merge_spans(steps)
        self._longest_idle = _longest_idle(steps, spans) or end - begin
        self.begin = begin
        self._times = [begin]
        self._units = [0.0]
        self._idle: list[tuple[int, timedelta]] = []
        sorted_marks = sorted(set(marks))
        at = begin
        for first, last in [*spans, (end, end)]:
            inner = slice(bisect_right(sorted_marks, at), bisect_left(sorted_marks, first))
            for left, right in pairwise((at, *sorted_marks[inner], first)):
                self._add_idle(right - left)
            self._add(last - first, last - first)
            at = max(at, last)

    def _add_idle(self, length: timedelta) -> None:
        if length > self._longest_idle:
            self._idle.append((len(self._times), length))
        self._add(length, min(length, self._longest_idle))

    def _add(self, length: timedelta, drawn_length: timedelta) -> None:
        if length > timedelta(0):
            self._times.append(self._times[-1] + length)
            self._units.append(self._units[-1] + drawn_length / _MOMENT)

    def x(self, at: datetime) -> float:
        """Return the position of a time, between 0 and 100."""
        total = self._units[-1]
        if total <= 0 or at <= self._times[0]:
            return 0.0
        if at >= self._times[-1]:
            return 100.0
        right = bisect_right(self._times, at)
        begin, end = self._times[right - 1], self._times[right]
        left, width = self._units[right - 1], self._units[right] - self._units[right - 1]
        return 100 * (left + width * ((at - begin) / (end - begin))) / total

    def time(self, x: float) -> datetime:
        """Return the time at a position between 0 and 100."""
        units = self._units[-1] * x / 100
        right = min(bisect_right(self._units, units), len(self._units) - 1)
        begin, left = self._times[right - 1], self._units[right - 1]
        width = self._units[right] - left
        return begin + (self._times[right] - begin) * ((units - left) / width if width else 0.0)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The collapsed parts, in order."""
        scale = 100 / (self._units[-1] or 1.0)
        edges = [(self._units[n - 1], self._units[n], length) for n, length in self._idle]
        return tuple(
            Gap(scale * (left + right) / 2, scale * (right - left), length)
            for left, right, length in edges
        )


def _longest_idle(steps: Sequence[Span], merged: Sequence[Span]) -> timedelta:
    """Return how long idle time is drawn at most; zero if there is no busy time."""
    total = sum((last - first for first, last in merged), timedelta(0))
    longest = max((last - first for first, last in steps), default=timedelta(0))
    return max(max(total, _LEAST_BUSY) * _LONGEST_IDLE, longest) if total else total


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order."""
    union: list[Span] = []
    for first, last in sorted(spans):
        if union and first <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, max(first, last)))
    return union


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the timeline. `x` and `width` are in percent; `ticks` are where attempts began.

    A bar without a `step` is pending: in flight, or a wait that ends at `until`.
    """

    key: str
    kind: str
    look: Look
    since: datetime
    x: float
    width: float
    ticks: tuple[float, ...] = ()
    step: StepRow | None = None
    until: datetime | None = None
    worker: str = ""
    attempts: int = 1

    @property
    def branch(self) -> str:
        """The branch of the step; pending steps are shown in the main branch."""
        return self.step.branch if self.step else ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The rows of one page of a run's history, grouped by branch."""

    begin: datetime
    end: datetime
    gaps: tuple[Gap, ...]
    branches: tuple[tuple[str, tuple[Bar, ...]], ...]

    @property
    def bars(self) -> Iterator[Bar]:
        """The bars of all branches."""
        return (bar for _, bars in self.branches for bar in bars)

    def pending(self, key: str) -> Bar | None:
        """Return the bar of a step that has no record yet, or of a wait."""
        return next((bar for bar in self.bars if bar.key == key and bar.step is None), None)


def draw(facts: RunFacts, steps: Sequence[StepRow], *, is_last: bool, now: datetime) -> Timeline:
    """Return the timeline of some records of a run; the last page also shows pending steps."""
    flying = facts.in_flight if is_last else ()
    waits = [each for each in facts.waits if is_last and each.kind != "retry"]
    busy = [_span(step) for step in steps if step.started_at and step.kind not in IDLE]
    busy += [(each.since, max(now, each.since)) for each in flying]
    times = [at for step in steps for at in (step.started_at, step.ended_at) if at]
    times += [at for span in busy for at in span] + [each.since for each in waits if each.since]
    begin, last = min(times, default=now), max(times, default=now)
    end = max(now, last) if waits or flying else last
    scale = Scale(begin, end, busy, times)
    bars = [_recorded_bar(step, scale) for step in steps]
    bars += [_in_flight(each, scale) for each in flying]
    bars += [_waiting(each, scale, last) for each in waits]
    return Timeline(begin, end, scale.gaps, _by_branch(bars))


def _span(step: StepRow) -> Span:
    assert step.started_at is not None
    return step.started_at, step.ended_at or step.started_at


def _recorded_bar(step: StepRow, scale: Scale) -> Bar:
    begin = scale.x(step.started_at) if step.started_at else 0.0
    x, width = _visible(begin, scale.x(step.ended_at) if step.ended_at else begin)
    look: Look = "failed" if not step.ok else "wait" if step.kind in _WAITS else "ok"
    count = min(step.attempts, _MAX_TICKS)
    ticks = tuple(x + width * n / count for n in range(1, count))
    since = step.started_at or scale.begin
    return Bar(step.key, step.kind, look, since, x, width, ticks, step, attempts=step.attempts)


def _visible(begin: float, end: float) -> tuple[float, float]:
    """Return a bar that is wide enough to be seen, and inside the picture."""
    width = max(end - begin, _MIN_WIDTH)
    return min(begin, 100 - width), width


def _in_flight(each: InFlight, scale: Scale) -> Bar:
    x, width = _visible(scale.x(each.since), 100.0)
    until, worker, attempts = each.next_attempt_at, each.worker, each.attempt
    return Bar(each.key, "step", "open", each.since, x, width, (), None, until, worker, attempts)


def _waiting(wait: WaitFacts, scale: Scale, last: datetime) -> Bar:
    since = wait.since or last
    x, width = _visible(scale.x(since), 100.0)
    return Bar(wait.id, wait.kind, "wait", since, x, width, until=wait.wake_at)


def _by_branch(bars: Iterable[Bar]) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    """Group bars by branch; the branch that began first comes first."""
    groups: dict[str, list[Bar]] = {}
    for bar in bars:
        groups.setdefault(bar.branch, []).append(bar)
    sorted_groups = sorted(groups.items(), key=lambda group: min(bar.x for bar in group[1]))
    return tuple((branch, tuple(group)) for branch, group in sorted_groups)
