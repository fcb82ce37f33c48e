"""Errors of arguments, values and stored data."""

from collections.abc import Sequence
from typing import Literal

from perdure.errors.error import PerdureError


class InvalidArgument(PerdureError, ValueError):
    """An argument of a public function has the wrong type or value."""

    def __init__(self, parameter: str, got: object, expected: str, hint: str = "") -> None:
        text = f"{parameter}: expected {expected}, got {_short_repr(got)} ({type(got).__name__})"
        super().__init__(f"{text}. {hint}" if hint else text)
        self.parameter = parameter
        self.got = got
        self.expected = expected


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # __repr__ is the user's code
        return "an object whose repr() fails"
    return text if len(text) <= 120 else text[:117] + "..."


class InvalidDuration(InvalidArgument):
    """A duration is negative, NaN, infinite or has an unknown unit."""


class InvalidCron(InvalidArgument):
    """A cron expression is malformed or never matches, or its time zone is unknown."""


class InvalidPayload(PerdureError):
    """A payload does not fit the workflow's payload type; `errors` lists every problem."""

    def __init__(self, workflow: str, errors: Sequence[str]) -> None:
        self.workflow = workflow
        self.errors = tuple(errors)
        super().__init__(
            f"payload of workflow {workflow!r} is not valid: " + "; ".join(self.errors)
        )


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
        suffix = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
        super().__init__(f"Invalid snapshot format: {first}{suffix}")


class SnapshotMismatch(PerdureError):
    """A snapshot does not belong to the workflow that should resume from it."""

    def __init__(
        self, kind: Literal["unknown_steps", "definition_hash", "workflow_name"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


class StateFormatError(PerdureError):
    """A string or object is not a valid resume state."""


class UnwrapError(PerdureError):
    """`unwrap` was called on an `Err` whose `error` is not an exception."""

    def __init__(self, error: object) -> None:
        super().__init__(f"called unwrap() on Err({error!r})")
        self.error = error


class MissingDependency(PerdureError, ImportError):
    """A backend's driver is not installed; the message contains the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'perdure[{extra}]'")
        self.package = package
        self.extra = extra
