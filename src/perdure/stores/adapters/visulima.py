"""Import visulima's stored runs as snapshots that a `Runtime` can continue."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

import msgspec

from perdure import codec
from perdure.clock import isoformat
from perdure.errors import StateFormatError
from perdure.snapshot import (
    ExecutionBlock,
    FailureRecord,
    PendingWait,
    Snapshot,
    StepRecord,
    SuccessRecord,
    new_snapshot,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Record(msgspec.Struct, rename="camel"):
    id: str
    type: Literal["step", "sleep", "event"]
    output: Any = None
    timed_out: bool = False


class _Pending(msgspec.Struct, rename="camel"):
    id: str
    kind: Literal["sleep", "event"]
    wake_at: float | None = None
    event_name: str | None = None
    timeout_at: float | None = None


class _Error(msgspec.Struct):
    message: str
    name: str = "Error"
    stack: str | None = None


class _Context(msgspec.Struct):
    history: list[_Record] = []
    payload: Any = None
    pending: _Pending | None = None
    output: Any = None
    error: _Error | None = None


class _Machine(msgspec.Struct):
    context: _Context


class _StoredRun(msgspec.Struct, rename="camel"):
    definition_id: str
    status: Literal["completed", "failed", "suspended", "waiting", "running"]
    updated_at: float
    snapshot: _Machine


def snapshot_of_stored_run(stored_run: Mapping[str, Any]) -> Snapshot:
    """Convert a `StoredRun` of visulima's workflow runtime, or raise `StateFormatError`.

    Its definition id becomes the workflow's name, its history becomes steps, sleeps and events, and
    its payload becomes the input. A sleeping or waiting run wakes at the same time as before. A run
    that is over stays over, but a failed run can be retried.

        await store.save(stored_run["runId"], snapshot_of_stored_run(stored_run))
        await Runtime(store, workflows=[order]).resume(stored_run["runId"])
    """
    try:
        run = msgspec.convert(stored_run, _StoredRun)
    except msgspec.ValidationError as error:
        raise StateFormatError(f"not a StoredRun: {error}") from error
    context = run.snapshot.context
    metadata: dict[str, Any] = {"version": 1}
    if context.payload is not None:
        metadata["input"] = codec.encode(context.payload)
    snapshot = new_snapshot(run.definition_id, now=_time(run.updated_at), metadata=metadata)
    snapshot["steps"] = {record.id: _step(record) for record in context.history}
    snapshot["execution"] = _execution(run, context)
    return snapshot


def _step(record: _Record) -> StepRecord:
    step = SuccessRecord(ok=True, value=codec.encode(record.output))
    if record.type != "step":
        step["kind"] = record.type
    return step


def _execution(run: _StoredRun, context: _Context) -> ExecutionBlock:
    now = isoformat(_time(run.updated_at))
    match run.status:
        case "completed":
            output = codec.encode(context.output)
            return ExecutionBlock(
                status="completed", lastUpdated=now, completedAt=now, output=output
            )
        case "failed":
            error = _failure(context.error or _Error("unknown"))
            return ExecutionBlock(status="failed", lastUpdated=now, completedAt=now, error=error)
        case "running":
            return ExecutionBlock(status="running", lastUpdated=now)
        case state:
            execution = ExecutionBlock(status="running", lastUpdated=now, state=state)
            if context.pending is not None:
                execution["pending"] = [_wait(context.pending)]
            return execution


def _failure(error: _Error) -> FailureRecord:
    cause: dict[str, Any] = {"type": "error", "name": error.name, "message": error.message}
    if error.stack is not None:
        cause["stack"] = error.stack
    return FailureRecord(
        ok=False,
        error={"type": error.name, "message": error.message},
        cause=cast(codec.SerializedCause, cause),
        meta={"origin": "throw"},
    )


def _wait(pending: _Pending) -> PendingWait:
    wait = PendingWait(id=pending.id, kind=pending.kind)
    until = pending.wake_at if pending.kind == "sleep" else pending.timeout_at
    if until is not None:
        wait["wakeAt"] = isoformat(_time(until))
    if pending.event_name is not None:
        wait["event"] = pending.event_name
    return wait


def _time(milliseconds: float) -> datetime:
    try:
        return _EPOCH + timedelta(milliseconds=milliseconds)
    except (OverflowError, ValueError) as error:
        raise StateFormatError(f"{milliseconds!r} is not a time in milliseconds") from error
