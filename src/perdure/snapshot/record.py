"""The record of a step: created when the step ends, read each time the step is replayed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from perdure import codec
from perdure.codec.tags import is_plain as is_plain_value
from perdure.errors import CodecError, StepFailed
from perdure.result import Err, Ok, Result
from perdure.snapshot.format import StepRecord


class WireRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A step record as it is stored; fields with their default are omitted."""

    ok: bool
    value: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    cause: Any = msgspec.UNSET
    meta: Any = msgspec.UNSET
    at: str = ""
    durationMs: float = -1  # noqa: N815  # the name in the format
    attempts: int = 1
    args: str = ""
    kind: str = "step"
    typed: bool = False
    coded: bool = False
    branch: str = ""
    call: str = ""
    within: str = ""
    failures: Sequence[str] = ()
    event: str = ""
    unclaimed: str = ""
    by: str = ""
    run: str = ""
    arguments: list[Any] | msgspec.UnsetType = msgspec.UNSET
    answer: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    undo: bool = False
    sagas: Sequence[str] = ()


class RecordedCall(Protocol):
    """The call of a step, as far as its record describes it."""

    @property
    def id(self) -> str: ...
    @property
    def record_key(self) -> str: ...
    @property
    def call(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def failures(self) -> Sequence[str]: ...
    @property
    def event(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def undo(self) -> object: ...
    @property
    def sagas(self) -> Sequence[str]: ...
    @property
    def within(self) -> str: ...
    @property
    def answer(self) -> dict[str, Any] | None: ...
    def return_type(self) -> object: ...
    def error_type(self) -> object: ...


Losses: TypeAlias = tuple[codec.Loss, ...]


def success_record(
    call: RecordedCall,
    value: Any,
    at: str,
    duration_ms: float,
    types: codec.DeclaredTypes = codec.NO_TYPES,
) -> tuple[WireRecord, Any, Losses]:
    """Return the record of a value, the value that the function sees, and the losses.

    Raise `CodecError` if the value cannot be recorded.
    """
    data, visible, is_typed = value, value, False
    losses: Losses = ()
    if not is_plain_value(value):
        data, visible, is_typed, losses = codec.prepare(value, call.return_type, types=types)
    record = WireRecord(ok=True, value=data, at=at, durationMs=duration_ms, args=call.fingerprint)
    # Set only where they differ, because Python passes more than fifteen keyword arguments as a
    # dict, which takes ten times as long as five.
    if data is not value:
        record.typed, record.coded = is_typed, True
    if call.record_key != call.call:
        record.call = call.call
    if call.path:
        record.branch = call.path
    if call.attempt > 1:
        record.attempts = call.attempt
    if call.kind != "step" or call.undo is not None or call.within or call.event or call.run:
        _add_facts(record, call)
    return record, visible, losses


def _add_facts(record: WireRecord, call: RecordedCall) -> None:
    """Add the fields that only some calls have."""
    record.kind, record.within = call.kind, call.within
    record.event, record.run = call.event, call.run
    record.undo, record.sagas = call.undo is not None, call.sagas
    if call.answer is not None:
        record.answer = call.answer


class EncodedFailure(NamedTuple):
    """A failure as it is recorded, as the function sees it, and the losses."""

    record: WireRecord
    visible: BaseException
    losses: Losses = ()


def failure_record(
    call: RecordedCall,
    failure: BaseException | Err[Any],
    scope: codec.ErrorScope,
    at: str,
    duration_ms: float,
) -> EncodedFailure:
    """Return the record of a failed step; exception classes are looked up in `scope`."""
    encoded_failure = encode_failure(failure, call.id, scope, call.error_type)
    record = encoded_failure.record
    record.at, record.durationMs, record.attempts = at, duration_ms, call.attempt
    record.args, record.kind, record.branch = call.fingerprint, call.kind, call.path
    record.call = "" if call.record_key == call.call else call.call
    record.failures, record.run, record.event = call.failures, call.run, call.event
    record.within = call.within
    record.answer = msgspec.UNSET if call.answer is None else call.answer
    return encoded_failure


def encode_failure(
    failure: BaseException | Err[Any],
    step: str,
    scope: codec.ErrorScope = codec.NOWHERE,
    error_type: Callable[[], object] = lambda: None,
) -> EncodedFailure:
    """Encode the failure of a step or run; `error_type` returns the type of an `Err`'s error."""
    if isinstance(failure, Err):
        try:
            return _encode_err(failure, step, scope, error_type)
        except CodecError as error:
            # The failure must be recorded in any case. This one says what could not be.
            failure = error
    cause, visible, losses = codec.prepare_error(failure, scope)
    summary = {"type": codec.class_name(type(failure)), "message": cause.get("message", "")}
    record = WireRecord(ok=False, error=summary, cause=cause, meta={"origin": "throw"})
    return EncodedFailure(record, visible, losses)


def _encode_err(
    failure: Err[Any],
    step: str,
    scope: codec.ErrorScope,
    error_type: Callable[[], object],
) -> EncodedFailure:
    error = codec.prepare(failure.error, error_type, "error")
    meta: dict[str, Any] = {"origin": "result"}
    if failure.cause is None:
        meta["causeless"] = True
        cause, visible_cause = codec.encode_cause(failure.error), None
    else:
        cause = codec.encode_cause(failure.cause, scope)
        visible_cause = codec.decode_cause(cause, scope)
    record = WireRecord(ok=False, error=error.data, cause=cause, meta=meta, typed=error.typed)
    return EncodedFailure(record, _step_failed(step, error.value, visible_cause), error.losses)


def is_plain(record: StepRecord) -> bool:
    """Return whether a record's value is plain JSON, without tags or classes."""
    if "coded" in record or "typed" in record or "by" in record:
        return False
    return record["ok"] and "at" in record


def result_of(
    record: StepRecord,
    step: str,
    returns: Callable[[], object],
    scope: codec.ErrorScope = codec.NOWHERE,
    error_type: Callable[[], object] = lambda: None,
    types: codec.DeclaredTypes = codec.NO_TYPES,
) -> tuple[Result[Any, Any], BaseException | None]:
    """Return a record's result and, for a failure, the exception that the function sees."""
    if record["ok"]:
        return Ok(_value(record, returns, types)), None
    failure: Any = record
    meta, serialized_cause = failure.get("meta") or {}, failure["cause"]
    cause = None
    if serialized_cause is not None and not meta.get("causeless"):
        cause = codec.decode_cause(serialized_cause, scope)
    if meta.get("origin") == "throw" and isinstance(cause, BaseException):
        return outcome_of(cause), cause
    error = failure["error"]
    if failure.get("typed") and (expected := error_type()) is not None:
        error = codec.decode(error, expected, typed=True)
    else:
        error = codec.decode(error)
    failed = _step_failed(step, error, cause)
    return outcome_of(failed), failed


def _value(record: StepRecord, returns: Callable[[], object], types: codec.DeclaredTypes) -> Any:
    data: Any = record.get("value")
    if record.get("typed"):
        return codec.decode(data, returns(), typed=True, types=types)
    if "at" in record and "by" not in record:
        return codec.decode(data) if record.get("coded") else data
    if "by" in record and data is None:
        # A step that was skipped returns None, whatever its type.
        return None
    # Entered by hand, written by another tool or taken from a resume state. None of these know
    # Python classes, so the step's return type decides, if it is known.
    value = codec.decode(data)
    if value is data and (expected := returns()) is not None:
        return codec.convert(data, expected)
    return value


def _step_failed(step: str, error: Any, cause: object) -> StepFailed:
    failed = StepFailed(step, error, cause)
    if isinstance(cause, BaseException):
        failed.__cause__ = cause
    return failed


def outcome_of(error: BaseException) -> Err[Any]:
    """Return an exception that ended a run or a step as `Err(error, cause)`."""
    if isinstance(error, StepFailed):
        return Err(error.error, error.cause)
    return Err(error, error.__cause__)
