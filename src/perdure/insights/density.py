"""When the steps of a long run ended: how many in each period."""

from bisect import bisect_right
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from perdure.insights.model import StepPeriod
from perdure.insights.rows import read_time, started_at
from perdure.insights.timeline import IDLE, Scale
from perdure.snapshot import Snapshot

PERIODS = 60
"""The maximum number of periods."""


def periods_of(snapshot: Snapshot) -> tuple[StepPeriod, ...]:
    """Return periods that are equally wide in a timeline, where long idle time is drawn short."""
    records: list[Mapping[str, Any]] = list(snapshot["steps"].values())
    times = [(at, each) for each in records if (at := read_time(each.get("at"))) is not None]
    if not times:
        return ()
    first, last = min(at for at, _ in times), max(at for at, _ in times)
    busy = [(each, at) for at, each in times if each.get("kind") not in IDLE]
    spans = ((max(started_at(each) or first, first), at) for each, at in busy)
    scale = Scale(first, last, spans)
    bounds = _bounds(scale, first, last)
    counts, failed = [0] * (len(bounds) - 1), [0] * (len(bounds) - 1)
    for at, record in times:
        n = min(bisect_right(bounds, at), len(counts)) - 1
        counts[n] += 1
        failed[n] += not record["ok"]
    return tuple(map(StepPeriod, bounds, bounds[1:], counts, failed))


def _bounds(scale: Scale, first: datetime, last: datetime) -> list[datetime]:
    """Return where the periods begin, and where the last one ends."""
    inner = {scale.time(100 * n / PERIODS) for n in range(1, PERIODS)}
    return [first, *sorted(at for at in inner if first < at < last), last]
