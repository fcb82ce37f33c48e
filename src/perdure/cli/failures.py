"""Exit codes of the command for perdure's errors."""

from perdure.errors import (
    AlreadyRunning,
    DriftError,
    InvalidPayload,
    LeaseLost,
    PerdureError,
    Refused,
    RunConflict,
    RunNotFound,
    ScheduleNotFound,
    StoreError,
    UnknownWorkflow,
    VersionMismatch,
)

FAILED, USAGE, UNREACHABLE, NOT_FOUND, REFUSED, TIMED_OUT, INTERRUPTED = 1, 2, 3, 4, 5, 124, 130

_CODES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((InvalidPayload, ValueError), USAGE),
    ((StoreError,), UNREACHABLE),
    ((RunNotFound, ScheduleNotFound, UnknownWorkflow), NOT_FOUND),
    ((AlreadyRunning, DriftError, LeaseLost, Refused, RunConflict, VersionMismatch), REFUSED),
    ((TimeoutError,), TIMED_OUT),
)


class Failure(PerdureError):
    """Ends the command with a message on stderr and an exit code."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


def exit_code(error: Exception) -> int:
    """Return the exit code for an error."""
    if isinstance(error, Failure):
        return error.code
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), FAILED)


def explain(error: Exception) -> str:
    """Return what to print for an error: its message, in terms of commands."""
    if isinstance(error, RunNotFound):
        return f"there is no run {error.run_id!r} in this store; perdure ls shows those that exist"
    if isinstance(error, ScheduleNotFound):
        return f"there is no schedule {error.name!r} in this store; perdure schedules shows them"
    if isinstance(error, Refused):
        command = "resume" if error.verb == "unpause" else error.verb.replace("_", "-")
        return f"{command} was refused for run {error.run_id!r}: {error.reason}"
    if isinstance(error, RunConflict):
        return f"run {error.run_id!r} already exists; choose another --id"
    return str(error)
