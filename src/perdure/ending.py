"""How a run ends, and how its end is read again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from perdure import codec
from perdure.errors import CodecError
from perdure.ownership import Home
from perdure.record import failure_record, result_of
from perdure.result import Err, Ok, Result
from perdure.snapshot import Execution as ExecutionBlock
from perdure.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Ending(NamedTuple):
    """A run that is over: its result as it will be read, its execution block, its status."""

    result: Result[Any, Any]
    block: ExecutionBlock
    status: Literal["completed", "failed"]


def ending(home: Home, result: Result[Any, Any], fn: Callable[..., Any]) -> Ending:
    """Give how a run ends; one whose output cannot be recorded has failed."""
    if isinstance(result, Ok):
        try:
            return _completed(home, result.value, fn)
        except CodecError as error:
            result = Err(CodecError(f"the output of run {home.id!r} cannot be recorded: {error}"))
    now, ended_by = home.block()["lastUpdated"], home.execution.ended_by
    failure = ended_by if ended_by is not None and ended_by is result.error else result
    told = failure_record(failure, home.id, home.execution.errors, lambda: codec.error_type(fn))
    failed = home.execution.unhandled()
    block = home.block("failed", completedAt=now, error=told.record, failed=failed)
    return Ending(result, block, "failed")


def _completed(home: Home, value: object, fn: Callable[..., Any]) -> Ending:
    data, seen, typed, losses = codec.settle(value, lambda: codec.return_type(fn), "output")
    for loss in losses:
        logger.warning(
            "run %r: its %s cannot be kept as it is (%s)", home.id, loss.path, loss.reason
        )
    facts: dict[str, Any] = {"output": data, "completedAt": home.block()["lastUpdated"]}
    if typed:
        facts["outputTyped"] = True
    return Ending(Ok(seen), home.block("completed", **facts), "completed")


def recorded_result(
    snapshot: Snapshot, fn: Callable[..., Any], errors: Sequence[type[BaseException]]
) -> Result[Any, Any] | None:
    """Give the result of a completed run from its record; None when it is not completed."""
    block: Mapping[str, Any] = snapshot["execution"]
    if block["status"] != "completed":
        return None
    record: Any = {"ok": True, "value": block.get("output"), "at": block["lastUpdated"]}
    if block.get("outputTyped"):
        record["typed"] = True
    return result_of(record, "output", lambda: codec.return_type(fn), errors)[0]


def failures_to_retry(snapshot: Snapshot) -> list[str]:
    """Give the failed steps that a resumed run tries again.

    Of a failed run, those that ended it. A failure that the function dealt with stays: what it did
    next is recorded too. Another writer of the format does not tell them apart: all of its.
    """
    block: Mapping[str, Any] = snapshot["execution"]
    steps = snapshot["steps"]
    failed = [key for key, record in steps.items() if not record["ok"]]
    if block["status"] == "failed":
        ended = block.get("failed")
        return failed if ended is None else [key for key in failed if key in ended]
    return [key for key in failed if "at" not in steps[key]]
