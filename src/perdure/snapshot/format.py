"""Format version 1 of a run's state: plain dicts that `json.dumps` accepts.

Keys are spelled as they are stored. The TypedDicts are the only description of the fields:
`validate` derives its checks from their annotations, and a test compares them with `WireRecord`,
which encodes step records.

Fields that only perdure writes are optional, and other readers of the format ignore them. Some
writers store null for a field that is not set: `OrNull` marks the fields where that is accepted.
"""

from collections.abc import Sequence
from datetime import datetime
from random import Random
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias, TypedDict, TypeVar

from perdure.clock import isoformat, parse_iso
from perdure.codec import SerializedCause
from perdure.errors import SnapshotFormatError

T = TypeVar("T")

FORMAT_VERSION: Final = 1

RunStatus: TypeAlias = Literal[
    "queued", "running", "suspended", "waiting", "paused", "completed", "failed", "cancelled"
]
ExecutionStatus: TypeAlias = Literal["running", "completed", "failed"]
ExecutionState: TypeAlias = Literal["queued", "suspended", "waiting", "paused", "cancelled"]
Origin: TypeAlias = Literal["result", "throw"]

Timestamp: TypeAlias = Annotated[str, "ISO 8601 with a UTC offset"]
Milliseconds: TypeAlias = Annotated[float, "finite and not negative"]
Count: TypeAlias = Annotated[int, "at least 1"]

NULLABLE: Final = "null is read as absent"
OrNull: TypeAlias = Annotated[T, NULLABLE]

UNCHECKED = "uncheckedInput"
Metadata: TypeAlias = dict[str, Any]
"""Any JSON by name; `KnownMetadata` lists the names that have a meaning."""


class KnownMetadata(TypedDict, total=False):
    """The metadata that perdure and other readers of the format interpret.

    `generation` counts how often the run began again from an earlier point. Without it, the run is
    in its first generation. `seed` is drawn when the run is created: its random numbers and UUIDs
    derive from it. `rewinds` counts the generations that began with a rewind, which keeps records
    and therefore the values that were derived before them. Only the engine sets these three.

    `acts` are what operators did to the run: the last ones, and in `actCount` how many there were.
    `forkedFrom` names the run and the step that this run was forked from.

    `parent` names the run, the generation and the call that started this run, `depth` counts its
    ancestors. `replyTo` names the run, and the event there, that learns of the end of this run.
    `children` are those that an earlier generation of this run started, and that end with it.

    `scheduledFor` is the nominal time that a schedule started the run for, `unpausedAt` is when a
    paused run was last continued. `userMetadata` is what the user stored with it.

    `uncheckedInput` is set while `input` is what a caller wrote that did not know the definition.
    `firstInput` is the payload that the run was triggered with, if `input` is another one.
    """

    workflowId: OrNull[str]
    definitionHash: OrNull[str]
    input: Any
    generation: Count
    seed: str
    rewinds: Count
    acts: list[dict[str, Any]]
    actCount: Count
    forkedFrom: dict[str, str]
    parent: dict[str, Any]
    depth: Count
    replyTo: dict[str, Any]
    children: list[str]
    scheduledFor: Timestamp
    unpausedAt: Timestamp
    uncheckedInput: bool
    firstInput: Any
    userMetadata: dict[str, Any]


class StepMeta(TypedDict):
    """Whether a failure was returned as `Err` ("result") or raised ("throw").

    With `causeless`, an `Err` had no cause, and the record's `cause` only repeats the error for
    readers that require one.
    """

    origin: Origin
    causeless: NotRequired[bool]


class StepFacts(TypedDict, total=False):
    """What perdure records about a step besides its outcome.

    `at` is when the step ended, `args` the fingerprint of its arguments. The defaults are 1 for
    `attempts`, "step" for `kind`, the root for `branch` and the record's key for `call`. With
    `typed`, the value is rebuilt from the step's return type; with `coded`, it contains tags.
    `failures` are the keys of the failed steps that made a race fail. `event` is the name of the
    event that a wait received; without it, the wait timed out.

    `unclaimed` names an event that a wait received in a branch that lost a race, before code of the
    branch saw it: the next wait for that name receives it. Empty means that a wait did. In both
    cases the record no longer answers its own call.

    `run` is the id of a run that was started or waited for. `within` is the branch of a call with
    an explicit key, which is not part of the call's identity.

    `answer` is what is known of the answer to an approval or callback: `by` whom and when (`at`),
    or that it `expired`. `event` is then the name of the message.

    `by` is who entered the record by hand. Its value is JSON that the step's return type reads.
    `arguments` are those of the call as far as the runtime records them, for people only.

    `undo` says that the step was given a function that undoes it, `sagas` are the scopes that the
    step belongs to, the outermost first.

    The names `spent` and `streams` are reserved. They are ignored, and kept.
    """

    at: Timestamp
    durationMs: Milliseconds
    attempts: Count
    args: str
    kind: str
    typed: bool
    coded: bool
    branch: str
    call: str
    within: str
    failures: list[str]
    event: str
    unclaimed: str
    by: str
    run: str
    arguments: list[Any]
    answer: dict[str, Any]
    undo: bool
    sagas: list[str]


class SuccessRecord(StepFacts):
    """A step that returned `value`; without the field, it returned `None`."""

    ok: Literal[True]
    value: NotRequired[Any]


class FailureRecord(StepFacts):
    """A step that failed with `error`; `cause` is null if it is not known."""

    ok: Literal[False]
    error: Any
    cause: SerializedCause | None
    meta: NotRequired[OrNull[StepMeta]]


StepRecord: TypeAlias = SuccessRecord | FailureRecord


class PendingWait(TypedDict):
    """What a suspended run waits for: a time, an event, an event until a time, or the next attempt
    of a step whose last `attempt` failed with `error`. `since` is when a wait began. `run` is the
    run whose end the event reports, `cancels` whether that run is cancelled if nothing waits for it
    any more.

    `ask` marks a wait for an answer from outside. Its token contains the `nonce`, which is a
    secret. `question`, `to`, `options` and `data` are what is asked of whom, `expiresAt` is when
    the wait ends without an answer; `wakeAt` may be that of a reminder. `round` counts the tokens
    of one question, from 1.
    """

    id: str
    kind: Literal["sleep", "event", "retry"]
    wakeAt: NotRequired[Timestamp]
    since: NotRequired[Timestamp]
    event: NotRequired[str]
    attempt: NotRequired[Count]
    error: NotRequired[str]
    run: NotRequired[str]
    cancels: NotRequired[bool]
    ask: NotRequired[Literal["approval", "callback"]]
    nonce: NotRequired[str]
    question: NotRequired[str]
    to: NotRequired[str]
    options: NotRequired[list[str]]
    data: NotRequired[Any]
    expiresAt: NotRequired[Timestamp]
    round: NotRequired[Count]


class Rollback(TypedDict):
    """Says that a run is being undone, or was: since when, and how it ends then.

    `status` is that of a run that failed or was cancelled, `error` its error, `failed` and `sagas`
    are those of its `execution`. `steps` is how many steps were to be undone at that time.
    """

    at: Timestamp
    status: Literal["failed", "cancelled"]
    error: Any
    failed: list[str]
    sagas: list[str]
    steps: Count


class ExecutionBlock(TypedDict):
    """The progress of a run; the snapshot's `execution`.

    `state` refines `status` and is absent where `status` is exact. `output` is the value of a
    completed run, rebuilt from the workflow's return type if `outputTyped` is set. `failed` are the
    keys of the steps that ended a failed run, `sagas` those of the scopes that were undone when
    that failure went through them. `truncated` means that its records were too large to
    be stored. `reason` is why a run is paused, `dueAt` when a run that was paused before it started
    was to start. `rollback` is set from the time when the steps of the run begin to be undone.

    The name `started` is reserved, and ignored.
    """

    status: ExecutionStatus
    lastUpdated: Timestamp
    completedAt: NotRequired[OrNull[Timestamp]]
    currentStepId: NotRequired[OrNull[str]]
    state: NotRequired[ExecutionState]
    pending: NotRequired[list[PendingWait]]
    output: NotRequired[Any]
    outputTyped: NotRequired[bool]
    error: NotRequired[Any]
    failed: NotRequired[list[str]]
    sagas: NotRequired[list[str]]
    truncated: NotRequired[bool]
    reason: NotRequired[str]
    dueAt: NotRequired[Timestamp]
    rollback: NotRequired[Rollback]


OutboxItem: TypeAlias = dict[str, object]
"""What a run does to another run once the write that contains it is durable, as a JSON object."""


class SnapshotWarning(TypedDict):
    """A part of a step's value that could not be recorded as it was, and its path."""

    type: str
    stepId: str
    path: str
    reason: str


class WorkflowSnapshot(TypedDict):
    """The whole state of a run.

    `waits` comes from a journal: the waits that began (or ended, if null) after the snapshot whose
    `execution.pending` lists the waits that were open then. `outbox` contains, by name, what the
    run does to other runs; null means that the item was delivered.
    """

    formatVersion: Literal[1]
    workflowName: NotRequired[OrNull[str]]
    steps: dict[str, StepRecord]
    execution: ExecutionBlock
    waits: NotRequired[OrNull[dict[str, PendingWait | None]]]
    outbox: NotRequired[OrNull[dict[str, OutboxItem | None]]]
    metadata: NotRequired[OrNull[Metadata]]
    warnings: NotRequired[OrNull[list[SnapshotWarning]]]


Snapshot: TypeAlias = WorkflowSnapshot


def new_seed(random: Random) -> str:
    """Draw the seed of a new run: what it derives random numbers and UUIDs from."""
    return f"{random.getrandbits(64):016x}"


def new_snapshot(
    workflow_name: str | None = None, *, now: datetime, metadata: Metadata | None = None
) -> Snapshot:
    """Return the snapshot of a run that is created now."""
    snapshot: Snapshot = {
        "formatVersion": FORMAT_VERSION,
        "steps": {},
        "execution": {"status": "running", "lastUpdated": isoformat(now)},
    }
    if workflow_name is not None:
        snapshot["workflowName"] = workflow_name
    if metadata is not None:
        snapshot["metadata"] = dict(metadata)
    return snapshot


def rest_status(snapshot: Snapshot) -> RunStatus:
    """Return the run's status: `state`, if it is set, is more exact than `status`."""
    execution = snapshot["execution"]
    return execution.get("state") or execution["status"]


def is_over(status: RunStatus) -> bool:
    """Return whether a run with this status has ended."""
    return status in ("completed", "failed", "cancelled")


def wake_at_of(snapshot: Snapshot) -> datetime | None:
    """Return the earliest time that a suspended run waits for, or `None` if it waits for none."""
    times = (parse_iso(wait["wakeAt"]) for wait in _waits(snapshot) if "wakeAt" in wait)
    return min(times, default=None)


def awaits_of(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the distinct names of the events that a suspended run waits for."""
    return tuple(dict.fromkeys(wait["event"] for wait in _waits(snapshot) if "event" in wait))


def _waits(snapshot: Snapshot) -> Sequence[PendingWait]:
    return open_waits(snapshot) if rest_status(snapshot) in ("suspended", "waiting") else ()


def open_waits(snapshot: Snapshot) -> list[PendingWait]:
    """Return the waits that have begun and not ended."""
    pending, changed = snapshot["execution"].get("pending"), snapshot.get("waits")
    if not pending and not changed:
        return []
    waits: dict[str, PendingWait | None] = {wait["id"]: wait for wait in pending or ()}
    waits.update(changed or {})
    return [wait for wait in waits.values() if wait is not None]


def outbox_of(snapshot: Snapshot) -> dict[str, OutboxItem]:
    """Return the outbox items that are not known to be delivered, by name."""
    outbox = snapshot.get("outbox") or {}
    return {name: item for name, item in outbox.items() if item is not None}


def generation_of(metadata: Metadata | None) -> int:
    """Return the generation of a run, or raise `SnapshotFormatError` if it is malformed.

    A generation that is misread makes a step's idempotency key that of another payment.
    """
    generation = (metadata or {}).get("generation", 1)
    if type(generation) is not int or generation < 1:
        problem = f"metadata.generation: expected an int >= 1, got {generation!r}"
        raise SnapshotFormatError([problem])
    return generation


def rewinds_of(metadata: Metadata | None) -> int:
    """Return how many generations of a run began with a rewind."""
    rewinds = (metadata or {}).get("rewinds", 0)
    if type(rewinds) is not int or rewinds < 0:
        problem = f"metadata.rewinds: expected an int >= 0, got {rewinds!r}"
        raise SnapshotFormatError([problem])
    return rewinds


def set_generation(metadata: Metadata, generation: int) -> None:
    """Store a run's generation in its metadata; the first one is left out."""
    metadata.pop("generation", None)
    if generation > 1:
        metadata["generation"] = generation


def reply_to_of(metadata: Metadata | None) -> dict[str, Any] | None:
    """Return the run and the event that learn of a run's end, if another run waits for it."""
    reply_to = metadata.get("replyTo") if metadata else None
    return reply_to if isinstance(reply_to, dict) else None


def workflow_of(snapshot: Snapshot) -> str | None:
    """Return the name of the run's workflow."""
    return snapshot.get("workflowName")


def version_of(metadata: Metadata | None) -> int:
    """Return the version of the definition that a run belongs to; 0 if none is stored."""
    version = metadata.get("version") if metadata else None
    return version if type(version) is int and version > 0 else 0


def created_at_of(metadata: Metadata | None) -> str:
    """Return when a run was created, as ISO 8601; an empty string if that is not stored."""
    created = metadata.get("createdAt") if metadata else None
    return created if type(created) is str else ""
