"""HTTP responses: views of runs, and refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from http import HTTPStatus
from typing import Any

import msgspec

from perdure.errors import MissingDependency, StepError
from perdure.runtime import Run

try:
    from starlette.responses import Response
except ModuleNotFoundError as error:
    raise MissingDependency("starlette", "fastapi") from error


@dataclass(frozen=True, slots=True)
class RunError:
    """Why a run failed: the class and message of an exception, or the `value` of an `Err`."""

    type: str
    message: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class RunWait:
    """What a run waits for: an event, a time, or an event until a time."""

    id: str
    event: str | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as its callers see it: without its payload and history."""

    id: str
    workflow: str | None
    version: int
    status: str
    output: Any = None
    error: RunError | None = None
    waits: list[RunWait] = field(default_factory=list)
    progress: float | None = None
    note: str = ""
    reason: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class EventReceipt:
    """The outcome of an event: `delivered`, or `duplicate` if it was already sent."""

    delivery: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request was refused (RFC 9457); `errors` lists what is wrong with a payload."""

    title: str
    status: int
    detail: str
    errors: Sequence[str] = ()
    type: str = "about:blank"


def view_of(run: Run) -> RunView:
    """Return the view of a run."""
    names = [each.name for each in fields(RunView) if each.name != "waits"]
    values: dict[str, Any] = {name: getattr(run, name) for name in names}
    values["error"] = _error(run)
    values["waits"] = [RunWait(each.id, each.event, each.wake_at) for each in run.pending]
    return RunView(**values)


def _error(run: Run) -> RunError | None:
    error = run.error
    if error is None:
        return None
    if isinstance(error, BaseException):
        name = error.name if isinstance(error, StepError) else type(error).__name__
        return RunError(name, str(error))
    return RunError("Err", error if isinstance(error, str) else "", error)


def refusal(
    status: int,
    detail: str,
    problems: Sequence[str] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a response that explains why a request was refused."""
    problem = Problem(HTTPStatus(status).phrase, status, detail, problems)
    return Response(msgspec.json.encode(problem), status, headers, "application/problem+json")


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with a value as JSON."""
    return Response(encode(value), status, headers, "application/json")


def encode(value: object) -> bytes:
    """Encode a value as plain JSON, without the tags with which it is stored."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert a value of a class that msgspec does not know."""
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump(mode="json")
