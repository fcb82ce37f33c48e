"""Format version 1 of a run's state: plain dicts that `json.dumps` accepts.

Keys are spelled as they are stored. The TypedDicts are the only description of the fields:
`validate` derives its checks from their annotations, and a test compares them with `WireRecord`,
which encodes step records.

Fields that only perdure writes are optional, and other readers of the format ignore them. Some
writers store null for unset fields; `OrNull` marks the fields where that is accepted.
"""

from collections.abc import Sequence
from datetime import datetime
from random import Random
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias, TypedDict, TypeVar
from uuid import UUID

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
"""Any JSON values by name; `KnownMetadata` lists the names that have a meaning."""


class KnownMetadata(TypedDict, total=False):
    """The metadata that perdure and other readers of the format interpret.

    `generation` counts how often the run has started over from an earlier point. Without it, the
    run is in its first generation. `seed` is drawn when the run is created; the run's random
    numbers and UUIDs are derived from it. `rewinds` counts the generations that began with a
    rewind, which keeps records and therefore the values that were derived before them. Only the
    engine sets these three.

    `acts` are the latest acts of operators on the run, and `actCount` is how many there were in
    total. `forkedFrom` names the run and the step that this run was forked from.

    `parent` names the run, the generation and the call that started this run, `depth` counts its
    ancestors. `replyTo` names the run, and its event, to notify when this run ends. `children` are
    the child runs that an earlier generation started, and that end with this run.

    `scheduledFor` is the nominal time for which a schedule started the run, `unpausedAt` is when a
    paused run was last continued. `userMetadata` is what the user stored with the run.

    `answers` says who answered the questions of a run whose records were dropped, and when, by the
    names of the messages.

    `uncheckedInput` is set while `input` was written by a caller that did not know the definition.
    `firstInput` is the payload that the run was triggered with, if `input` has changed since.
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
    answers: dict[str, dict[str, Any]]


class StepMeta(TypedDict):
    """Whether a failure was returned as `Err` ("result") or raised ("throw").

    With `causeless`, the `Err` had no cause, and the record's `cause` only repeats the error for
    readers that require one.
    """

    origin: Origin
    causeless: NotRequired[bool]


class StepFacts(TypedDict, total=False):
    """What perdure records about a step besides its outcome.

    `at` is when the step ended, `args` the fingerprint of its arguments. The defaults are 1 for
    `attempts`, "step" for `kind`, the root for `branch` and the record's key for `call`. With
    `typed`, the value is rebuilt from the step's return type; with `coded`, it contains tags.
    `failures` are the keys of the failed steps that made a race fail, and of the scopes that it
    failed through. `event` is the name of the event that a wait received; without it, the wait
    timed out.

    `unclaimed` names an event that a wait received in a branch that lost a race, before the
    branch's code saw it: the next wait for that name receives it. It is empty once a wait has
    received it. In both cases the record no longer answers its own call.

    `run` is the id of the run that the step started or waited for. `within` is the branch of a call
    with an explicit key, which is not part of the call's identity.

    `answer` describes the answer to an approval or callback: `by` whom and when (`at`), or that it
    `expired`. `event` is then the name of the message.

    `by` is the operator who entered the record by hand. Its value is JSON, read by the step's
    return type. `arguments` are the arguments of the call, if the runtime records them, for display
    only.

    `undo` says that the step has a function that undoes it, `sagas` are the scopes that the step
    belongs to, outermost first.

    The names `spent` and `streams` are reserved: they are preserved but ignored.
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
    """A step that failed with `error`; `cause` is null if it is unknown."""

    ok: Literal[False]
    error: Any
    cause: SerializedCause | None
    meta: NotRequired[OrNull[StepMeta]]


StepRecord: TypeAlias = SuccessRecord | FailureRecord


class PendingWait(TypedDict):
    """What a suspended run waits for.

    This is a time, an event, an event until a time, or the next attempt of a step whose last
    `attempt` failed with `error`. `since` is when the wait began. `run` is the run whose end the
    event reports, `cancels` whether that run is cancelled when nothing waits for it any longer.

    `ask` marks a wait for an answer from outside. Its token contains the `nonce`, which is a
    secret. `question`, `to`, `options` and `data` describe the request, `expiresAt` is when the
    wait ends without an answer; `wakeAt` may be the time of a reminder. `round` numbers the tokens
    of one question, starting at 1.
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
    """A rollback of a run: since when, and how the run ends afterwards.

    `status` is the run's final status (failed or cancelled), and `error` its error; `failed` and
    `sagas` have the same meaning as in `execution`. `steps` is how many steps had to be undone when
    the rollback began.
    """

    at: Timestamp
    status: Literal["failed", "cancelled"]
    error: Any
    failed: list[str]
    sagas: list[str]
    steps: Count


class ExecutionBlock(TypedDict):
    """The progress of a run: the snapshot's `execution`.

    `state` refines `status` and is absent where `status` is exact. `output` is the value of a
    completed run, rebuilt from the workflow's return type if `outputTyped` is set. `failed` are the
    keys of the steps whose failure ended the run, `sagas` the keys of the scopes that were undone
    as the failure passed through them. `truncated` means that the run's records were too large to
    be stored. `reason` is why a run is paused, and `dueAt` when a run that was paused before it
    started should have started. `rollback` is set once the steps of the run begin to be undone.

    The name `started` is reserved and ignored.
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
"""An action on another run, performed once the write that contains it is durable; a JSON object."""


class SnapshotWarning(TypedDict):
    """A part of a step's value that could not be recorded as it was, and its path."""

    type: str
    stepId: str
    path: str
    reason: str


class WorkflowSnapshot(TypedDict):
    """The whole state of a run.

    `waits` comes from the journal: waits that began (or ended, if null) after the snapshot, whose
    `execution.pending` lists the waits that were open at that time. `outbox` maps names to actions
    on other runs; null means that the item was delivered.
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
    """Draw the seed of a new run, from which its random numbers and UUIDs are derived."""
    return f"{random.getrandbits(64):016x}"


def new_uuid(random: Random) -> str:
    """Draw a UUID."""
    return str(UUID(int=random.getrandbits(128), version=4))


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
    """Return the run's status; `state`, if set, is more precise than `status`."""
    execution = snapshot["execution"]
    return execution.get("state") or execution["status"]


def is_over(status: RunStatus) -> bool:
    """Return whether a run with this status has ended."""
    return status in ("completed", "failed", "cancelled")


def wake_at_of(snapshot: Snapshot) -> datetime | None:
    """Return the earliest time that a suspended run waits for, or `None`."""
    times = (parse_iso(wait["wakeAt"]) for wait in _waits(snapshot) if "wakeAt" in wait)
    return min(times, default=None)


def awaits_of(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the distinct names of the events that a suspended run waits for."""
    return tuple(dict.fromkeys(wait["event"] for wait in _waits(snapshot) if "event" in wait))


def _waits(snapshot: Snapshot) -> Sequence[PendingWait]:
    return open_waits(snapshot) if rest_status(snapshot) in ("suspended", "waiting") else ()


def open_waits(snapshot: Snapshot) -> list[PendingWait]:
    """Return the open waits."""
    pending, changes = snapshot["execution"].get("pending"), snapshot.get("waits")
    if not pending and not changes:
        return []
    waits: dict[str, PendingWait | None] = {wait["id"]: wait for wait in pending or ()}
    waits.update(changes or {})
    return [wait for wait in waits.values() if wait is not None]


def outbox_of(snapshot: Snapshot) -> dict[str, OutboxItem]:
    """Return the outbox items that are not known to be delivered, by name."""
    outbox = snapshot.get("outbox")
    return {name: item for name, item in outbox.items() if item is not None} if outbox else {}


def generation_of(metadata: Metadata | None) -> int:
    """Return the generation of a run, or raise `SnapshotFormatError` if it is malformed.

    A misread generation would give a step the idempotency key of another payment.
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
    """Store a run's generation in its metadata, unless it is the first."""
    metadata.pop("generation", None)
    if generation > 1:
        metadata["generation"] = generation


def reply_to_of(metadata: Metadata | None) -> dict[str, Any] | None:
    """Return the run and event to notify of a run's end, if another run waits for it."""
    reply_to = metadata.get("replyTo") if metadata else None
    return reply_to if isinstance(reply_to, dict) else None


def workflow_of(snapshot: Snapshot) -> str | None:
    """Return the name of the run's workflow."""
    return snapshot.get("workflowName")


def version_of(metadata: Metadata | None) -> int:
    """Return the version of the run's definition; 0 if none is stored."""
    version = metadata.get("version") if metadata else None
    return version if type(version) is int and version > 0 else 0


def created_at_of(metadata: Metadata | None) -> str:
    """Return when a run was created, as ISO 8601, or "" if that is not stored."""
    created_at = metadata.get("createdAt") if metadata else None
    return created_at if type(created_at) is str else ""
