"""Workflows, queues, limits, schedules and retention policies."""

from datetime import datetime, timedelta

import msgspec

from perdure.insights.model.json import Json
from perdure.insights.model.rows import HourDurations, Percentiles, Tally
from perdure.limits import LimitOf
from perdure.snapshot import RunStatus


class DefinitionFacts(msgspec.Struct, frozen=True):
    """What the newest worker reported about one version of a workflow.

    `keeps` is "result" if the steps of completed runs are dropped.
    """

    workflow: str
    version: int
    payload_schema: Json = None
    doc: str = ""
    fingerprint: str = ""
    seen_at: datetime | None = None
    keeps: str = "run"


class WorkflowRow(msgspec.Struct, frozen=True):
    """A workflow that has runs, or that a worker knows.

    `versions` counts the live runs by version, within a bounded search; `versions_capped` means
    that there are more. `by_version` also counts them by status. `kept_for` is how long finished
    runs are kept, by status; runs with other statuses are kept forever. `by_hour` counts the runs
    that ended in each of the last 24 hours, `durations_by_hour` are their durations. `by_version`
    and `durations_by_hour` are set only if a single workflow is requested.
    """

    name: str
    counts: dict[str, Tally]
    versions: dict[int, int] = {}
    versions_capped: bool = False
    by_version: dict[int, dict[RunStatus, int]] = {}
    workers: tuple[str, ...] = ()
    paused: bool = False
    paused_reason: str = ""
    durations: Percentiles | None = None
    steps: dict[str, Percentiles] = {}
    definitions: tuple[DefinitionFacts, ...] = ()
    kept_for: dict[str, timedelta] = {}
    by_hour: tuple[int, ...] = ()
    durations_by_hour: tuple[HourDurations, ...] = ()


class LimitRow(msgspec.Struct, frozen=True):
    """A limit of a queue, of each of its keys, or of steps.

    `name` is the name of the queue or `Limit`, and `of` is what is limited. `n` is the number that
    workers use, `declared` the number in the code. `per` is the period of a rate in seconds.
    `in_use` is how many units are in use, or were used in the last period of a rate; `None` for
    limits per key.
    """

    name: str
    of: LimitOf
    n: int
    declared: int
    per: float | None = None
    in_use: int | None = None


class KeyRow(msgspec.Struct, frozen=True):
    """The due and owned runs of one key of a queue."""

    key: str
    due: int
    leased: int
    oldest_due: datetime | None = None
    capped: bool = False


class QueueRow(msgspec.Struct, frozen=True):
    """The due and owned runs of one queue; if `capped`, more runs may be due.

    The name is empty for the runs in no queue. `limits` are the limits that live workers declare.
    `keys` are up to 20 of the keys that have due or owned runs, by name.
    """

    name: str
    due: int
    leased: int
    oldest_due: datetime | None
    paused: bool = False
    capped: bool = False
    paused_reason: str = ""
    limits: tuple[LimitRow, ...] = ()
    keys: tuple[KeyRow, ...] = ()


class ScheduleRow(msgspec.Struct, frozen=True):
    """A schedule: what it starts and when, and its state.

    `every` is an interval such as "1 h", or a cron expression, whose time zone is `tz`.
    `next_times` are the nominal times of the next runs; empty if it is paused or has ended.
    `last_at` is the nominal time of the latest run. `open` are the ids of runs that are not over,
    `buffered` counts the runs that wait for them. `missed` counts the times that were left out
    because no worker was running, `skipped` those that were left out because a run was not over.
    `declared` is the version of the workflow that declared it, or 0. `run_id` is the id of its own
    run.
    """

    name: str
    workflow: str
    every: str
    tz: str
    status: RunStatus
    next_times: tuple[datetime, ...]
    last_at: datetime | None
    open: tuple[str, ...]
    started: int
    missed: int
    skipped: int
    buffered: int
    overlap: str
    catch_up: timedelta
    jitter: timedelta
    on_failure: str
    run_id: str
    reason: str = ""
    start_at: datetime | None = None
    end_at: datetime | None = None
    payload: Json = None
    tags: dict[str, str] = {}
    queue: str = ""
    declared: int = 0


class RetentionRow(msgspec.Struct, frozen=True):
    """How long the runs of a workflow that ended with a given status are kept.

    `version` is the version of the workflow that declared it. `removable` is how many runs are
    older than that.
    """

    workflow: str
    version: int
    status: str
    kept_for: timedelta
    removable: Tally | None = None


class Retention(msgspec.Struct, frozen=True):
    """The policies by which workers remove finished runs.

    `looked_at` is when they last checked, and `removed` is how many runs they have removed in
    total.
    """

    rows: tuple[RetentionRow, ...] = ()
    looked_at: datetime | None = None
    removed: int = 0
