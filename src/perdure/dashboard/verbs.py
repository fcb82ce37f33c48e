"""The verbs of `Operations` as forms: what each asks for, and who may use it when."""

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.clock import parse_iso
from perdure.dashboard.access import Right
from perdure.errors import InvalidArgument
from perdure.insights.terms import quoted
from perdure.snapshot import RunStatus
from perdure.urls import decode_id


class Field(msgspec.Struct, frozen=True):
    """One argument of a verb, named as the parameter it is passed to; perhaps one of `choices`."""

    name: str
    label: str
    kind: Literal["text", "json", "key", "number", "time", "flag"] = "text"
    required: bool = False
    hint: str = ""
    choices: tuple[str, ...] = ()


class Verb(msgspec.Struct, frozen=True):
    """Something an operator can do to what is at `place`: a run, a workflow, a queue and so on.

    `command` does the same. With `to_list`, the page that lists what is there follows it.
    """

    name: str
    title: str
    right: Right
    text: str
    command: str
    fields: tuple[Field, ...] = ()
    statuses: tuple[RunStatus, ...] = ()
    danger: bool = False
    bulk: bool = False
    to_list: bool = False
    place: Literal["runs", "workflows", "queues", "schedules", "workers"] = "runs"

    @property
    def needs_why(self) -> bool:
        """Whether a reason must be given."""
        return self.right in ("override", "delete")


def _read_verbs() -> Mapping[str, Verb]:
    table = tomllib.loads(Path(__file__).with_name("verbs.toml").read_text(encoding="utf-8"))
    names = {name: {"name": name, "command": name.replace("_", "-")} for name in table}
    return {name: msgspec.convert(names[name] | table[name], Verb) for name in table}


VERBS = _read_verbs()


def read_arguments(verb: Verb, fields: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the arguments of a verb from its form; an option that is empty is left out."""
    arguments: dict[str, Any] = {}
    for field in verb.fields:
        text = fields.get(field.name, [""])[-1]
        if text.strip():
            arguments[field.name] = _READERS[field.kind](text, field.name)
        elif field.required:
            raise InvalidArgument(field.name, text, "a value", f"Fill in {field.label!r}")
    return arguments


def parse_json(text: str, parameter: str) -> Any:
    """Return the value of a JSON text, or raise `InvalidArgument` that says where it is wrong."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidArgument(parameter, text, "JSON", str(error).capitalize()) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_number(text: str, parameter: str) -> int:
    """Return the number that was entered."""
    if not text.strip().isdecimal():
        raise InvalidArgument(parameter, text, "a number")
    return int(text)


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "json": parse_json,
    "number": parse_number,
    "key": lambda text, _: decode_id(text) or text,
    "text": lambda text, _: text,
    "flag": lambda text, _: text.strip() == "yes",
    # A browser sends the time without a zone, in which the page says that it is entered.
    "time": lambda text, name: parse_iso(f"{text.strip().removesuffix('Z')}Z", name),
}


def shell_command(*words: str, where: str = "") -> str:
    """Return the command line that does the same as a page."""
    return shlex.join(["perdure", *words, *(["--where", where] if where else ())])


def quote_term(field: str, value: str) -> str:
    """Return a term of a query for a value that may contain anything, or "" for none."""
    if not value:
        return ""
    return f"{field}:{quoted(value)}" if field else quoted(value)
