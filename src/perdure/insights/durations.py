"""Percentiles of durations, together and hour by hour, from the workers' throughput documents."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from perdure.insights.model import HourDurations, Percentiles
from perdure.presence import Throughput
from perdure.presence.durations import Durations, percentile, total

HOUR = timedelta(hours=1)


def percentiles(durations: Iterable[Sequence[int]]) -> Percentiles:
    """Return the percentiles of several counted durations together."""
    classes = total(durations)
    count = sum(classes)
    # A single duration is all of its percentiles; the middle of its class is the best estimate.
    percents = (50, 50, 50) if count == 1 else (50, 95, 99)
    return Percentiles(count, *(percentile(classes, percent) for percent in percents))


def durations_by_hour(
    documents: Iterable[Throughput], since: datetime, now: datetime, workflow: str | None = None
) -> tuple[HourDurations, ...]:
    """Return the durations of the runs that ended in each hour, the current one last.

    These are the runs of one workflow, or of all.
    """
    counted: dict[datetime, list[Sequence[int]]] = {}
    for each in documents:
        counted.setdefault(each.hour, []).extend(_durations(each, workflow))
    first = since.replace(minute=0, second=0, microsecond=0)
    hours = (first + n * HOUR for n in range((now - first) // HOUR + 1))
    counts = ((hour, counted.get(hour)) for hour in hours)
    return tuple(HourDurations(hour, percentiles(each) if each else None) for hour, each in counts)


def _durations(document: Throughput, workflow: str | None) -> list[Durations]:
    names = document.workflows if workflow is None else {workflow} & document.workflows.keys()
    every = (document.workflows[name].durations for name in names)
    return [durations for durations in every if durations]
