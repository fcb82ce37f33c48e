"""A run as users see it: its status, its output and its history."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec

from perdure import codec
from perdure.clock import parse_iso
from perdure.errors import CodecError
from perdure.result import Err
from perdure.runtime.deadlines import deadline_of
from perdure.snapshot import (
    PendingWait,
    RunStatus,
    Snapshot,
    StepRecord,
    is_over,
    open_waits,
    rest_status,
)
from perdure.snapshot.record import result_of


class Wait(msgspec.Struct, frozen=True):
    """A wait of a suspended run: for a time, an event, or an event until a time.

    For the next attempt of a step, `attempt` is the number of the one that failed with `error`.
    """

    id: str
    wake_at: datetime | None = None
    event: str | None = None
    attempt: int | None = None
    error: str = ""


class StepInfo(msgspec.Struct, frozen=True):
    """One recorded step of a run's history. `traceback` is the text of a failed step's."""

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


class Run(msgspec.Struct, frozen=True):
    """A run as it was when it was read.

    `output` is set when it is completed, `error` when it failed or was cancelled, `pending` while
    it waits. `traceback` is the text of the error's traceback, or an empty string. `reason` says
    why it is paused. `deadline` is when it must have ended, as soon as that is fixed.
    """

    run_id: str
    workflow: str | None
    version: int
    status: RunStatus
    output: Any = None
    error: Any = None
    pending: tuple[Wait, ...] = ()
    payload: Any = None
    updated_at: datetime | None = None
    history: tuple[StepInfo, ...] = ()
    reason: str = ""
    deadline: datetime | None = None
    traceback: str = ""

    @property
    def over(self) -> bool:
        """Whether the run is completed, failed or cancelled."""
        return is_over(self.status)


def run_of(
    run_id: str,
    snapshot: Snapshot,
    *,
    returns: object = None,
    fails_with: object = None,
    scope: codec.ErrorScope = codec.NOWHERE,
    types: codec.DeclaredTypes = codec.NO_TYPES,
) -> Run:
    """Return the run in a snapshot; `returns` and `fails_with` are the types of its output and of
    its error, if they are known, `types` the declared ones. Exception classes are looked up in
    `scope`.
    """
    block: Mapping[str, Any] = snapshot["execution"]
    metadata = snapshot.get("metadata") or {}
    version = metadata.get("version")
    return Run(
        run_id=run_id,
        workflow=snapshot.get("workflowName"),
        version=version if isinstance(version, int) else 1,
        status=rest_status(snapshot),
        output=_output(block, returns, types),
        error=_error(block, fails_with, scope),
        pending=tuple(_wait(wait) for wait in open_waits(snapshot)),
        payload=_shown(metadata.get("input")),
        updated_at=parse_iso(block["lastUpdated"]),
        history=tuple(step_info(key, step, scope) for key, step in snapshot["steps"].items()),
        reason=block.get("reason", ""),
        deadline=deadline_of(metadata),
        traceback=_traceback(block.get("error")),
    )


def step_info(key: str, record: StepRecord, scope: codec.ErrorScope = codec.NOWHERE) -> StepInfo:
    """Return a record as a `StepInfo`; a value of a user's class is shown as its fields."""
    error: object = None
    if not record["ok"]:
        result, _ = result_of(record, key, lambda: None, scope)
        error = result.error if isinstance(result, Err) else None
    took = record.get("durationMs")
    return StepInfo(
        key=key,
        kind=record.get("kind", "step"),
        ok=record["ok"],
        value=_shown(record.get("value")),
        error=error,
        at=parse_iso(record["at"]) if "at" in record else None,
        duration=None if took is None else timedelta(milliseconds=took),
        attempts=record.get("attempts", 1),
        branch=record.get("branch", ""),
        traceback=_traceback(record),
    )


def _traceback(record: Any) -> str:
    cause = record.get("cause") if isinstance(record, Mapping) else None
    return codec.traceback_of(cause)


def _shown(data: Any) -> object:
    try:
        return codec.decode(data)
    except CodecError:
        return data


def _output(block: Mapping[str, Any], returns: object, types: codec.DeclaredTypes) -> object:
    data = block.get("output")
    if block.get("outputTyped"):
        try:
            return codec.decode(data, returns, typed=True, types=types)
        except CodecError:
            # Without its definition here, an output is shown as its fields.
            if returns is not None:
                raise
    return _shown(data)


def _error(block: Mapping[str, Any], fails_with: object, scope: codec.ErrorScope) -> object:
    record: Any = block.get("error")
    if not isinstance(record, Mapping):
        return None
    result, _ = result_of(cast(StepRecord, record), "run", lambda: None, scope, lambda: fails_with)
    return result.error if isinstance(result, Err) else None


def _wait(wait: PendingWait) -> Wait:
    wake_at = parse_iso(wait["wakeAt"]) if "wakeAt" in wait else None
    attempt, error = wait.get("attempt"), wait.get("error", "")
    return Wait(wait["id"], wake_at, wait.get("event"), attempt, error)
