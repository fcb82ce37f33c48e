"""The record of one step: made once from what the step gave, read each time it answers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.errors import StepFailed
from perdure.result import Err, Ok, Result
from perdure.snapshot import StepRecord


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step record as it is written; what is as usual is left out."""

    ok: bool
    value: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    cause: Any = msgspec.UNSET
    meta: Any = msgspec.UNSET
    at: str = ""
    durationMs: float = -1  # noqa: N815  # the name on the wire
    attempts: int = 1
    args: str = ""
    kind: str = "step"
    typed: bool = False
    coded: bool = False
    branch: str = ""
    call: str = ""
    failures: Sequence[str] = ()
    unclaimed: str = ""


class Failure(NamedTuple):
    """A failure as it is recorded, as the function sees it, and what was lost of it."""

    record: Record
    seen: BaseException
    losses: tuple[codec.Loss, ...] = ()


def failure_record(
    failure: BaseException | Err[Any],
    step: str,
    declared: Sequence[type[BaseException]],
    fails_with: Callable[[], object] = lambda: None,
) -> Failure:
    """Give the record of a failure; `fails_with` gives the type of a returned `Err`'s error."""
    if isinstance(failure, Err):
        error = codec.prepare(failure.error, fails_with, "error")
        meta: dict[str, Any] = {"origin": "result"}
        cause = failure.cause
        if cause is None:
            meta["causeless"] = True
            cause = failure.error
        told = codec.encode_cause(cause)
        seen_cause = None if "causeless" in meta else codec.decode_cause(told, declared)
        return Failure(
            Record(ok=False, error=error.data, cause=told, meta=meta, typed=error.typed),
            _failed(step, error.value, seen_cause),
            error.losses,
        )
    told, seen = codec.prepare_error(failure, declared)
    summary = {"type": type(failure).__name__, "message": told.get("message", "")}
    return Failure(Record(ok=False, error=summary, cause=told, meta={"origin": "throw"}), seen)


def is_plain(record: StepRecord) -> bool:
    """Tell whether a record is of a value that its JSON gives as it is."""
    return record["ok"] and "at" in record and "coded" not in record and "typed" not in record


def result_of(
    record: StepRecord,
    step: str,
    returns: Callable[[], object],
    declared: Sequence[type[BaseException]],
    fails_with: Callable[[], object] = lambda: None,
) -> tuple[Result[Any, Any], BaseException | None]:
    """Give what a record says: the result, and the exception the function sees of a failure."""
    if record["ok"]:
        return Ok(_value(record, returns)), None
    failure: Any = record
    meta, told = failure.get("meta") or {}, failure["cause"]
    cause = None
    if told is not None and not meta.get("causeless"):
        cause = codec.decode_cause(told, declared)
    if meta.get("origin") == "throw" and isinstance(cause, BaseException):
        return outcome_of(cause), cause
    error = failure["error"]
    if failure.get("typed") and (expected := fails_with()) is not None:
        error = codec.decode(error, expected, typed=True)
    else:
        error = codec.decode(error)
    failed = _failed(step, error, cause)
    return outcome_of(failed), failed


def _value(record: StepRecord, returns: Callable[[], object]) -> Any:
    data: Any = record.get("value")
    if record.get("typed"):
        return codec.decode(data, returns(), typed=True)
    if "at" in record:
        return codec.decode(data) if record.get("coded") else data
    # Another writer of the format, or a resume state: it has no classes, and the step may say one.
    value = codec.decode(data)
    if value is data and (expected := returns()) is not None:
        return codec.convert(data, expected)
    return value


def _failed(step: str, error: Any, cause: object) -> StepFailed:
    failed = StepFailed(step, error, cause)
    if isinstance(cause, BaseException):
        failed.__cause__ = cause
    return failed


def outcome_of(error: BaseException) -> Err[Any]:
    """Give an exception that ended a run or a step as `Err(error, cause)`."""
    if isinstance(error, StepFailed):
        return Err(error.error, error.cause)
    return Err(error, error.__cause__)
