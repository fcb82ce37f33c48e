"""Charts of what workers and runs did: where bars and lines are drawn, and their numbers.

Horizontal positions are percentages, so that a chart is as wide as its place; vertical ones are
pixels from the top. Missing data is a gap, never zero.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

from perdure.insights.model import HistoryPoint, HourDurations, StepPeriod, StepsPage
from perdure.insights.words import count_words, duration

HEIGHT = 112
"""The height of the plot; its baseline is at the bottom."""

STRIP = 32
"""The height of the bars above a long timeline; the line that marks the listed steps follows."""

_MIN_BAR = 1.5
_MIN_FAILED = 4
_MIN_LISTED = 1.0
_MISSING = 3
_ENDS = ("completed", "cancelled", "failed")
_QUEUES = 5
_PERCENTILES = ("p50", "p95", "p99")
_ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
_SECONDS = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 86400)
# The labels of ticks that are closer than this would overlap.
_LABEL = 13


class Tick(NamedTuple):
    """A horizontal line of the grid."""

    y: float
    label: str = ""


class Bar(NamedTuple):
    """A rectangle, when it was and what it stands for. `look` names its colour."""

    look: str
    x: float
    y: float
    width: float
    height: float
    at: datetime
    text: str


Row: TypeAlias = tuple[datetime, tuple[str, ...]]


class Chart(NamedTuple):
    """A picture with its description in words, its legend and its numbers.

    `legend` maps looks to names, `columns` are the headings of `rows`, which are newest first.
    `lines` are the paths of lines by their looks, in a picture that is 100 wide.
    """

    title: str
    summary: str
    begin: datetime
    end: datetime
    ticks: Sequence[Tick]
    bars: Sequence[Bar]
    legend: Mapping[str, str]
    columns: Sequence[str]
    rows: Sequence[Row]
    lines: Mapping[str, str] = {}


class _Counts:
    """What was counted at each point, by look; `legend` names the looks."""

    def __init__(
        self,
        points: Sequence[HistoryPoint],
        by_look: Sequence[Mapping[str, int]],
        legend: Mapping[str, str],
    ) -> None:
        self.points, self.by_look, self.legend = points, by_look, legend
        self.totals = [sum(each.values()) for each in by_look]
        self.width = 100 / len(points)

    def reports(self) -> Iterator[tuple[float, datetime, Mapping[str, int]]]:
        """Yield where a point is, its time and its counts, if a worker reported then."""
        for n, (point, counts) in enumerate(zip(self.points, self.by_look, strict=True)):
            if point.slots is not None:
                yield n * self.width, point.at, counts

    def gaps(self) -> list[Bar]:
        """Return a mark for each point at which no worker reported."""
        missing = (n for n, point in enumerate(self.points) if point.slots is None)
        return [_gap(n, self.width, self.points[n].at, "no data") for n in missing]

    def chart(self, title: str, summary: str, top: int, bars: Sequence[Bar]) -> Chart:
        """Return a chart on a linear scale from 0 to `top`."""
        rows = [(at, tuple(map("{:,}".format, each.values()))) for _, at, each in self.reports()]
        middle = f"{top // 2:,}" if top % 2 == 0 else ""
        begin, end = self.points[0].at, self.points[-1].at
        ticks = (Tick(0.5, f"{top:,}"), Tick(HEIGHT / 2, middle), Tick(HEIGHT, "0"))
        columns = [*self.legend.values()]
        bars = [*self.gaps(), *bars]
        return Chart(title, summary, begin, end, ticks, bars, self.legend, columns, rows[::-1])

    def stacked(self, title: str, summary: str, text: str) -> Chart:
        """Return a chart with a stack of bars for each point, which `text` describes."""
        top, width = round_top(max(self.totals)), self.width
        bars: list[Bar] = []
        for x, at, counts in self.reports():
            y = float(HEIGHT)
            for look, count in counts.items():
                if count:
                    height = max(HEIGHT * count / top, _MIN_BAR)
                    y -= height
                    words = text.format(count=count, look=look, name=self.legend[look])
                    bars.append(Bar(look, x + width * 0.1, y, width * 0.8, height, at, words))
        return self.chart(title, summary, top, bars)


def throughput(points: Sequence[HistoryPoint]) -> Chart:
    """Return the runs that ended, as stacked bars."""
    by_look = [{name: getattr(point, name) or 0 for name in _ENDS} for point in points]
    counts = _Counts(points, by_look, {name: name.capitalize() for name in _ENDS})
    total, most = sum(counts.totals), max(counts.totals)
    summary = f"{count_words(total, 'run')} ended, at most {most:,} in one bar."
    return counts.stacked("Runs that ended", summary, "{count:,} {look}")


def depths(points: Sequence[HistoryPoint]) -> Chart:
    """Return the due runs of the deepest queues, stacked; the others are summed."""
    deepest: Counter[str] = Counter()
    for point in points:
        deepest |= Counter(point.depths)
    queues = [name for name, _ in deepest.most_common(_QUEUES)]
    names = [*(name or "no queue" for name in queues), "other queues"][: len(deepest)]
    legend = {f"depth-{n}": name for n, name in enumerate(names, 1)}
    by_look = [dict(zip(legend, _depths_of(point, queues), strict=False)) for point in points]
    counts = _Counts(points, by_look, legend)
    summary = f"At most {count_words(max(counts.totals), 'due run')} at once."
    return counts.stacked("Due runs by queue", summary, "{count:,} due in {name}")


def _depths_of(point: HistoryPoint, queues: Sequence[str]) -> list[int]:
    depths = [point.depths.get(name, 0) for name in queues]
    return [*depths, sum(point.depths.values()) - sum(depths)]


def slots(points: Sequence[HistoryPoint]) -> Chart:
    """Return the slots in use, as an area under a line for all slots."""
    by_look = [{"total": point.slots or 0, "in-use": point.running or 0} for point in points]
    counts = _Counts(points, by_look, {"total": "All slots", "in-use": "In use"})
    top = round_top(max(each["total"] for each in by_look))
    bars: list[Bar] = []
    for x, at, each in counts.reports():
        text = f"{each['in-use']:,} of {each['total']:,} slots in use"
        in_use, total = (HEIGHT * each[look] / top for look in ("in-use", "total"))
        bars.append(Bar("in-use", x, HEIGHT - in_use, counts.width, in_use, at, text))
        bars.append(Bar("total", x, HEIGHT - total, counts.width, _MIN_BAR, at, text))
    most = max(each["in-use"] for each in by_look)
    return counts.chart("Worker slots", f"At most {count_words(most, 'slot')} in use.", top, bars)


def density(page: StepsPage) -> Chart:
    """Return when the steps of a run ended, over a line that marks those on the page."""
    periods, width, bars = page.periods, 100 / len(page.periods), list[Bar]()
    most = max(each.count for each in periods)
    for n, each in enumerate(periods):
        text, y = f"{count_words(each.count, 'step')}, {each.failed:,} failed", float(STRIP)
        for look, count in (("completed", each.count - each.failed), ("failed", each.failed)):
            if count:
                # Few failures among many steps must be visible.
                height = max((STRIP - _MIN_FAILED) * count / most, _MIN_FAILED)
                y -= height
                bars.append(Bar(look, (n + 0.1) * width, y, width * 0.8, height, each.begin, text))
    bars += _listed(page, width)
    failed = sum(each.failed for each in periods)
    summary = f"{count_words(page.total, 'step')}, {failed:,} failed, at most {most:,} in one bar."
    rows = [(each.begin, (f"{each.count:,}", f"{each.failed:,}")) for each in periods[::-1]]
    legend = {"completed": "Completed", "failed": "Failed", "listed": "Listed below"}
    begin, end, columns = periods[0].begin, periods[-1].end, ("Steps", "Failed")
    return Chart("Steps over time", summary, begin, end, (), bars, legend, columns, rows)


def _listed(page: StepsPage, width: float) -> Iterator[Bar]:
    """Yield the line below the bars, and the part of it in which the steps of the page ended."""
    times = [step.ended_at for step in page.steps if step.ended_at is not None]
    yield Bar("rest", 0, STRIP + 3, 100, 4, page.periods[0].begin, "all steps")
    if times:
        left, right = (_place(page.periods, at) * width for at in (min(times), max(times)))
        left, text = min(left, 100 - _MIN_LISTED), f"{count_words(len(page.steps), 'step')} listed"
        yield Bar("listed", left, STRIP + 3, max(right - left, _MIN_LISTED), 4, min(times), text)


def _place(periods: Sequence[StepPeriod], at: datetime) -> float:
    """Return the number of the period in which a time is, with its share of that period."""
    n = max(bisect_right(periods, at, key=lambda each: each.begin) - 1, 0)
    length = periods[n].end - periods[n].begin
    return n + min((at - periods[n].begin) / length, 1.0) if length else float(n)


def durations(hours: Sequence[HourDurations]) -> Chart:
    """Return percentiles of durations, as lines on a logarithmic scale."""
    spans = [[getattr(each.durations, name, None) for name in _PERCENTILES] for each in hours]
    known = [span for each in spans for span in each if span is not None]
    scale = LogScale(min(known, default=timedelta(0)), max(known, default=timedelta(0)))
    ys = [[None if span is None else scale.y(span) for span in each] for each in spans]
    lines = {name: _path([each[n] for each in ys]) for n, name in enumerate(_PERCENTILES)}
    counts = [each.durations.count if each.durations else 0 for each in hours]
    slowest = f", the slowest in about {duration(max(known))}" if known else ""
    summary = f"{count_words(sum(counts), 'run')} ended{slowest}."
    texts = [tuple(map(duration, each)) for each in spans]
    rows = [(each.at, (f"{counts[n]:,}", *texts[n])) for n, each in enumerate(hours) if counts[n]]
    return Chart(
        title="Durations of runs",
        summary=summary,
        begin=hours[0].at,
        end=hours[-1].at,
        ticks=scale.ticks,
        bars=[_hour_bar(n, each, 100 / len(hours)) for n, each in enumerate(hours)],
        legend={name: name for name in _PERCENTILES},
        columns=("Runs", *_PERCENTILES),
        rows=rows[::-1],
        lines=lines,
    )


def _hour_bar(n: int, hour: HourDurations, width: float) -> Bar:
    """Return an invisible bar that tells the percentiles of an hour, or a gap."""
    if hour.durations is None:
        return _gap(n, width, hour.at, "no run ended")
    texts = (f"{name} {duration(getattr(hour.durations, name))}" for name in _PERCENTILES)
    return Bar("hover", n * width, 0, width, HEIGHT, hour.at, ", ".join(texts))


def _path(ys: Sequence[float | None]) -> str:
    """Return a line through the middle of each column; one without neighbours is a short dash."""
    width, padded, words = 100 / len(ys), [None, *ys, None], []
    for n, (left, y, right) in enumerate(zip(padded, ys, padded[2:], strict=False)):
        if y is None:
            continue
        middle, stub = (n + 0.5) * width, width / 4
        begin = f"M{middle - stub:.2f} {y:.1f}" if left is None else ""
        end = f"h{stub:.2f}" if right is None else ""
        words.append(f"{begin}L{middle:.2f} {y:.1f}{end}")
    return "".join(words)


class LogScale:
    """Maps durations to heights; it begins and ends at a round duration."""

    def __init__(self, shortest: timedelta, longest: timedelta) -> None:
        last = len(_SECONDS) - 1
        seconds = [max(span.total_seconds(), _SECONDS[0]) for span in (shortest, longest)]
        first = max(n for n in range(last) if _SECONDS[n] <= seconds[0] or not n)
        end = min(n for n in range(1, last + 1) if _SECONDS[n] >= seconds[1] or n == last)
        self._seconds = _SECONDS[first : max(end, first + 1) + 1]

    def y(self, span: timedelta) -> float:
        """Return the height of a duration; those outside of the scale are at its ends."""
        low, high = self._seconds[0], self._seconds[-1]
        seconds = min(max(span.total_seconds(), low), high)
        return HEIGHT * (1 - math.log(seconds / low) / math.log(high / low))

    @property
    def ticks(self) -> list[Tick]:
        """The lines of the grid, from the bottom, with labels where there is room."""
        ticks: list[Tick] = []
        label_y = 2.0 * HEIGHT
        for seconds in self._seconds:
            y = self.y(timedelta(seconds=seconds))
            has_room = label_y - y >= _LABEL
            label_y = y if has_room else label_y
            ticks.append(Tick(y, duration(timedelta(seconds=seconds)) if has_room else ""))
        return ticks


def round_top(most: int) -> int:
    """Return the number with which an axis ends: round, and at least `most` and 4."""
    power = 10 ** (len(str(most)) - 1)
    return next(int(n * power) for n in _ROUND if n * power >= max(most, 4))


def _gap(n: int, width: float, at: datetime, text: str) -> Bar:
    return Bar("missing", n * width, HEIGHT - _MISSING, width, _MISSING, at, text)
