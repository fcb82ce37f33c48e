"""Errors of runs: how a run ends, and why it cannot be started, found or continued."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from perdure.errors.error import PerdureError


class Suspended(BaseException):
    """Unwinds a run that is being suspended until a time or an event. Not an error."""


class ContinuedAsNew(Suspended):
    """Unwinds a run that starts over with the input `data` (JSON). Not an error."""

    def __init__(self, data: object) -> None:
        super().__init__()
        self.data = data


class RunNotFound(PerdureError):
    """The store has no run with this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"there is no run {run_id!r} in this store; list_runs() returns those that exist"
        )
        self.run_id = run_id


class RunConflict(PerdureError):
    """A run cannot be started: its id belongs to another run, of workflow `workflow`."""

    def __init__(self, run_id: str, workflow: str | None, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} already exists: {reason}. Choose another run_id, or pass if_exists="
        )
        self.run_id = run_id
        self.workflow = workflow
        self.reason = reason


class TooDeep(PerdureError, RecursionError):
    """A run cannot start a child run: it already has the maximum number of ancestors."""

    def __init__(self, run_id: str, limit: int) -> None:
        super().__init__(
            f"run {run_id!r} cannot start a child run: it has {limit} ancestors, which is the "
            "maximum. If its workflow calls itself in a long loop, use step.continue_as_new instead"
        )
        self.run_id = run_id
        self.limit = limit


class UnknownWorkflow(PerdureError):
    """The workflow of a run, or its version, is not registered in this process."""

    def __init__(self, workflow: str, message: str) -> None:
        super().__init__(message)
        self.workflow = workflow


class VersionMismatch(PerdureError):
    """A stored run was started by another version of its workflow."""

    def __init__(self, run_id: str, stored: int, requested: int, hint: str = "") -> None:
        text = f"run {run_id!r} was started by version {stored}, but this is version {requested}"
        super().__init__(f"{text}. {hint}" if hint else text)
        self.run_id = run_id
        self.stored = stored
        self.requested = requested


class AlreadyRunning(PerdureError):
    """Another task or process currently owns the run."""

    def __init__(
        self,
        run_id: str,
        where: Literal["here", "elsewhere"],
        owner: str = "another process",
        expires_at: datetime | None = None,
    ) -> None:
        place = "in this process" if where == "here" else f"in {owner}"
        expiry = "its lease expires" if expires_at is None else f"its lease expires at {expires_at}"
        super().__init__(
            f"run {run_id!r} is already running {place}; wait until it ends or {expiry}"
        )
        self.run_id = run_id
        self.where = where
        self.owner = owner
        self.expires_at = expires_at


class LeaseLost(PerdureError):
    """This process no longer owns the run: its lease expired and another process took over."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"the lease of run {run_id!r} was lost; its records are safe, "
            "and the new owner continues from them"
        )
        self.run_id = run_id


class IdempotencyConflict(PerdureError):
    """An idempotency key was already used with a different input."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"idempotency key {key!r} was already used with a different input; "
            "use a new key for a new request"
        )
        self.key = key


class Cancelled(PerdureError):
    """The run was cancelled."""

    def __init__(self, run_id: str, reason: str = "") -> None:
        super().__init__(f"run {run_id!r} was cancelled" + (f": {reason}" if reason else ""))
        self.run_id = run_id
        self.reason = reason


class RollbackFailed(PerdureError):
    """Steps of a run, or of the scope of a saga, could not be undone.

    `failures` maps the key of each of these steps to the reason. `cause` is why the steps had to be
    undone, as text; the exception itself, if there was one, is `__cause__`.
    """

    def __init__(self, scope: str, cause: str, failures: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{key!r} ({reason})" for key, reason in failures.items())
        super().__init__(
            f"{scope} was rolled back after {cause}, but {len(failures)} of its steps could not be "
            f"undone: {reasons}"
        )
        self.cause = cause
        self.failures = dict(failures)


class DeadlinePassed(PerdureError, TimeoutError):
    """A run did not end before its deadline."""

    def __init__(self, run_id: str, deadline: datetime) -> None:
        super().__init__(f"run {run_id!r} did not end before its deadline, {deadline}")
        self.run_id = run_id
        self.deadline = deadline


class RunFailed(PerdureError):
    """A run failed.

    Raised when a run that another run waited for has failed, with its exception as the cause; when
    its function returned `Err(error)`; or when perdure marked it as failed. The message is the
    reason; `error` is the error of the `Err`, or `None`. `run_id` is the run that was waited for.
    """

    def __init__(self, message: str, error: object = None, run_id: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.run_id = run_id
