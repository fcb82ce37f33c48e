"""What a worker has done in the current hour, counted when its runs end."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from operator import sub

import msgspec

from perdure.presence.documents import Minute, WorkflowThroughput
from perdure.presence.durations import add_duration
from perdure.snapshot import RunStatus

MOST_STEPS = 50
"""The maximum number of steps of a workflow whose durations are counted."""

SAMPLED = 20
"""The number of runs of a workflow per minute whose steps are counted."""

MAX_SAMPLE = 1_000_000
"""The maximum size in bytes of a snapshot that is decoded for its steps."""

MAX_NAME = 200

_TIMED = ("step", "transaction")
_ENDS: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")


class _Record(msgspec.Struct):
    durationMs: float = -1  # noqa: N815  # the name in the format
    kind: str = "step"
    call: str = ""


class _Records(msgspec.Struct):
    steps: dict[str, _Record] = {}


_records = msgspec.json.Decoder(_Records)


class WorkflowTally:
    """The runs of one workflow that ended in the current hour."""

    def __init__(self) -> None:
        self.end_counts = dict.fromkeys(_ENDS, 0)
        self.samples = 0
        self._durations: list[int] = []
        self._steps: dict[str, list[int]] = {}

    def add(self, status: RunStatus, milliseconds: float | None, snapshot: bytes) -> None:
        """Count a run that ended, with its snapshot as JSON."""
        self.end_counts[status] += 1
        if milliseconds is not None:
            add_duration(self._durations, milliseconds)
        # Decoding every snapshot would cost a worker a few percent of its throughput.
        if self.samples < SAMPLED and len(snapshot) <= MAX_SAMPLE:
            self.samples += 1
            self._add_steps(snapshot)

    def _add_steps(self, snapshot: bytes) -> None:
        try:
            records = _records.decode(snapshot).steps
        except msgspec.MsgspecError:
            return
        for key, record in records.items():
            if record.durationMs < 0 or record.kind not in _TIMED:
                continue
            name = _name_of(record.call or key)
            if name in self._steps or len(self._steps) < MOST_STEPS:
                add_duration(self._steps.setdefault(name, []), record.durationMs)

    def document(self) -> WorkflowThroughput:
        """Return the counts as a document."""
        steps = {name: tuple(classes) for name, classes in self._steps.items()}
        return WorkflowThroughput(
            completed=self.end_counts["completed"],
            failed=self.end_counts["failed"],
            cancelled=self.end_counts["cancelled"],
            durations=tuple(self._durations),
            steps=steps,
        )


class HourTally:
    """The runs that ended at a worker in one hour, minute by minute."""

    def __init__(self, now: datetime) -> None:
        self.hour = now.replace(minute=0, second=0, microsecond=0)
        self.minutes: list[Minute] = []
        self._minute = now.minute
        self._workflows: dict[str, WorkflowTally] = {}
        self._counted_ends: tuple[int, ...] = (0, 0, 0)

    def add(
        self, workflow: str, status: RunStatus, milliseconds: float | None, snapshot: bytes
    ) -> None:
        """Count a run that is over, and its duration if that is known."""
        tally = self._workflows.get(workflow)
        if tally is None:
            tally = self._workflows[workflow] = WorkflowTally()
        tally.add(status, milliseconds, snapshot)

    def is_minute_over(self, now: datetime) -> bool:
        """Return whether the current minute has ended."""
        return now.minute != self._minute or self.is_over(now)

    def is_over(self, now: datetime) -> bool:
        """Return whether the hour has ended."""
        return now - self.hour >= timedelta(hours=1) or now < self.hour

    def resume(self, now: datetime) -> None:
        """Resume counting after a pause."""
        self._minute = now.minute

    def end_minute(
        self, now: datetime, slots: int, running: int, depths: Mapping[str, int]
    ) -> None:
        """Close the current minute; further counts belong to the next one."""
        if self.minutes and self.minutes[-1].minute == self._minute:
            # The worker was restarted within a minute.
            last = self.minutes.pop()
            last_counts = (last.completed, last.failed, last.cancelled)
            self._counted_ends = tuple(map(sub, self._counted_ends, last_counts))
        totals = self._totals()
        completed, failed, cancelled = map(sub, totals, self._counted_ends)
        minute = Minute(self._minute, slots, completed, failed, cancelled, running, dict(depths))
        self.minutes.append(minute)
        self._minute, self._counted_ends = now.minute, totals
        for tally in self._workflows.values():
            tally.samples = 0

    def _totals(self) -> tuple[int, ...]:
        counts = [tally.end_counts for tally in self._workflows.values()]
        return tuple(sum(each[status] for each in counts) for status in _ENDS)

    def workflows(self) -> dict[str, WorkflowThroughput]:
        """Return the counts of each workflow."""
        return {name: tally.document() for name, tally in self._workflows.items()}


def _name_of(call: str) -> str:
    """Return a step's name without the number of a repeated call."""
    head, mark, tail = call.rpartition("#")
    return (head if mark and head and tail.isdecimal() else call)[:MAX_NAME]
