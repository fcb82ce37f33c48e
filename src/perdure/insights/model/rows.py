"""Runs in lists, counts, and durations."""

from datetime import datetime, timedelta

import msgspec

from perdure.snapshot import RunStatus


class RunRow(msgspec.Struct, frozen=True):
    """A run in a list, from its header alone.

    `wake_at` is when the run is due; `lease_expires_at` is set instead while it has an owner.
    `ended_at` is set when it is over. `error` is the first line of the error that ended it,
    `ended_by` the step that raised it, and `reason` why it is paused. `size` is the size of its
    snapshot in bytes. `worker` is the id of the worker that `owner` belongs to. `questions` are
    those of its open approvals; long ones are shortened. `waits_for` says what it waits for, also
    where `awaits` has no name for it.
    """

    id: str
    workflow: str | None
    version: int
    status: RunStatus
    queue: str
    tags: dict[str, str]
    created_at: datetime | None
    updated_at: datetime
    ended_at: datetime | None
    wake_at: datetime | None
    owner: str | None
    lease_expires_at: datetime | None
    awaits: tuple[str, ...]
    takeovers: int
    steps: int
    failed_steps: int
    last_step: str
    error: str
    reason: str
    size: int
    revision: str = ""
    ended_by: str = ""
    questions: tuple[str, ...] = ()
    waits_for: str = ""
    worker: str = ""


class RunsPage(msgspec.Struct, frozen=True):
    """One page of runs.

    `cursor` continues the list; `None` means that this is the end. If the search stopped early,
    `searched_until` is the time back to which runs were examined, and `examined` is how many.
    If no run matches, `without` says for each term how many runs would match without it.
    """

    runs: tuple[RunRow, ...]
    cursor: str | None = None
    examined: int = 0
    searched_until: datetime | None = None
    without: dict[str, "Tally"] = {}


class Tally(msgspec.Struct, frozen=True):
    """A number of runs; if `capped`, there may be more."""

    count: int
    capped: bool = False


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of durations, estimated from the counts in classes that double."""

    count: int
    p50: timedelta | None = None
    p95: timedelta | None = None
    p99: timedelta | None = None


class HourDurations(msgspec.Struct, frozen=True):
    """The durations of the runs that ended in one hour; `None` if there were none."""

    at: datetime
    durations: Percentiles | None = None
