"""Workers and the store, and what needs attention."""

from datetime import datetime, timedelta
from typing import Literal

import msgspec

from perdure.insights.model.json import Json
from perdure.insights.model.rows import HourDurations, Percentiles, RunRow, Tally
from perdure.insights.model.steps import InFlight


class WorkflowVersions(msgspec.Struct, frozen=True):
    """A workflow that a worker supports, with its first and last version."""

    workflow: str
    first: int
    last: int


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker as of its last heartbeat.

    A live worker has a heartbeat; a lost worker disappeared within the last day without stopping.
    `owned` are the runs that a lost worker still owns, set only if a single worker is requested.
    """

    id: str
    state: Literal["live", "draining", "lost"]
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    perdure: str = ""
    python: str = ""
    workflows: tuple[WorkflowVersions, ...] = ()
    queues: tuple[str, ...] = ()
    slots: int = 0
    running: int = 0
    counters: dict[str, int] = {}
    in_flight: tuple[InFlight, ...] = ()
    owned: tuple[RunRow, ...] = ()


class HistoryPoint(msgspec.Struct, frozen=True):
    """One point of a chart. Numbers are `None` where no worker has reported: a gap, not zero."""

    at: datetime
    completed: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    slots: int | None = None
    running: int | None = None
    depths: dict[str, int] = {}


class WorkerHistory(msgspec.Struct, frozen=True):
    """The workers' reports for a time window, oldest first.

    `durations` are those of the runs that ended, by workflow. `durations_by_hour` are those of all
    workflows.
    """

    points: tuple[HistoryPoint, ...]
    step: timedelta
    durations: dict[str, Percentiles] = {}
    durations_by_hour: tuple[HourDurations, ...] = ()


class Attention(msgspec.Struct, frozen=True):
    """Something that needs attention: a sentence, and the query or run that shows it."""

    text: str
    query: str = ""
    run_id: str = ""


class Lag(msgspec.Struct, frozen=True):
    """How many runs are due, and since when the first of them is."""

    due: int
    oldest: datetime


class Overview(msgspec.Struct, frozen=True):
    """The store at a glance. `last_day` counts runs that ended in the last 24 hours.

    If `due_capped`, more runs than `due` may be due. `lags` are the due runs by workflow.
    """

    now: datetime
    counts: dict[str, Tally]
    last_day: dict[str, Tally]
    due: int
    oldest_due: datetime | None
    workers: tuple[WorkerRow, ...]
    failures: tuple[RunRow, ...]
    attention: tuple[Attention, ...]
    due_capped: bool = False
    lags: dict[str, Lag] = {}


class Finding(msgspec.Struct, frozen=True):
    """Something that `doctor` found, and how to fix it."""

    code: str
    text: str
    fix: str
    severity: Literal["error", "warning"] = "warning"


class StoreFacts(msgspec.Struct, frozen=True):
    """The store: its address without the password, what it can do, and how far its clock is off."""

    url: str
    kind: str
    capabilities: dict[str, Json]
    sentences: tuple[str, ...]
    clock_drift: timedelta | None = None
