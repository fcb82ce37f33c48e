"""The outcome of a run: written to its snapshot, and read from it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from perdure import codec
from perdure.durable.host import RunHost
from perdure.errors import CodecError
from perdure.result import Err, Ok, Result
from perdure.snapshot import ExecutionBlock, Snapshot
from perdure.snapshot.record import encode_failure, result_of
from perdure.snapshot.rollback import led_to_end

logger = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a run: its result as it will be read, its `execution`, its status."""

    result: Result[Any, Any]
    block: ExecutionBlock
    status: Literal["completed", "failed"]


def describe_outcome(
    host: RunHost, result: Result[Any, Any], fn: Callable[..., Any], types: codec.DeclaredTypes
) -> Outcome:
    """Return the outcome of a run. If its output cannot be recorded, the run has failed."""
    if isinstance(result, Ok):
        try:
            return _describe_completed(host, result, fn, types)
        except CodecError as error:
            result = Err(CodecError(f"the output of run {host.id!r} cannot be recorded: {error}"))
    run = host.execution
    # An exception that was raised is recorded differently from a returned `Err` with that error.
    failure = run.ended_by if run.ended_by is not None and run.ended_by is result.error else result
    record = encode_failure(failure, host.id, run.errors, lambda: codec.error_type(fn)).record
    facts = {"sagas": sagas} if (sagas := run.sagas_before(run.ended_by)) else {}
    block = failed_block(host, record, run.failures_before(run.ended_by), **facts)
    return Outcome(result, block, "failed")


def failed_block(
    host: RunHost, error: object, failed_keys: Sequence[str] = (), **facts: Any
) -> ExecutionBlock:
    """Return the `execution` of a run that failed with the record `error`."""
    now = host.block()["lastUpdated"]
    return host.block("failed", completedAt=now, error=error, failed=list(failed_keys), **facts)


def _describe_completed(
    host: RunHost, result: Ok[Any], fn: Callable[..., Any], types: codec.DeclaredTypes
) -> Outcome:
    data, visible, is_typed, losses = codec.prepare(
        result.value, lambda: codec.return_type(fn), "output", types
    )
    for loss in losses:
        class_name = "" if loss.cls is None else f" ({loss.cls.__name__})"
        logger.warning(
            "run %r: its %s%s cannot be restored exactly (%s), so its result is what was recorded. "
            "Return plain data, or annotate the function with the type that it returns",
            *(host.id, loss.path, class_name, loss.reason),
        )
    facts: dict[str, Any] = {"output": data}
    if is_typed:
        facts["outputTyped"] = True
    block = host.block("completed", **facts)
    block["completedAt"] = block["lastUpdated"]
    return Outcome(result if visible is result.value else Ok(visible), block, "completed")


def recorded_result(
    snapshot: Snapshot, fn: Callable[..., Any], types: codec.DeclaredTypes
) -> Result[Any, Any] | None:
    """Return the recorded result of a completed run, or `None` if it is not completed."""
    block: Mapping[str, Any] = snapshot["execution"]
    if block["status"] != "completed":
        return None
    record: Any = {"ok": True, "value": block.get("output"), "at": block["lastUpdated"]}
    if block.get("outputTyped"):
        record["typed"] = True
    return result_of(record, "output", lambda: codec.return_type(fn), types=types)[0]


def failures_to_retry(snapshot: Snapshot) -> list[str]:
    """Return the keys of the failed steps that a resumed run tries again.

    These are the failures that led to the end of the run. A failure that the function handled
    stays: what it did next is recorded too. Other writers of the format do not distinguish them, so
    all of their failures are tried again.
    """
    block: Mapping[str, Any] = snapshot["execution"]
    steps = snapshot["steps"]
    if not steps:
        return []
    failures = {key: record for key, record in steps.items() if not record["ok"]}
    if block["status"] != "failed":
        return [key for key, record in failures.items() if "at" not in record]
    if block.get("failed") is None:
        return list(failures)
    return [key for key in led_to_end(steps, block) if key in failures]
