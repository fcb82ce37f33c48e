"""Errors of steps: failures, and calls that are not allowed."""

from datetime import datetime

from perdure.errors.error import PerdureError


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
        outcome = "was not answered in time" if expired else f"was rejected by {by or 'a program'}"
        super().__init__(f"step {step!r} {outcome}: {question}" + (f" ({note})" if note else ""))
        self.step = step
        self.question = question
        self.by = by
        self.note = note
        self.at = at
        self.expired = expired


class DriftError(PerdureError):
    """A replayed call does not match its record or open wait: code or inputs have changed."""

    def __init__(self, step: str, message: str, recorded: str = "", asked: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.recorded = recorded
        self.asked = asked


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


class NotAwaited(PerdureError):
    """A step was called without `await`, so it did not run."""

    def __init__(self, step: str, place: str = "") -> None:
        where = f" ({place})" if place else ""
        super().__init__(
            f"{step!r} was called without `await`{where}, so it did not run. Write `await` before "
            "the call"
        )
        self.step = step
        self.place = place


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
