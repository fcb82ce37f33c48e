"""Format version 1 of a run's state: plain dicts that `json.dumps` takes as they are.

Keys are as on the wire. Fields that the format's other readers do not know are optional, and those
readers ignore them. Some writers of the format put null where a field is absent: it means the same.
A journal entry is a *delta*: the same shape with only what is new in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, TypeGuard, cast

from perdure.clock import isoformat, parse_iso
from perdure.codec import SerializedCause
from perdure.errors import SnapshotFormatError
from perdure.snapshot.validate import (
    FORMAT_VERSION,
    object_flaw,
    snapshot_problems,
    version_problems,
    warnings_problems,
)

RunStatus: TypeAlias = Literal[
    "running", "suspended", "waiting", "paused", "completed", "failed", "cancelled"
]
ExecutionStatus: TypeAlias = Literal["running", "completed", "failed"]
ExecutionState: TypeAlias = Literal["suspended", "waiting", "paused", "cancelled"]
Origin: TypeAlias = Literal["result", "throw"]
Metadata: TypeAlias = dict[str, Any]
"""Any JSON by name; `workflowId`, `definitionHash` and `input` have a meaning of their own."""


class StepMeta(TypedDict):
    """Whether a failure was returned as `Err` ("result") or raised ("throw")."""

    origin: Origin


class StepFacts(TypedDict, total=False):
    """What perdure records of a step beside its outcome.

    `at` is when it ended, `args` the fingerprint of its arguments. Absent, `attempts` is 1, `kind`
    is "step", `branch` is the root, and `call` is the record's key. With `typed` the value is
    rebuilt by the step's return type; with `coded` it holds tags. `failures` are the keys of the
    failed steps that made a race fail. `unclaimed` is the name of an event that a wait received
    and its branch, cancelled by a race, never saw: the next wait for that name receives it.
    Empty, it was received; either way the record no longer answers its own call.
    """

    at: str
    durationMs: float
    attempts: int
    args: str
    kind: str
    typed: bool
    coded: bool
    branch: str
    call: str
    failures: list[str]
    unclaimed: str


class StepSuccess(StepFacts):
    """A step that gave `value`; without it, the step gave nothing."""

    ok: Literal[True]
    value: NotRequired[Any]


class StepFailure(StepFacts):
    """A step that failed with `error`; a null `cause` means that none is known."""

    ok: Literal[False]
    error: Any
    cause: SerializedCause | None
    meta: NotRequired[StepMeta]


StepRecord: TypeAlias = StepSuccess | StepFailure


class PendingWait(TypedDict):
    """Something a run at rest waits for: a time, an event, or an event until a time."""

    id: str
    kind: Literal["sleep", "event"]
    wakeAt: NotRequired[str]
    event: NotRequired[str]


class Execution(TypedDict):
    """How far a run is. `state` is finer than `status`, and absent when `status` says it all.

    `failed` are the keys of the steps that ended a failed run. `truncated` means that its records
    were too large to be kept. `reason` is why a run is paused.
    """

    status: ExecutionStatus
    lastUpdated: str
    completedAt: NotRequired[str]
    currentStepId: NotRequired[str]
    state: NotRequired[ExecutionState]
    pending: NotRequired[list[PendingWait]]
    output: NotRequired[Any]
    error: NotRequired[Any]
    failed: NotRequired[list[str]]
    truncated: NotRequired[bool]
    reason: NotRequired[str]


class SnapshotWarning(TypedDict):
    """A value of a step that did not survive being recorded, and where in it."""

    type: str
    stepId: str
    path: str
    reason: str


class WorkflowSnapshot(TypedDict):
    """The whole state of a run.

    `waits` comes from a journal: the waits that began (or, with null, ended) since the snapshot
    whose `execution.pending` lists those that were open then.
    """

    formatVersion: Literal[1]
    workflowName: NotRequired[str]
    steps: dict[str, StepRecord]
    execution: Execution
    waits: NotRequired[dict[str, PendingWait | None]]
    metadata: NotRequired[Metadata]
    warnings: NotRequired[list[SnapshotWarning]]


Snapshot: TypeAlias = WorkflowSnapshot


def new_snapshot(
    workflow_name: str | None = None, *, now: datetime, metadata: Metadata | None = None
) -> Snapshot:
    """Give the snapshot of a run that has just begun."""
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


def merge_snapshots(base: Snapshot, *deltas: Mapping[str, object]) -> Snapshot:
    """Give the base with everything in the deltas applied in order; the inputs stay as they are.

    A step of a delta replaces the one of the same key and keeps its place; new steps come after.
    `execution` and `workflowName` are the last given ones; an `execution` without `pending` keeps
    the earlier one's. `metadata` and `waits` are merged by name. Warnings stand until their step is
    recorded again. Merging is associative, and takes time linear in the size of what is merged.
    """
    parts = (base, *deltas)
    merged: dict[str, object] = {"formatVersion": FORMAT_VERSION}
    by_name: dict[str, dict[str, object]] = {"steps": {}, "waits": {}, "metadata": {}}
    pending: object = None
    for part in parts:
        _check_delta(part)
        merged.update((name, value) for name, value in part.items() if value is not None)
        for name, entries in by_name.items():
            entries.update(_dict_in(part, name))
        pending = _dict_in(part, "execution").get("pending", pending)
    merged["steps"] = by_name["steps"]
    if "execution" in merged:
        execution = merged["execution"] = dict(_dict_in(merged, "execution"))
        if pending is not None:
            execution["pending"] = pending
    for name in ("waits", "metadata"):
        if name in merged:
            merged[name] = by_name[name]
    if "warnings" in merged:
        merged["warnings"] = _standing_warnings(parts)
    if not merged.get("warnings"):
        merged.pop("warnings", None)
    return cast(Snapshot, merged)


def _check_delta(part: Mapping[str, object]) -> None:
    if flaw := object_flaw(part):
        raise SnapshotFormatError([f"a snapshot{flaw}"])
    if "formatVersion" in part and (problems := list(version_problems(part))):
        raise SnapshotFormatError(problems)


def _standing_warnings(parts: Sequence[Mapping[str, object]]) -> list[SnapshotWarning]:
    last_recorded = {
        key: turn for turn, part in enumerate(parts) for key in _dict_in(part, "steps")
    }
    return [
        warning
        for turn, part in enumerate(parts)
        for warning in _warnings_in(part)
        if last_recorded.get(warning["stepId"], turn) <= turn
    ]


def _dict_in(part: Mapping[str, object], name: str) -> dict[str, object]:
    value = part.get(name)
    if value is None:
        return {}
    if flaw := object_flaw(value):
        raise SnapshotFormatError([name + flaw])
    return cast(dict[str, object], value)


def _warnings_in(part: Mapping[str, object]) -> list[SnapshotWarning]:
    warnings = part.get("warnings")
    if warnings is None:
        return []
    if problems := list(warnings_problems(warnings)):
        raise SnapshotFormatError(problems)
    return cast(list[SnapshotWarning], warnings)


def rest_status(snapshot: Snapshot) -> RunStatus:
    """Give how the run lies: the finer state when there is one, else the status."""
    execution = snapshot["execution"]
    return execution.get("state") or execution["status"]


def is_over(status: RunStatus) -> bool:
    """Tell whether a run of this status will never go on by itself."""
    return status in ("completed", "failed", "cancelled")


def wake_at_of(snapshot: Snapshot) -> datetime | None:
    """Give the earliest time a resting run waits for, or None: it waits for no time."""
    times = (parse_iso(wait["wakeAt"]) for wait in _waits(snapshot) if "wakeAt" in wait)
    return min(times, default=None)


def awaits_of(snapshot: Snapshot) -> tuple[str, ...]:
    """Give the names of the events a resting run waits for, each once."""
    return tuple(dict.fromkeys(wait["event"] for wait in _waits(snapshot) if "event" in wait))


def _waits(snapshot: Snapshot) -> Sequence[PendingWait]:
    return open_waits(snapshot) if rest_status(snapshot) in ("suspended", "waiting") else ()


def open_waits(snapshot: Snapshot) -> list[PendingWait]:
    """Return the waits that have begun and not ended."""
    waits: dict[str, PendingWait | None] = {
        wait["id"]: wait for wait in snapshot["execution"].get("pending") or ()
    }
    waits.update(snapshot.get("waits") or {})
    return [wait for wait in waits.values() if wait is not None]


def workflow_of(snapshot: Snapshot) -> str | None:
    """Give the name of the run's workflow."""
    return snapshot.get("workflowName")


@dataclass(frozen=True, slots=True)
class SnapshotCheck:
    """What `validate_snapshot` found: the snapshot, or every problem with its path."""

    valid: bool
    snapshot: Snapshot | None
    errors: tuple[str, ...]


def looks_like_workflow_snapshot(candidate: object) -> TypeGuard[Snapshot]:
    """Tell whether this is probably a snapshot: the version, and objects where they belong."""
    if object_flaw(candidate):
        return False
    fields = cast(dict[str, object], candidate)
    parts = (fields.get("steps"), fields.get("execution"))
    return not any(version_problems(fields)) and all(type(part) is dict for part in parts)


def validate_snapshot(candidate: object) -> SnapshotCheck:
    """Give the snapshot, or every problem it has, each with its path: `steps["key"].ok …`.

    Takes anything at all and runs none of its code. Objects are exactly `dict`, as JSON gives them.
    Unknown fields are let be, and so is what a step gave.
    """
    errors = tuple(snapshot_problems(candidate))
    snapshot = None if errors else cast(Snapshot, candidate)
    return SnapshotCheck(valid=not errors, snapshot=snapshot, errors=errors)


def assert_valid_snapshot(candidate: object) -> Snapshot:
    """Give the snapshot back, or raise `SnapshotFormatError` with every problem."""
    check = validate_snapshot(candidate)
    if check.snapshot is None:
        raise SnapshotFormatError(check.errors)
    return check.snapshot
