"""Workflows, their queues and limits, their schedules and how long their runs are kept."""

from datetime import datetime, timedelta

import msgspec

from perdure.insights.model.json import Json
from perdure.insights.model.rows import Percentiles, Tally
from perdure.limits import LimitOf
from perdure.snapshot import RunStatus


class DefinitionFacts(msgspec.Struct, frozen=True):
    """What the newest worker said about one version of a workflow.

    `keeps` is "result" if the steps of completed runs are dropped.
    """

    workflow: str
    version: int
    payload_schema: Json = None
    doc: str = ""
    fingerprint: str = ""
    source: str = ""
    seen_at: datetime | None = None
    keeps: str = "run"


class WorkflowRow(msgspec.Struct, frozen=True):
    """A workflow that has runs, or that a worker knows.

    `versions` counts its live runs by version, as far as a bounded search has seen them;
    `versions_capped` means that there are more. `by_version` counts them by status too, and is
    filled for one workflow only. `kept_for` is how long finished runs are kept, by status; what is
    missing is kept for good.
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


class LimitRow(msgspec.Struct, frozen=True):
    """A limit of a queue, of each of its keys, or of steps.

    `name` is that of the queue or `Limit`, and `of` what is limited. `n` is the number that workers
    use, `declared` the one in the code. `per` is the period of a rate in seconds. `in_use` is how
    many units are taken, in the last period for a rate; `None` for limits of each key.
    """

    name: str
    of: LimitOf
    n: int
    declared: int
    per: float | None = None
    in_use: int | None = None


class KeyRow(msgspec.Struct, frozen=True):
    """The due and the owned runs of one key of a queue."""

    key: str
    due: int
    leased: int
    oldest_due: datetime | None = None
    capped: bool = False


class QueueRow(msgspec.Struct, frozen=True):
    """The due and the owned runs of one queue; if `capped`, at least so many runs are due.

    The name is empty for the runs in no queue. `limits` are those that live workers declare.
    `keys` are some of the keys that have due or owned runs, at most 20, by name.
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
    """A schedule: what it starts and when, and what became of it.

    `every` is an interval such as "1 h", or a cron expression, whose time zone is `tz`.
    `next_times` are the nominal times of the next runs; none if it is paused or has ended.
    `last_at` is that of the run that was started last. `open` are the ids of runs that are not
    over, `buffered` counts those that wait for them. `missed` counts the times that were left out
    because no worker ran, `skipped` those that were left out because a run was not over. `declared`
    is the version of the workflow that declared it, or 0. `run_id` is the id of its own run.
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
    """For how long the runs of a workflow that ended in one way are kept.

    `version` is that of the workflow that declared it. `removable` is how many runs are older.
    """

    workflow: str
    version: int
    status: str
    kept_for: timedelta
    removable: Tally | None = None


class Retention(msgspec.Struct, frozen=True):
    """The policies by which workers remove finished runs.

    `looked_at` is when they last looked, and `removed` how many runs they have removed in all.
    """

    rows: tuple[RetentionRow, ...] = ()
    looked_at: datetime | None = None
    removed: int = 0
