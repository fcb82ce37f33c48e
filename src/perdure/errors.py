"""The exceptions that perdure raises.

A message says what happened, to which run or step, and what to do about it; the same data are
attributes. All derive from `PerdureError`, except `Suspended` and `ContinuedAsNew`: they are not
errors, and handlers of `Exception` do not catch them.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal


class PerdureError(Exception):
    """The base class of perdure's errors."""


class InvalidArgument(PerdureError, ValueError):
    """An argument of a public function has the wrong type or value."""

    def __init__(self, parameter: str, got: object, expected: str, hint: str = "") -> None:
        text = f"{parameter}: expected {expected}, got {_shown(got)} ({type(got).__name__})"
        super().__init__(f"{text}. {hint}" if hint else text)
        self.parameter = parameter
        self.got = got
        self.expected = expected


def _shown(got: object) -> str:
    try:
        shown = repr(got)
    except Exception:  # noqa: BLE001  # __repr__ is the user's code
        return "an object whose repr() fails"
    return shown if len(shown) <= 120 else shown[:117] + "..."


class InvalidDuration(InvalidArgument):
    """A duration is negative, NaN, infinite or has an unknown unit."""


class InvalidCron(InvalidArgument):
    """A cron expression is malformed or never matches, or its time zone is unknown."""


class CodecError(PerdureError):
    """A value cannot be encoded as JSON, or a stored value cannot be decoded."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{message} (at {path})" if path else message)
        self.path = path


class SnapshotFormatError(PerdureError):
    """An object is not a valid snapshot; `errors` lists every problem with its path."""

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0] if self.errors else "unknown problem"
        more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
        super().__init__(f"Invalid snapshot format: {first}{more}")


class SnapshotMismatch(PerdureError):
    """A snapshot does not belong to the workflow that should resume from it."""

    def __init__(
        self, kind: Literal["unknown_steps", "definition_hash", "workflow_name"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


class StateFormatError(PerdureError):
    """A string or object is not a valid resume state."""


class StepError(PerdureError):
    """A step failed with an exception whose class is unknown; its name and message are stored."""

    def __init__(self, name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{name}: {message}" if message else name)
        self.name = name
        self.message = message
        self.traceback = traceback


class ManualValueError(PerdureError):
    """A value that an operator entered for a step does not fit the step's return type."""


class StepFailed(PerdureError):
    """A step returned `Err(error, cause)`. Raised in the workflow function."""

    def __init__(self, step: str, error: object, cause: object = None) -> None:
        super().__init__(f"step {step!r} failed: {error!r}")
        self.step = step
        self.error = error
        self.cause = cause


class StepTimeout(PerdureError, TimeoutError):
    """A step did not finish within its timeout."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} did not finish within {seconds:g}s")
        self.step = step
        self.seconds = seconds


class UnwrapError(PerdureError):
    """`unwrap` was called on an `Err` whose `error` is not an exception."""

    def __init__(self, error: object) -> None:
        super().__init__(f"called unwrap() on Err({error!r})")
        self.error = error


class DriftError(PerdureError):
    """A replayed call does not match its record: the code or its inputs have changed."""

    def __init__(self, step: str, message: str, recorded: str = "", asked: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.recorded = recorded
        self.asked = asked


class Suspended(BaseException):
    """Unwinds a run that is being suspended until a time or an event. Not an error."""


class ContinuedAsNew(Suspended):
    """Unwinds a run that begins again with the input `data`, as JSON. Not an error."""

    def __init__(self, data: object) -> None:
        super().__init__()
        self.data = data


class NestedStep(PerdureError):
    """A step, wait, race or transaction was called inside the function of a step."""

    def __init__(self, step: str, inside: str) -> None:
        super().__init__(
            f"{step!r} was called inside the function of step {inside!r}: a step cannot contain "
            "steps or waits. Call both from the workflow function; or make the outer one a plain "
            "function that takes `step`, and await it without step(…); or make the outer one a "
            "workflow, and start it as a child run with step.call(…)"
        )
        self.step = step
        self.inside = inside


class WrongRun(PerdureError):
    """A step was called through the handle of another run."""

    def __init__(self, run_id: str, step: str) -> None:
        super().__init__(
            f"step {step!r} was called through the handle of run {run_id!r} by code of another "
            "run; use the `step` argument of the running function"
        )
        self.run_id = run_id
        self.step = step


class RunOver(PerdureError):
    """A step was called after its run had ended."""


class RunNotFound(PerdureError):
    """The store has no run with this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"there is no run {run_id!r} in this store; list_runs() returns those that exist"
        )
        self.run_id = run_id


class Refused(PerdureError):
    """An operator's verb does not apply to the run as it is; nothing was changed."""

    def __init__(self, run_id: str, verb: str, reason: str) -> None:
        super().__init__(f"{verb} was refused for run {run_id!r}: {reason}")
        self.run_id = run_id
        self.verb = verb
        self.reason = reason


class AppliedBefore(Refused):
    """An operator's request was applied to the run before."""

    def __init__(self, run_id: str, verb: str) -> None:
        super().__init__(run_id, verb, "this request was applied before")


class InvalidToken(InvalidArgument):
    """A string is not a token of an approval or callback."""

    def __init__(self) -> None:
        # The token is a secret, even one that was damaged on its way.
        PerdureError.__init__(
            self,
            "token: expected the token of an approval or callback, unchanged, as notify= or start= "
            "was given it and approvals() returns it",
        )
        self.parameter, self.got, self.expected = "token", None, "the token of a wait"


class AlreadyAnswered(Refused):
    """An approval or callback was answered before: `by` whom and when (`at`)."""

    def __init__(self, run_id: str, by: str = "", at: datetime | None = None) -> None:
        who = f" by {by}" if by else ""
        when = "" if at is None else f" at {at}"
        super().__init__(run_id, "answer", f"it was answered{who}{when}; the first answer counts")
        self.by = by
        self.at = at


class TooLate(Refused):
    """An approval or callback waits no longer: it has expired, or the run does not need it."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, "answer", reason)


class Rejected(PerdureError):
    """The approval of a gated step was rejected, or has `expired`. The step did not run."""

    def __init__(
        self,
        step: str,
        question: str,
        by: str = "",
        note: str = "",
        at: datetime | None = None,
        expired: bool = False,
    ) -> None:
        why = "was not answered in time" if expired else f"was rejected by {by or 'a program'}"
        super().__init__(f"step {step!r} {why}: {question}" + (f" ({note})" if note else ""))
        self.step = step
        self.question = question
        self.by = by
        self.note = note
        self.at = at
        self.expired = expired


class RunConflict(PerdureError):
    """A run cannot be started: its id belongs to another run. `workflow` is that of the other."""

    def __init__(self, run_id: str, workflow: str | None, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} exists already: {reason}. Choose another run_id, or pass if_exists="
        )
        self.run_id = run_id
        self.workflow = workflow
        self.reason = reason


class TooDeep(PerdureError, RecursionError):
    """A run cannot start another one: it has as many ancestors as are allowed."""

    def __init__(self, run_id: str, limit: int) -> None:
        super().__init__(
            f"run {run_id!r} cannot start a child run: it has {limit} ancestors, the most that are "
            "allowed. Does its workflow call itself without end? A long loop is written with "
            "step.continue_as_new"
        )
        self.run_id = run_id
        self.limit = limit


class UnknownWorkflow(PerdureError):
    """The workflow of a run, or its version, is not registered in this process."""

    def __init__(self, workflow: str, message: str) -> None:
        super().__init__(message)
        self.workflow = workflow


class InvalidPayload(PerdureError):
    """A payload does not fit the workflow's payload type; `errors` lists every problem."""

    def __init__(self, workflow: str, errors: Sequence[str]) -> None:
        self.workflow = workflow
        self.errors = tuple(errors)
        super().__init__(
            f"payload of workflow {workflow!r} is not valid: " + "; ".join(self.errors)
        )


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
        until = "its lease expires" if expires_at is None else f"its lease expires at {expires_at}"
        super().__init__(
            f"run {run_id!r} is already running {place}; wait until it ends or {until}"
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

    `failures` says for each of them, by its key, what kept it from being undone. `cause` is why
    they were to be undone, as text; the exception itself, if there was one, is `__cause__`.
    """

    def __init__(self, what: str, cause: str, failures: Mapping[str, str]) -> None:
        listed = "; ".join(f"{key!r} ({reason})" for key, reason in failures.items())
        super().__init__(
            f"{what} was rolled back after {cause}, but {len(failures)} of its steps could not be "
            f"undone: {listed}"
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
    """A run failed: one that a run waited for, with the exception of that run as its cause; or one
    whose function returned `Err(error)`, or that perdure marked as failed.

    The message is the reason; `error` is that of the `Err`, else `None`. `run_id` is the run that
    was waited for.
    """

    def __init__(self, message: str, error: object = None, run_id: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.run_id = run_id


class ScheduleConflict(PerdureError):
    """A schedule cannot be created: another one has this name. `differences` says in what."""

    def __init__(self, name: str, differences: Sequence[str]) -> None:
        self.name = name
        self.differences = tuple(differences)
        listed = ", ".join(self.differences)
        verb = "differs" if len(self.differences) == 1 else "differ"
        super().__init__(
            f"schedule {name!r} exists already, and its {listed} {verb} from what was asked for; "
            "change it with (await client.get_schedule(name)).update(…), or choose another name"
        )


class ScheduleNotFound(PerdureError):
    """The store has no schedule of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no schedule {name!r} in this store; schedules() returns those that exist"
        )
        self.name = name


class StoreError(PerdureError):
    """An operation of the store failed; the driver's exception is the cause."""


class StoreUnavailable(StoreError):
    """The store is currently unreachable; the message says where and for how long it was tried."""


class StoreCorrupted(StoreError):
    """Stored data cannot be read."""


class StoreClosed(StoreError):
    """The store, or the committer that writes to it, is closed."""


class PermitLost(StoreError):
    """The permit of a limit expired while a run used it; the run is continued when it may."""

    def __init__(self, run_id: str, limit: str) -> None:
        super().__init__(
            f"run {run_id!r} was broken off: its permit of limit {limit!r} expired, and another "
            "process may use it now; the run continues from its records"
        )
        self.run_id = run_id
        self.limit = limit


class MissingAbility(StoreError):
    """The store does not declare a capability that an operation needs."""

    def __init__(self, store: object, ability: str, needed_for: str = "") -> None:
        name = store if isinstance(store, str) else type(store).__name__
        text = f"{name} has no {ability!r} ability"
        if needed_for:
            text += f", which {needed_for} needs"
        super().__init__(f"{text}; choose a store that declares it (docs/stores)")
        self.ability = ability


class MissingDependency(PerdureError, ImportError):
    """A backend's driver is not installed; the message contains the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'perdure[{extra}]'")
        self.package = package
        self.extra = extra


class ValueTooLarge(StoreError):
    """A value is larger than the store accepts."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} is {size:,} bytes, more than the {limit:,} the store accepts; "
            "store large data elsewhere and record a reference, or raise max_value_size"
        )
        self.size = size
        self.limit = limit
