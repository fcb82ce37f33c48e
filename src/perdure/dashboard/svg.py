"""Charts as SVG. Coordinates are percentages, so that a chart has the width of its place."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from markupsafe import Markup

from perdure.dashboard.timeline import Bar, Timeline
from perdure.insights.model import HistoryPoint, Percentiles, WorkerHistory

_PLOT = 112
_ROW = 20


def _rect(css: str, x: float, y: float, width: float, height: float, title: str = "") -> Markup:
    inner = Markup("<title>{}</title>").format(title) if title else Markup("")
    return Markup(
        '<rect class="{}" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}">{}</rect>'
    ).format(css, x, y, width, height, inner)


def track(bar: Bar) -> Markup:
    """Return the bar of one step."""
    shape = _rect(f"bar {bar.look}", bar.x, 5, bar.width, 10)
    ticks = Markup("").join(
        Markup('<line class="tick" x1="{0:.2f}%" x2="{0:.2f}%" y1="3" y2="17"/>').format(x)
        for x in bar.ticks
    )
    return Markup('<svg class="track" height="{}" aria-hidden="true">{}{}</svg>').format(
        _ROW, shape, ticks
    )


def axis(timeline: Timeline, shown: Callable[[timedelta], str]) -> Markup:
    """Return the labels above a timeline: how long each collapsed gap was."""
    labels = Markup("").join(
        Markup('<text x="{:.2f}%" y="12" text-anchor="middle">{}</text>').format(
            min(max(gap.x, 5), 95), shown(gap.length)
        )
        for gap in timeline.gaps
        if gap.width > 6
    )
    return Markup('<svg class="axis" height="16" aria-hidden="true">{}</svg>').format(labels)


def _chart(title: str, description: str, body: Markup) -> Markup:
    return Markup(
        '<svg class="chart" height="{}" role="img"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(_PLOT + 1, title, description, body)


def _grid(top: float) -> Markup:
    lines = Markup("").join(
        Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(y)
        for y in (0.5, _PLOT / 2, _PLOT)
    )
    label = Markup('<text class="scale" x="0" y="12">{}</text>').format(f"{top:,.0f}")
    return lines + label


def _slots_of(points: Sequence[HistoryPoint]) -> Sequence[tuple[float, float, HistoryPoint]]:
    width = 100 / max(len(points), 1)
    return [(n * width, width, point) for n, point in enumerate(points)]


def throughput(history: WorkerHistory, at: Callable[[datetime], str]) -> Markup:
    """Return runs that ended, as stacked bars; failures are hatched, missing data is a gap."""
    totals = [_total(point) for point in history.points]
    top = nice_top(max(totals, default=0))
    body = _grid(top)
    for x, width, point in _slots_of(history.points):
        body += _column(x, width, point, top, at)
    description = f"{sum(totals):,} runs ended; at most {max(totals, default=0):,} at once."
    return _chart("Runs that ended", description, body)


def _total(point: HistoryPoint) -> int:
    return (point.completed or 0) + (point.failed or 0) + (point.cancelled or 0)


def _column(
    x: float, width: float, point: HistoryPoint, top: float, at: Callable[[datetime], str]
) -> Markup:
    if point.completed is None and point.failed is None:
        return _rect("missing", x, _PLOT - 3, width, 3, f"{at(point.at)}: no data")
    y = float(_PLOT)
    parts = Markup("")
    for css, count in (
        ("completed", point.completed), ("cancelled", point.cancelled), ("failed", point.failed),
    ):
        if count:
            height = max(_PLOT * count / top, 1.5)
            y -= height
            title = f"{at(point.at)}: {count:,} {css}"
            parts += _rect(f"fill-{css}", x + width * 0.1, y, width * 0.8, height, title)
    return parts


def slots(history: WorkerHistory, at: Callable[[datetime], str]) -> Markup:
    """Return the slots in use as an area under a line for all slots."""
    top = nice_top(max((point.slots or 0 for point in history.points), default=0))
    body = _grid(top)
    for x, width, point in _slots_of(history.points):
        if point.slots is None:
            body += _rect("missing", x, _PLOT - 3, width, 3, f"{at(point.at)}: no data")
            continue
        running = point.running or 0
        height = _PLOT * running / top
        title = f"{at(point.at)}: {running:,} of {point.slots:,} slots in use"
        body += _rect("fill-running", x, _PLOT - height, width, height, title)
        body += _rect("line", x, _PLOT - _PLOT * point.slots / top, width, 1.5)
    used = max((point.running or 0 for point in history.points), default=0)
    return _chart("Worker slots", f"At most {used:,} slots were in use.", body)


def nice_top(value: float) -> float:
    """Return a round number that is not below the value, to end an axis with."""
    if value <= 4:
        return 4
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def sparkline(counts: Sequence[int], title: str) -> Markup:
    """Return small bars without axes."""
    top = max(counts, default=0) or 1
    width = 100 / max(len(counts), 1)
    body = Markup("").join(
        _rect("fill-failed", n * width, 20 - 18 * count / top, width * 0.75, 18 * count / top)
        for n, count in enumerate(counts)
        if count
    )
    return Markup(
        '<svg class="spark" height="20" role="img"><title>{}</title>{}'
        '<line class="grid" x1="0" x2="100%" y1="19.5" y2="19.5"/></svg>'
    ).format(title, body)


def percentiles(each: Percentiles, title: str) -> Markup:
    """Return p50, p95 and p99 as marks on a log scale from 1 ms to 1 day."""
    if each.p50 is None or each.p99 is None:
        return Markup("")
    low, high = _log(each.p50), _log(each.p99)
    body = _rect("range", low, 8, max(high - low, 0.5), 4)
    for css, span in (("p50", each.p50), ("p95", each.p95), ("p99", each.p99)):
        if span is not None:
            body += Markup('<line class="{0}" x1="{1:.2f}%" x2="{1:.2f}%" y1="4" y2="16"/>').format(
                css, _log(span)
            )
    return Markup(
        '<svg class="percentiles" height="20" role="img"><title>{}</title>{}</svg>'
    ).format(title, body)


def _log(span: timedelta) -> float:
    seconds = min(max(span.total_seconds(), 0.001), 86_400.0)
    return 1 + 98 * math.log(seconds / 0.001) / math.log(86_400 / 0.001)


def meter(part: float, whole: float, title: str) -> Markup:
    """Return how much of something is used."""
    share = 100 * min(part / whole, 1) if whole else 0
    css = "fill-running" if share < 95 else "fill-waiting"
    return Markup('<svg class="meter" height="6" role="img"><title>{}</title>{}{}</svg>').format(
        title, _rect("rest", 0, 0, 100, 6), _rect(css, 0, 0, share, 6)
    )
