"""The throughput of the seeded history, as workers would have reported it."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from perdure.presence import Minute, Throughput, WorkflowThroughput
from perdure.presence.documents import write_throughput
from perdure.presence.durations import class_of, total
from perdure.store import SearchStore

WORKER = "packing-station-2"
SLOTS = 20
_HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class EndedRun:
    """A run that ended."""

    at: datetime
    workflow: str
    status: str
    duration: timedelta


@dataclass
class History:
    """The runs that ended, as input for the documents."""

    start: datetime
    runs: list[EndedRun] = field(default_factory=list)

    async def write(self, store: SearchStore, now: datetime) -> None:
        """Write a document for each hour until now; the worker is lost, not stopped."""
        hour = self.start.replace(minute=0, second=0, microsecond=0)
        while hour < now:
            await write_throughput(store, self._document(hour, now))
            hour += _HOUR

    def _document(self, hour: datetime, now: datetime) -> Throughput:
        runs = [run for run in self.runs if hour <= run.at < hour + _HOUR]
        return Throughput(
            worker=WORKER,
            hour=hour,
            host="packing-station",
            pid=2,
            started_at=self.start,
            seen_at=min(now, hour + _HOUR),
            owner=WORKER,
            workflows={name: _by_workflow(runs, name) for name in {run.workflow for run in runs}},
            minutes=tuple(
                _minute(runs, hour, number)
                for number in range(60)
                if self.start <= hour + timedelta(minutes=number) < now
            ),
        )


def _by_workflow(runs: list[EndedRun], name: str) -> WorkflowThroughput:
    mine = [run for run in runs if run.workflow == name]
    statuses = Counter(run.status for run in mine)
    classes = [class_of(run.duration / timedelta(milliseconds=1)) for run in mine]
    durations = total([*[0] * each, 1] for each in classes)
    return WorkflowThroughput(
        statuses["completed"], statuses["failed"], statuses["cancelled"], durations
    )


def _minute(runs: list[EndedRun], hour: datetime, number: int) -> Minute:
    counts = Counter(
        run.status for run in runs if (run.at - hour) // timedelta(minutes=1) == number
    )
    return Minute(
        number,
        SLOTS,
        counts["completed"],
        counts["failed"],
        counts["cancelled"],
        # About a third of the slots are in use, more while runs end.
        running=5 + (7 * number + 3 * hour.hour) % 4 + 2 * counts.total(),
        depths={"": counts.total()},
    )
