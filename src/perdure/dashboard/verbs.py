"""The verbs of `Operations` as forms: what each asks for, who may use it, and when it is offered."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perdure.dashboard.access import Right
from perdure.dashboard.ids import decode_id
from perdure.errors import InvalidArgument
from perdure.insights.terms import quoted
from perdure.snapshot import RunStatus


@dataclass(frozen=True, slots=True)
class Field:
    """One argument of a verb, named as the parameter it is passed to."""

    name: str
    label: str
    kind: Literal["text", "json", "key", "number"] = "text"
    is_required: bool = False
    hint: str = ""
    is_option: bool = False


@dataclass(frozen=True, slots=True)
class Verb:
    """Something an operator can do to a run, or to one of its steps."""

    name: str
    title: str
    right: Right
    text: str
    fields: tuple[Field, ...] = ()
    statuses: tuple[RunStatus, ...] = ()
    is_danger: bool = False
    is_bulk: bool = False

    @property
    def needs_why(self) -> bool:
        """Whether a reason must be given."""
        return self.right in ("override", "delete")

    @property
    def command(self) -> str:
        """The name of the command that does the same."""
        return "resume" if self.name == "unpause" else self.name.replace("_", "-")


_OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")
_RESTING: tuple[RunStatus, ...] = ("queued", "suspended", "waiting")
_LIVE: tuple[RunStatus, ...] = (*_RESTING, "running", "paused")
_ANY: tuple[RunStatus, ...] = (*_LIVE, *_OVER)
_STEP = Field("step", "Step", "key", is_required=True)
_AT = Field("at", "Step", "key", is_required=True)
_WORKER = "A worker then continues it."

_VERBS = (
    Verb(
        "retry",
        "Retry",
        "operate",
        f"The steps that ended the run run again; finished ones do not. {_WORKER}",
        statuses=("failed",),
        is_bulk=True,
    ),
    Verb(
        "unpause",
        "Resume",
        "operate",
        "The run continues where it was paused, as soon as a worker claims it.",
        statuses=("paused",),
        is_bulk=True,
    ),
    Verb(
        "signal",
        "Signal",
        "operate",
        "The event goes to the run's inbox. A run that waits for it becomes due at once.",
        (
            Field("event", "Event", is_required=True),
            Field("payload", "Payload", "json", hint="JSON, or empty for null", is_option=True),
        ),
        _LIVE,
    ),
    Verb(
        "wake",
        "Wake",
        "operate",
        "A sleep ends now, and a wait for an event times out now. Without a name, all waits end.",
        (Field("wait", "Wait", hint="Empty for all waits", is_option=True),),
        ("suspended", "waiting"),
        is_bulk=True,
    ),
    Verb(
        "pause",
        "Pause",
        "operate",
        "No further step begins until the run is resumed. A step in flight ends first.",
        statuses=(*_RESTING, "running"),
        is_bulk=True,
    ),
    Verb(
        "cancel",
        "Cancel",
        "operate",
        "The run ends as cancelled. A step in flight is interrupted; what was recorded stays.",
        statuses=_LIVE,
        is_danger=True,
        is_bulk=True,
    ),
    Verb(
        "complete_step",
        "Complete step",
        "override",
        f"The step counts as done with the value that you enter. {_WORKER}",
        (_STEP, Field("value", "Value", "json", True, 'JSON, such as "text", 17 or {"a": 1}')),
    ),
    Verb(
        "skip_step",
        "Skip step",
        "override",
        f"The step counts as done with the value null. {_WORKER}",
        (_STEP,),
    ),
    Verb(
        "fail_step",
        "Fail step",
        "override",
        f"The step counts as failed with the error that you enter. {_WORKER}",
        (_STEP, Field("error", "Error", is_required=True)),
    ),
    Verb(
        "retry_step",
        "Retry step",
        "override",
        f"The record of this step is dropped, and the step runs again. {_WORKER}",
        (_STEP,),
    ),
    Verb(
        "rewind",
        "Rewind to here",
        "override",
        f"The records from this step on are dropped, and these steps run again. {_WORKER}",
        (_AT,),
    ),
    Verb(
        "fork",
        "Fork",
        "override",
        "A new run starts with the records before the step; this run stays as it is.",
        (
            Field("at", "Before step", "key", hint="Empty for the beginning", is_option=True),
            Field("new_id", "Id of the new run", hint="Empty for a new id", is_option=True),
            Field("payload", "Input", "json", hint="JSON; empty keeps the input", is_option=True),
            Field(
                "values",
                "Values of steps",
                "json",
                hint='JSON object, such as {"charge": 17}',
                is_option=True,
            ),
            Field("version", "Version", "number", hint="Empty keeps the version", is_option=True),
        ),
        _ANY,
    ),
    Verb(
        "edit_payload",
        "Edit input",
        "override",
        "The run begins with this input. Only a run without records can be changed.",
        (Field("payload", "Input", "json", is_required=True, hint="JSON"),),
        _ANY,
    ),
    Verb(
        "delete",
        "Delete",
        "delete",
        "The run, its history and its inbox are deleted. An entry in the audit trail remains.",
        statuses=_ANY,
        is_danger=True,
        is_bulk=True,
    ),
)

VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _VERBS}


def read_arguments(verb: Verb, fields: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the arguments of a verb from its form; an option that is empty is left out."""
    arguments: dict[str, Any] = {}
    for field in verb.fields:
        text = fields.get(field.name, [""])[-1]
        if text.strip():
            arguments[field.name] = _read(field, text)
        elif field.is_required:
            raise InvalidArgument(field.name, text, "a value", f"Fill in {field.label!r}")
    return arguments


def _read(field: Field, text: str) -> Any:
    if field.kind == "json":
        return parse_json(text, field.name)
    if field.kind == "number":
        if not text.strip().isdecimal():
            raise InvalidArgument(field.name, text, "a number")
        return int(text)
    return decode_id(text) or text if field.kind == "key" else text


def parse_json(text: str, parameter: str) -> Any:
    """Return the value of a JSON text, or raise `InvalidArgument` that says where it is wrong."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidArgument(parameter, text, "JSON", str(error).capitalize()) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def shell_command(command: str, *arguments: str, **options: str) -> str:
    """Return the command line that does the same as a page."""
    words = ["perdure", command, *arguments]
    words += [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return shlex.join(words)


def quote_term(field: str, value: str) -> str:
    """Return a term of a query for a value that may contain anything, or "" for none."""
    return f"{field}:{quoted(value)}" if value else ""
