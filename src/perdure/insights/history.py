"""Charts of the workers' activity, from their throughput documents, without reading runs."""

from datetime import datetime, timedelta

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.insights.durations import durations_by_hour, percentiles
from perdure.insights.model import HistoryPoint, WorkerHistory
from perdure.presence import Minute, read_throughput
from perdure.store import SearchStore

WINDOWS = {
    timedelta(hours=1): timedelta(minutes=1),
    timedelta(hours=6): timedelta(minutes=5),
    timedelta(hours=24): timedelta(minutes=15),
    timedelta(hours=48): timedelta(minutes=30),
}
"""The windows of charts, and the time between two points."""

_MINUTE = timedelta(minutes=1)


async def history(store: SearchStore, window: Duration, now: datetime) -> WorkerHistory:
    """Return what workers did in the last 1, 6, 24 or 48 hours, up to the last full minute."""
    span = parse_duration(window, "window")
    if span not in WINDOWS:
        raise InvalidArgument("window", window, '"1h", "6h", "24h" or "48h"')
    step = WINDOWS[span]
    start = _floor(now - _MINUTE, step) + step - span
    documents = await read_throughput(store, start)
    points = [_Point(start + n * step) for n in range(span // step)]
    durations: dict[str, list[tuple[int, ...]]] = {}
    for each in documents:
        for name, workflow in each.workflows.items():
            durations.setdefault(name, []).append(workflow.durations)
        for minute in each.minutes:
            n = (each.hour + minute.minute * _MINUTE - start) // step
            if 0 <= n < len(points):
                points[n].add(minute)
    by_name = {name: percentiles(counts) for name, counts in sorted(durations.items())}
    rows = tuple(point.row() for point in points)
    return WorkerHistory(rows, step, by_name, durations_by_hour(documents, start, now))


class _Point:
    """The minutes of all workers that make up one point of a chart."""

    def __init__(self, at: datetime) -> None:
        self._at = at
        self._minutes: dict[int, list[Minute]] = {}

    def add(self, minute: Minute) -> None:
        self._minutes.setdefault(minute.minute, []).append(minute)

    def row(self) -> HistoryPoint:
        """Return the total of ended runs, and the slots of all workers in an average minute."""
        if not self._minutes:
            return HistoryPoint(self._at)
        every = [each for minutes in self._minutes.values() for each in minutes]
        depths: dict[str, int] = {}
        for each in every:
            # Not added up: workers share the queues, so each of them counted the same runs.
            for queue, depth in each.depths.items():
                depths[queue] = max(depth, depths.get(queue, 0))
        return HistoryPoint(
            self._at,
            completed=sum(each.completed for each in every),
            failed=sum(each.failed for each in every),
            cancelled=sum(each.cancelled for each in every),
            slots=round(sum(each.slots for each in every) / len(self._minutes)),
            running=round(sum(each.running for each in every) / len(self._minutes)),
            depths=depths,
        )


def _floor(at: datetime, step: timedelta) -> datetime:
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight + (at - midnight) // step * step
