"""A run as users see it: its status, its output and its history."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.clock import from_milliseconds, parse_iso
from perdure.engine.user_metadata import user_metadata
from perdure.errors import Cancelled, CodecError, RunFailed, StepFailed
from perdure.result import Err
from perdure.runtime.deadlines import deadline_of
from perdure.snapshot import (
    PendingWait,
    RunStatus,
    Snapshot,
    StepRecord,
    created_at_of,
    is_over,
    open_waits,
    rest_status,
    version_of,
    visible_tags,
)
from perdure.snapshot.asks import is_ask, token_of
from perdure.snapshot.record import result_of
from perdure.snapshot.rollback import failures_in, owed_in, rollback_of

if TYPE_CHECKING:
    # Type checkers include this module; Python itself supports TypeVar defaults only since 3.13.
    from typing_extensions import TypeVar as TypeVarWithDefault

    T_co = TypeVarWithDefault("T_co", default=Any, covariant=True)
else:
    T_co = TypeVar("T_co", covariant=True)


class Wait(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A wait of a suspended run: for a time, an event, or an event until a time.

    In a wait for the next attempt of a step, `attempt` is the number of the attempt that failed
    with `error`. `run` is the run whose end is awaited. `token` answers an approval or a callback;
    `question`, `to`, `options` and `data` belong to an approval. `expires_at` is when the wait ends
    without an answer, while `wake_at` may be the time of a reminder.
    """

    id: str
    wake_at: datetime | None = None
    event: str | None = None
    attempt: int | None = None
    error: str = ""
    run: str = ""
    token: str = ""
    question: str = ""
    to: str = ""
    options: tuple[str, ...] = ()
    data: Any = None
    expires_at: datetime | None = None


class RollbackInfo(msgspec.Struct, frozen=True):
    """The rollback of a run: how far it is, since when, and why.

    `error` is the error of the run, which failed or was cancelled. `undone` of the `steps` were
    undone. `failures` maps the keys of steps that could not be undone so far to the reasons.
    """

    at: datetime
    status: Literal["failed", "cancelled"]
    error: Any
    steps: int
    undone: int
    failures: dict[str, str] = {}


class StepInfo(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """One recorded step of a run's history.

    `traceback` is the text of a failed step's traceback, `run` is the id of the run that the step
    started or waited for. `undo` says that the step can be undone; the record of its undo has the
    key `~undo:<key>`.
    """

    key: str
    kind: str
    ok: bool
    value: object
    error: object
    at: datetime | None
    duration: timedelta | None
    attempts: int
    branch: str
    traceback: str = ""
    run: str = ""
    undo: bool = False


class Run(msgspec.Struct, Generic[T_co], frozen=True, repr_omit_defaults=True):
    """A run as it was when it was read.

    `output` is set when the run is completed, `error` when it failed or was cancelled, `pending`
    while it waits. `version` is 0 until the first owner has bound the run to a version. `traceback`
    is the text of the error's traceback, or an empty string. `reason` is why the run is paused.
    `deadline` is when it must have ended, once that is fixed. `progress` (from 0 to 1) and `note`
    are what the function last reported. `parent` is the id of the run that started it, `children`
    are the ids of the runs that it called or started one by one; the runs of `step.map_runs` are
    found by `list_runs(prefix=…)` with the id in the step's `run`. `metadata` was stored by
    `trigger(metadata=)` and middleware. `rollback` is set once steps are undone because the run
    failed or was cancelled.
    """

    id: str
    workflow: str | None
    version: int
    status: RunStatus
    output: T_co | None = None
    error: Any = None
    pending: tuple[Wait, ...] = ()
    payload: Any = None
    updated_at: datetime | None = None
    history: tuple[StepInfo, ...] = ()
    reason: str = ""
    deadline: datetime | None = None
    traceback: str = ""
    tags: dict[str, str] = {}
    created_at: datetime | None = None
    progress: float | None = None
    note: str = ""
    parent: str = ""
    children: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}
    rollback: RollbackInfo | None = None

    @property
    def over(self) -> bool:
        """Whether the run is completed, failed or cancelled."""
        return is_over(self.status)


class Types(msgspec.Struct, frozen=True):
    """The known types of a run's output and errors.

    These are the annotated types, the declared types, and the scope for exception classes.
    """

    output: object = None
    error: object = None
    declared_types: codec.DeclaredTypes = codec.NO_TYPES
    scope: codec.ErrorScope = codec.NOWHERE


def run_of(
    run_id: str, snapshot: Snapshot, types: Types, report: Mapping[str, Any] | None = None
) -> Run:
    """Return the run in a snapshot; `report` was written beside the snapshot."""
    block: Mapping[str, Any] = snapshot["execution"]
    metadata = snapshot.get("metadata") or {}
    created_at = created_at_of(metadata)
    latest = latest_report(metadata.get("report"), report, created_at)
    return Run(
        id=run_id,
        workflow=snapshot.get("workflowName"),
        version=version_of(metadata),
        status=rest_status(snapshot),
        output=_output(block, types),
        error=_error(block, types),
        pending=tuple(_wait(run_id, wait) for wait in open_waits(snapshot)),
        payload=_plain_value(metadata.get("input")),
        updated_at=parse_iso(block["lastUpdated"]),
        history=tuple(step_info(key, step, types.scope) for key, step in snapshot["steps"].items()),
        reason=block.get("reason", ""),
        deadline=deadline_of(metadata),
        traceback=_traceback(block.get("error")),
        tags=visible_tags(metadata.get("tags")),
        created_at=parse_iso(created_at) if created_at else None,
        progress=latest.get("progress"),
        note=latest.get("note") or "",
        parent=str((metadata.get("parent") or {}).get("run", "")),
        children=_children(snapshot),
        metadata=user_metadata(metadata),
        rollback=_rollback(snapshot, types),
    )


def _rollback(snapshot: Snapshot, types: Types) -> RollbackInfo | None:
    """Return the rollback of a run, or `None` if it was not rolled back."""
    mark = rollback_of(snapshot)
    if mark is None:
        return None
    return RollbackInfo(
        at=parse_iso(mark["at"]),
        status=mark["status"],
        error=_error(mark, types),
        steps=mark["steps"],
        undone=max(mark["steps"] - len(owed_in(snapshot["steps"])), 0),
        failures=failures_in(snapshot["steps"]),
    )


def _children(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the ids of the runs that a run called or started one by one, in order."""
    steps: list[Any] = [*snapshot["steps"].values()]
    recorded_ids = (
        step.get("run", "")
        for step in steps
        if step.get("kind") == "call"
        or (step.get("kind") == "start" and "id" in step.get("value", ()))
    )
    called_ids = (wait.get("run", "") for wait in open_waits(snapshot) if wait.get("cancels"))
    return tuple(dict.fromkeys(filter(None, (*recorded_ids, *called_ids))))


def outcome_of_run(run_id: str, snapshot: Snapshot, types: Types) -> Any:
    """Return the output of a run that is over, or raise its error."""
    block: Mapping[str, Any] = snapshot["execution"]
    if block["status"] == "completed":
        return _output(block, types)
    result, error = _failure(block, types)
    about = f"run {run_id!r} of workflow {snapshot.get('workflowName')!r}"
    if error is None:
        raise RunFailed(f"{about} failed")
    if isinstance(error, StepFailed):
        failure = RunFailed(f"{about} failed: {result!r}", result)
        raise failure from error.__cause__
    if not isinstance(error, Cancelled):
        error.add_note(f"{about} failed with this error")
    raise error


def latest_report(
    snapshot_report: Mapping[str, Any] | None, document: Mapping[str, Any] | None, created_at: str
) -> Mapping[str, Any]:
    """Return the latest report, or an empty one."""
    # A report from before the run was restarted belongs to another payload.
    if document is not None and str(document.get("at", "")) < created_at:
        document = None
    reports = [report for report in (snapshot_report, document) if isinstance(report, Mapping)]
    return max(reports, key=lambda report: str(report.get("at", "")), default={})


def step_info(key: str, record: StepRecord, scope: codec.ErrorScope = codec.NOWHERE) -> StepInfo:
    """Return a record as a `StepInfo`; a value of a user's class becomes a dict of its fields."""
    error: object = None
    if not record["ok"]:
        result, _ = result_of(record, key, lambda: None, scope)
        error = result.error if isinstance(result, Err) else None
    milliseconds = record.get("durationMs")
    return StepInfo(
        key=key,
        kind=record.get("kind", "step"),
        ok=record["ok"],
        value=_plain_value(record.get("value")),
        error=error,
        at=parse_iso(record["at"]) if "at" in record else None,
        duration=None if milliseconds is None else from_milliseconds(milliseconds),
        attempts=record.get("attempts", 1),
        branch=record.get("branch", ""),
        traceback=_traceback(record),
        run=record.get("run", ""),
        undo=record.get("undo", False),
    )


def _traceback(record: Any) -> str:
    cause = record.get("cause") if isinstance(record, Mapping) else None
    return codec.traceback_of(cause)


def _plain_value(data: Any) -> object:
    try:
        return codec.decode(data)
    except CodecError:
        return data


def _output(block: Mapping[str, Any], types: Types) -> object:
    data = block.get("output")
    if block.get("outputTyped"):
        try:
            return codec.decode(data, types.output, typed=True, types=types.declared_types)
        except CodecError:
            # Without the definition, an output is shown as its fields.
            if types.output is not None:
                raise
    return _plain_value(data)


def _error(block: Mapping[str, Any], types: Types) -> Any:
    return _failure(block, types)[0]


def _failure(block: Mapping[str, Any], types: Types) -> tuple[object, BaseException | None]:
    """Return the error of a failed run, and the corresponding exception."""
    record: Any = block.get("error")
    if not isinstance(record, Mapping):
        return None, None
    result, error = result_of(
        cast(StepRecord, record), "run", lambda: None, types.scope, lambda: types.error
    )
    return result.error if isinstance(result, Err) else None, error


def _wait(run_id: str, wait: PendingWait) -> Wait:
    wake_at = _time(wait.get("wakeAt"))
    attempt, error = wait.get("attempt"), wait.get("error", "")
    base = Wait(wait["id"], wake_at, wait.get("event"), attempt, error, wait.get("run", ""))
    return _with_question(run_id, wait, base) if is_ask(wait) else base


def _with_question(run_id: str, wait: PendingWait, base: Wait) -> Wait:
    return replace(
        base,
        event=None,
        token=token_of(run_id, wait),
        question=wait.get("question", ""),
        to=wait.get("to", ""),
        options=tuple(wait.get("options", ())),
        data=_plain_value(wait.get("data")),
        expires_at=_time(wait.get("expiresAt")),
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else parse_iso(text)
