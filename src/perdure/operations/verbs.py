"""The verbs of `Operations` as data: their fields, and who may use them when.

The commands of `perdure` and the forms of the dashboard are generated from this table,
`verbs.toml`.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.errors import InvalidArgument
from perdure.insights.terms import parse_time
from perdure.snapshot import RunStatus

Right: TypeAlias = Literal["view", "payloads", "operate", "override", "delete", "admin"]
"""What a person may do: look, see redacted values, act on runs, change history, delete, switch."""

Place: TypeAlias = Literal["runs", "workflows", "queues", "schedules", "workers", "store", "views"]


class Field(msgspec.Struct, frozen=True):
    """One argument of a verb, named as the parameter it is passed to; perhaps one of `choices`."""

    name: str
    label: str
    kind: Literal["text", "json", "key", "number", "time", "flag", "tags", "values"] = "text"
    required: bool = False
    argument: bool = False
    option: str = ""
    default: str = ""
    hint: str = ""
    help: str = ""
    choices: tuple[str, ...] = ()

    @property
    def is_argument(self) -> bool:
        """Whether a command takes it as a word after the id, and not as an option."""
        return self.required or self.argument


class Verb(msgspec.Struct, frozen=True):
    """An action on what is at `place`: a run, a workflow, a queue and so on."""

    name: str
    title: str
    right: Right
    text: str
    command: str
    help: str = ""
    done: str = ""
    fields: tuple[Field, ...] = ()
    statuses: tuple[RunStatus, ...] = ()
    steps: tuple[Literal["ok", "failed", "pending"], ...] = ()
    has_preview: bool = False
    answers: bool = False
    danger: bool = False
    main: bool = False
    bulk: bool = False
    to_list: bool = False
    place: Place = "runs"
    has_target: bool = True

    @property
    def needs_why(self) -> bool:
        """Whether a reason must be given."""
        return self.right in ("override", "delete")

    def check_why(self, why: str) -> str:
        """Return the reason; verbs that change or delete history need one."""
        if self.needs_why and not why.strip():
            raise InvalidArgument("why", "", "a reason", "It is recorded with your name")
        return why.strip()


def _read_verbs() -> Mapping[str, Verb]:
    table = tomllib.loads(Path(__file__).with_name("verbs.toml").read_text(encoding="utf-8"))
    names = {name: {"name": name, "command": name.replace("_", "-")} for name in table}
    return {name: msgspec.convert(names[name] | table[name], Verb) for name in table}


VERBS = _read_verbs()


def read_arguments(
    fields: Iterable[Field], texts: Mapping[str, str], now: datetime
) -> dict[str, Any]:
    """Return the arguments of a verb from what was entered; empty options are left out."""
    arguments: dict[str, Any] = {}
    for field in fields:
        text = texts.get(field.name) or field.default
        if text.strip():
            arguments[field.name] = _READERS[field.kind](text, field.name, now)
        elif field.required:
            raise InvalidArgument(field.name, text, "a value", f"Fill in {field.label!r}")
    return arguments


def parse_json(text: str, parameter: str) -> Any:
    """Return the value of a JSON text, or raise `InvalidArgument` that says what is wrong."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        is_words = re.fullmatch(r"[\w .-]+", text)
        hint = f"Write a string as '\"{text}\"'" if is_words else str(error).capitalize()
        raise InvalidArgument(parameter, text, "JSON", hint) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_number(text: str, parameter: str) -> int:
    """Return the number that was entered."""
    if not text.strip().isdecimal():
        raise InvalidArgument(parameter, text, "a number")
    return int(text)


def parse_pairs(text: str, parameter: str) -> dict[str, str]:
    """Return `name=value` pairs that are separated by spaces."""
    if any("=" not in word for word in text.split()):
        raise InvalidArgument(parameter, text, "name=value, separated by spaces")
    return dict(word.split("=", 1) for word in text.split())


def _parse_time(text: str, parameter: str, now: datetime) -> datetime:
    try:
        return parse_time(text.strip(), now)
    except ValueError as error:
        raise InvalidArgument(parameter, text, str(error)) from None


_READERS: Mapping[str, Callable[[str, str, datetime], Any]] = {
    "text": lambda text, name, now: text,
    "key": lambda text, name, now: text,
    "json": lambda text, name, now: parse_json(text, name),
    "values": lambda text, name, now: parse_json(text, name),
    "number": lambda text, name, now: parse_number(text, name),
    "tags": lambda text, name, now: parse_pairs(text, name),
    "flag": lambda text, name, now: text.strip() == "yes",
    "time": _parse_time,
}
