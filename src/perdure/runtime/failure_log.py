"""Log failed runs: there may be no caller that waits for the result."""

import logging
from collections.abc import Mapping
from typing import Any

from perdure import codec
from perdure.durable.host import RunHost
from perdure.result import Err

logger = logging.getLogger(__name__)


def log_failed_run(host: RunHost, outcome: Err[Any]) -> None:
    """Log a failed run once at ERROR, with the steps that ended it and their tracebacks."""
    run, error = host.execution, outcome.error
    exceptions = (each for each in (error, outcome.cause) if isinstance(each, BaseException))
    keys = run.failures_before(run.ended_by)
    steps = ", ".join(f"{key!r} (attempt {run.history.attempts(key)})" for key in keys)
    logger.error(
        "run %r of workflow %r failed%s: %s%s",
        host.id,
        host.history.name,
        (f" at step {steps}" if steps else "") + _rollback_note(host),
        error if isinstance(error, str) else repr(error),
        "".join(f"\n{_recorded_traceback(run.failures[key])}" for key in keys).rstrip(),
        exc_info=next(exceptions, None),
    )


def _rollback_note(host: RunHost) -> str:
    rollback = host.history.rollback
    if rollback is None:
        return ""
    count = rollback["steps"]
    return "; 1 step is undone" if count == 1 else f"; {count} steps are undone"


def log_failed_rollback(host: RunHost, failures: Mapping[str, BaseException]) -> None:
    """Log once at ERROR that steps of a run could not be undone."""
    lines = "".join(f"\n  step {key!r}: {error!r}" for key, error in failures.items())
    logger.error(
        "the rollback of run %r of workflow %r failed; retry the run to continue it:%s",
        host.id,
        host.history.name,
        lines,
    )


def _recorded_traceback(error: BaseException | None) -> str:
    """Return the original traceback, if this exception was restored from a record."""
    while error is not None:
        if (cause := codec.recorded_cause(error)) is not None:
            return codec.traceback_of(cause)
        error = error.__cause__
    return ""
