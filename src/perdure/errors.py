"""Every exception perdure raises on purpose: what happened, with which id, and what to do next.

The message is for a person; the data behind it are attributes. One base class, `PerdureError`,
catches them all. `Suspended` is the exception to the rule: it is no error, and ordinary handlers
do not see it.
"""

from collections.abc import Sequence
from typing import Literal


class PerdureError(Exception):
    """The base of every error that perdure raises on purpose."""


class InvalidArgument(PerdureError, ValueError):
    """A public parameter was given something it cannot use."""

    def __init__(self, parameter: str, got: object, expected: str, hint: str = "") -> None:
        text = f"{parameter}: expected {expected}, got {_shown(got)} ({type(got).__name__})"
        super().__init__(f"{text}. {hint}" if hint else text)
        self.parameter = parameter
        self.got = got
        self.expected = expected


def _shown(got: object) -> str:
    try:
        shown = repr(got)
    except Exception:  # noqa: BLE001  # the repr is the caller's code
        return "something that repr() cannot show"
    return shown if len(shown) <= 120 else shown[:117] + "..."


class InvalidDuration(InvalidArgument):
    """A duration that is no duration: NaN, infinite, negative, an unknown unit."""


class InvalidCron(InvalidArgument):
    """A cron expression or time zone that can never come true."""


class CodecError(PerdureError):
    """A value cannot be turned into JSON, or a stored value cannot be read back."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} (at {path})" if path else message)
        self.path = path


class SnapshotFormatError(PerdureError):
    """Something that should be a workflow snapshot is not one; `errors` holds every problem."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0] if self.errors else "unknown problem"
        more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
        super().__init__(f"Invalid snapshot format: {first}{more}")


class SnapshotMismatch(PerdureError):
    """A snapshot does not belong to the workflow that is to go on from it."""

    def __init__(
        self, kind: Literal["unknown_steps", "definition_hash", "workflow_name"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


class StateFormatError(PerdureError):
    """A text or object that should hold a resume state does not."""


class StepError(PerdureError):
    """A step failed with an error whose class is not known here: its name and message are."""

    def __init__(self, name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{name}: {message}" if message else name)
        self.name = name
        self.message = message
        self.traceback = traceback


class StepFailed(PerdureError):
    """A step returned `Err(error, cause)`. Raised inside the workflow function."""

    def __init__(self, step: str, error: object, cause: object = None) -> None:
        super().__init__(f"step {step!r} failed: {error!r}")
        self.step = step
        self.error = error
        self.cause = cause


class StepTimeout(PerdureError, TimeoutError):
    """A step did not answer within its time."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} did not finish within {seconds:g}s")
        self.step = step
        self.seconds = seconds


class UnwrapError(PerdureError):
    """`unwrap` was called on an `Err` whose error is no exception; `error` is what it held."""

    def __init__(self, error: object) -> None:
        super().__init__(f"unwrap of Err({error!r})")
        self.error = error


class DriftError(PerdureError):
    """A replay would hand one call's record to another; nothing was read and nothing ran."""

    def __init__(self, step: str, message: str, recorded: str = "", asked: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.recorded = recorded
        self.asked = asked


class Suspended(BaseException):
    """The run is put to rest until its time or its event comes. No error, and not for handlers."""


class NestedStep(PerdureError):
    """A step, wait, race or transaction was called inside a step's function."""

    def __init__(self, step: str, inside: str) -> None:
        super().__init__(
            f"{step!r} was called inside the function of step {inside!r}: a step cannot contain "
            "steps or waits. Call both from the workflow function; or make the outer one a plain "
            "function that takes `step`, and await it without step(…); or trigger a run of its own "
            "in the step"
        )
        self.step = step
        self.inside = inside


class WrongRun(PerdureError):
    """A step was called through the handle of another run."""

    def __init__(self, run_id: str, step: str) -> None:
        super().__init__(
            f"step {step!r} was called through the handle of run {run_id!r} by code of another "
            "run; use the `step` that the function itself was given"
        )
        self.run_id = run_id
        self.step = step


class RunOver(PerdureError):
    """A step was called after its run had ended."""


class RunNotFound(PerdureError):
    """There is no run of this id in the store."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"there is no run {run_id!r} in this store; list_runs() shows those there are"
        )
        self.run_id = run_id


class UnknownWorkflow(PerdureError):
    """A run names a workflow (or a version of it) that is not registered here."""

    def __init__(self, workflow: str, message: str) -> None:
        super().__init__(message)
        self.workflow = workflow


class InvalidPayload(PerdureError):
    """A trigger's payload does not fit the workflow's payload type; `errors` names each field."""

    def __init__(self, workflow: str, errors: Sequence[str]) -> None:
        self.workflow = workflow
        self.errors = tuple(errors)
        super().__init__(
            f"payload of workflow {workflow!r} is not valid: " + "; ".join(self.errors)
        )


class VersionMismatch(PerdureError):
    """A stored run was begun by another version of its workflow."""

    def __init__(self, run_id: str, stored: int, requested: int, hint: str = "") -> None:
        text = f"run {run_id!r} was begun by version {stored}, and this is version {requested}"
        super().__init__(f"{text}. {hint}" if hint else text)
        self.run_id = run_id
        self.stored = stored
        self.requested = requested


class AlreadyRunning(PerdureError):
    """Another task or process owns this run just now."""

    def __init__(self, run_id: str, where: Literal["here", "elsewhere"]) -> None:
        place = "in this process" if where == "here" else "in another process"
        super().__init__(
            f"run {run_id!r} is already running {place}; wait for it, or for its lease to end"
        )
        self.run_id = run_id
        self.where = where


class LeaseLost(PerdureError):
    """This process no longer owns the run: another took it over after the lease had ended."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"the lease of run {run_id!r} was lost; what was recorded is safe, "
            "and its new owner goes on from there"
        )
        self.run_id = run_id


class IdempotencyConflict(PerdureError):
    """An idempotency key was used before with another input."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"idempotency key {key!r} was used before with another input; "
            "use a new key for a new request"
        )
        self.key = key


class Cancelled(PerdureError):
    """The run was cancelled."""

    def __init__(self, run_id: str, reason: str = "") -> None:
        super().__init__(f"run {run_id!r} was cancelled" + (f": {reason}" if reason else ""))
        self.run_id = run_id
        self.reason = reason


class RunFailed(PerdureError):
    """A run that was parked as failed, with the reason."""


class StoreError(PerdureError):
    """The store did not do what it was asked; the driver's own exception is the cause."""


class StoreUnavailable(StoreError):
    """The store cannot be reached just now: what, where, and how long it was tried."""


class StoreCorrupted(StoreError):
    """Something in the store cannot be read as what it should be."""


class StoreClosed(StoreError):
    """The store, or the committer before it, was closed."""


class MissingAbility(StoreError):
    """The store does not declare an ability that was asked of it."""

    def __init__(self, store: object, ability: str, needed_for: str = "") -> None:
        name = store if isinstance(store, str) else type(store).__name__
        text = f"{name} has no {ability!r} ability"
        if needed_for:
            text += f", which {needed_for} needs"
        super().__init__(f"{text}; choose a store that declares it (docs/stores)")
        self.ability = ability


class MissingDependency(PerdureError, ImportError):
    """A backend's driver is not installed; the message holds the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'perdure[{extra}]'")
        self.package = package
        self.extra = extra


class ValueTooLarge(StoreError):
    """A value is larger than the store takes."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} is {size:,} bytes, more than the {limit:,} the store takes; "
            "keep large data elsewhere and record a reference, or raise max_value_size"
        )
        self.size = size
        self.limit = limit
