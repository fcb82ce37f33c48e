"""What `Insights` answers: frozen structs that can be shown in a terminal, on a page or as JSON.

Values (payloads, outputs, the values of steps) are JSON as it is stored, after redaction. Times are
aware UTC datetimes.
"""

from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.limits import LimitOf
from perdure.snapshot import RunStatus

Json: TypeAlias = Any


class RunRow(msgspec.Struct, frozen=True):
    """One run in a list, from its header alone.

    `wake_at` is when the run is due; `lease_expires_at` is set instead while it has an owner.
    `ended_at` is set when it is over. `error` is the first line of the error that ended it,
    `ended_by` the step that raised it, and `reason` why it is paused. `size` is that of its
    snapshot, in bytes.
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


class RunsPage(msgspec.Struct, frozen=True):
    """One page of runs.

    `cursor` continues the list, `None` means that this is its end. If the search stopped early,
    `searched_until` is the time back to which runs were examined, and `examined` how many were.
    """

    runs: tuple[RunRow, ...]
    cursor: str | None = None
    examined: int = 0
    searched_until: datetime | None = None


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback; `is_engine` is whether it is inside perdure."""

    file: str
    line: int
    function: str
    code: str = ""
    is_engine: bool = False


class ErrorFacts(msgspec.Struct, frozen=True):
    """An exception or a returned `Err`, with what caused it, or what was being handled.

    `value` is the JSON of an `Err`'s error that is not an exception. `members` are those of an
    exception group.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    value: Json = None
    notes: tuple[str, ...] = ()
    cause: "ErrorFacts | None" = None
    members: tuple["ErrorFacts", ...] = ()


class WaitFacts(msgspec.Struct, frozen=True):
    """Something that a run waits for: a time, an event, the next attempt of a step, or the end of
    other runs, of which `run_id` is the one, or what the ids of the many begin with.

    Or the answer to an approval, with its `question`, `to` whom, its `options` and `data`, or to a
    callback. `expires_at` is when that ends without an answer.
    """

    id: str
    kind: Literal["sleep", "event", "retry", "run", "runs", "approval", "callback"]
    wake_at: datetime | None = None
    event: str | None = None
    attempt: int | None = None
    error: str = ""
    since: datetime | None = None
    run_id: str = ""
    question: str = ""
    to: str = ""
    options: tuple[str, ...] = ()
    data: Json = None
    expires_at: datetime | None = None


class ApprovalRow(msgspec.Struct, frozen=True):
    """An approval that a run waits for; `wait` is its name in the run."""

    run_id: str
    workflow: str | None
    wait: str
    question: str
    to: str = ""
    options: tuple[str, ...] = ()
    since: datetime | None = None
    expires_at: datetime | None = None


class ApprovalsPage(msgspec.Struct, frozen=True):
    """One page of open approvals, those of the newest runs first; `cursor` continues it."""

    approvals: tuple[ApprovalRow, ...]
    cursor: str | None = None


class MessageFacts(msgspec.Struct, frozen=True):
    """A message in the inbox of a run that was not consumed yet."""

    id: str
    event: str
    sent_at: datetime
    payload: Json = None


class Act(msgspec.Struct, frozen=True):
    """What an operator did: who, what, why, from where (`cli`, `dashboard`, `python`).

    `was` says what it replaced. `refused` says why it was not applied, if it was not.
    """

    at: datetime
    by: str
    via: str
    verb: str
    run_id: str = ""
    step: str = ""
    why: str = ""
    was: str = ""
    refused: str = ""


class ActsPage(msgspec.Struct, frozen=True):
    """One page of the audit trail, newest first; `cursor` continues it."""

    acts: tuple[Act, ...]
    cursor: str | None = None


class InFlight(msgspec.Struct, frozen=True):
    """A step that a worker is executing, as of the worker's last heartbeat.

    `next_attempt_at` is set while the worker waits for the step's next attempt.
    """

    run_id: str
    workflow: str
    key: str
    since: datetime
    attempt: int = 1
    next_attempt_at: datetime | None = None
    worker: str = ""


class StepRow(msgspec.Struct, frozen=True):
    """One record of a run. `error` is the first line of the error; `by` is who entered it by hand.

    `value` is a preview: JSON text of at most 80 characters. `run_id` is the run that the step
    started or waited for.
    """

    key: str
    name: str
    kind: str
    ok: bool
    branch: str
    started_at: datetime | None
    ended_at: datetime | None
    duration: timedelta | None
    attempts: int
    value: str = ""
    error: str = ""
    by: str = ""
    size: int = 0
    run_id: str = ""


class StepsPage(msgspec.Struct, frozen=True):
    """Records of a run in the order they were made; `after` is the key that continues the list."""

    steps: tuple[StepRow, ...]
    total: int
    after: str | None = None


class StepGroup(msgspec.Struct, frozen=True):
    """Calls with the same name, folded."""

    name: str
    kind: str
    count: int
    failed: int
    first_started_at: datetime | None
    last_ended_at: datetime | None
    p50: timedelta | None


class StepDetail(msgspec.Struct, frozen=True):
    """One record in full. `position` counts from 1; `later` is how many records come after it.

    `arguments` are those of the call, if the runtime records them.
    """

    step: StepRow
    value: Json = None
    error: ErrorFacts | None = None
    event: str = ""
    position: int = 0
    later: int = 0
    arguments: Json = None


class Why(msgspec.Struct, frozen=True):
    """Why a run is where it is, in one or a few sentences.

    `situation` is the name of the rule that matched (`failed`, `paused`, `suspended`, `waiting`,
    `running`, `owner_silent`, `held_back`, `no_worker`, …), `facts` what the sentence is made of.
    """

    situation: str
    sentence: str
    facts: dict[str, Json] = {}


class Fork(msgspec.Struct, frozen=True):
    """The run and the step that a run was forked from."""

    run_id: str
    at: str


class Parent(msgspec.Struct, frozen=True):
    """The run that started a run, and the step that did; without a status if it was deleted."""

    run_id: str
    call: str
    workflow: str | None = None
    status: RunStatus | None = None


class Children(msgspec.Struct, frozen=True):
    """The runs that a run started: the newest of them, and how many have each status.

    `counts` are those of the newest 200; if there are more, they are capped. The query
    `parent:<id>` finds them all.
    """

    runs: tuple[RunRow, ...] = ()
    counts: dict[str, "Tally"] = {}


class RollbackFacts(msgspec.Struct, frozen=True):
    """How far the steps of a run were undone, since when, and after which error.

    Of `steps` that were to be undone, `undone` were. `not_undone` says for each step that could not
    be, by its key, what kept it from that.
    """

    began_at: datetime
    error: str
    steps: int
    undone: int
    not_undone: dict[str, str] = {}


class RunFacts(msgspec.Struct, frozen=True):
    """One run: everything but its steps, which have pages of their own.

    `known_by` are the live workers that can drive it. `acts` are the newest first. `schedule` is
    the name of the schedule that started it.
    """

    run: RunRow
    why: Why
    payload: Json = None
    output: Json = None
    error: ErrorFacts | None = None
    error_steps: tuple[str, ...] = ()
    waits: tuple[WaitFacts, ...] = ()
    inbox: tuple[MessageFacts, ...] = ()
    inbox_has_more: bool = False
    in_flight: tuple[InFlight, ...] = ()
    acts: tuple[Act, ...] = ()
    act_count: int = 0
    generation: int = 1
    deadline: datetime | None = None
    progress: float | None = None
    note: str = ""
    forked_from: Fork | None = None
    known_by: tuple[str, ...] = ()
    groups: tuple[StepGroup, ...] = ()
    warnings: tuple[str, ...] = ()
    truncated: bool = False
    parent: Parent | None = None
    children: Children = Children()
    schedule: str = ""
    rollback: RollbackFacts | None = None

    def question(self, wait: str = "") -> WaitFacts | None:
        """Return the approval or callback of this name, or the only one without a name."""
        asks = [each for each in self.waits if each.kind in ("approval", "callback")]
        found = [each for each in asks if wait in ("", each.id)]
        return found[0] if len(found) == 1 else None


class WorkflowVersions(msgspec.Struct, frozen=True):
    """A workflow that a worker drives, and the first and the last version of it."""

    workflow: str
    first: int
    last: int


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker as of its last heartbeat.

    A live one has a heartbeat; a lost one disappeared without a clean stop within the last day.
    `owned` are the runs that a lost one still owns, if one worker was asked for.
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


class Tally(msgspec.Struct, frozen=True):
    """A number of runs; if `capped`, there are at least so many."""

    count: int
    capped: bool = False


class Percentiles(msgspec.Struct, frozen=True):
    """Durations of runs or steps, from classes that double: each value is an upper bound."""

    count: int
    p50: timedelta | None = None
    p95: timedelta | None = None
    p99: timedelta | None = None


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
    definitions: tuple["DefinitionFacts", ...] = ()
    kept_for: dict[str, timedelta] = {}


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


class ErrorGroup(msgspec.Struct, frozen=True):
    """Failed runs with the same workflow, step and error; numbers in the message are folded.

    `query` finds these runs, `by_hour` counts them for a sparkline, oldest hour first.
    """

    workflow: str
    step: str
    type: str
    message: str
    count: int
    first_at: datetime
    last_at: datetime
    run_ids: tuple[str, ...]
    query: str
    by_hour: tuple[int, ...] = ()


class ErrorGroups(msgspec.Struct, frozen=True):
    """Groups of failed runs, the largest first, of the newest `examined` failures."""

    groups: tuple[ErrorGroup, ...]
    examined: int
    is_complete: bool


class AgendaHour(msgspec.Struct, frozen=True):
    """How many runs wake in one hour."""

    hour: datetime
    count: int


class AwaitedEvent(msgspec.Struct, frozen=True):
    """How many runs wait for an event, and since when the first of them does."""

    event: str
    count: int
    oldest_at: datetime


class Agenda(msgspec.Struct, frozen=True):
    """What will happen next: the next runs to wake, wakes by hour, and awaited events."""

    next: tuple[RunRow, ...]
    hours: tuple[AgendaHour, ...]
    events: tuple[AwaitedEvent, ...]
    examined: int
    is_complete: bool


class Attention(msgspec.Struct, frozen=True):
    """Something an operator should look at: a sentence, and the query or run that shows it."""

    text: str
    query: str = ""
    run_id: str = ""


class Overview(msgspec.Struct, frozen=True):
    """The store at a glance. `last_day` counts runs that ended in the last 24 hours.

    If `due_capped`, there are at least `due` runs that are due.
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


class HistoryPoint(msgspec.Struct, frozen=True):
    """One step of a chart. Numbers are `None` where no worker has reported: a gap, not zero."""

    at: datetime
    completed: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    slots: int | None = None
    running: int | None = None
    depths: dict[str, int] = {}


class WorkerHistory(msgspec.Struct, frozen=True):
    """What the workers reported about a window, oldest first."""

    points: tuple[HistoryPoint, ...]
    step: timedelta
    durations: dict[str, Percentiles] = {}


class Difference(msgspec.Struct, frozen=True):
    """One place where two runs differ; `where` is a path in the input or the key of a step."""

    where: str
    left: Json = None
    right: Json = None
    kind: Literal["changed", "only_left", "only_right"] = "changed"


class Comparison(msgspec.Struct, frozen=True):
    """How two runs differ. `first` is the position of the first step that differs."""

    left: RunRow
    right: RunRow
    payload: tuple[Difference, ...]
    steps: tuple[Difference, ...]
    first: str = ""


class BundleMessage(msgspec.Struct, frozen=True):
    """A message in the inbox of an exported run; `id` is that of its store."""

    event: str
    payload: Json
    sent_at: str
    id: str


class Bundle(msgspec.Struct, frozen=True):
    """An exported run: its snapshot and inbox, and a checksum of everything else.

    If `redacted`, some values were hidden, and an imported copy has the mask in their place.
    """

    run_id: str
    workflow: str | None
    version: int
    status: RunStatus
    queue: str
    tags: dict[str, str]
    exported_at: str
    redacted: bool
    snapshot: Json
    inbox: tuple[BundleMessage, ...] = ()
    format: Literal["perdure-run-1"] = "perdure-run-1"
    checksum: str = ""


class Finding(msgspec.Struct, frozen=True):
    """Something that `doctor` found, and how to fix it."""

    code: str
    text: str
    fix: str
    severity: Literal["error", "warning"] = "warning"


class StoreFacts(msgspec.Struct, frozen=True):
    """The store: its address without a password, what it can do, and how far its clock is off."""

    url: str
    kind: str
    capabilities: dict[str, Json]
    sentences: tuple[str, ...]
    clock_drift: timedelta | None = None


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


class BulkProgress(msgspec.Struct, frozen=True):
    """A bulk operation: one verb for each run that a query matches.

    `refused` counts the runs that refused it, with the newest `reasons`. One that is interrupted or
    stopped can be continued. `seen_at` is when the process that works on it last said so.
    """

    id: str
    query: str
    verb: str
    by: str
    why: str
    began_at: datetime
    matched: int | None = None
    done: int = 0
    refused: int = 0
    reasons: tuple[str, ...] = ()
    rate: float | None = None
    limit: int | None = 1000
    state: Literal["running", "stopped", "interrupted", "done"] = "running"
    ended_at: datetime | None = None
    seen_at: datetime | None = None
