"""Parse values in arguments: JSON, or `key=text key:=json` pairs."""

import re
from collections.abc import Sequence
from typing import Any

import click

from perdure.errors import InvalidArgument
from perdure.operations.verbs import parse_json

_PAIR = re.compile(r"([A-Za-z_][\w.-]*)(:=|=)(.*)", re.DOTALL)


def parse_payload(arguments: Sequence[str]) -> Any:
    """Return a payload: nothing, one JSON value, or an object of pairs.

    `name=ana` is a string, `count:=3` is JSON.
    """
    pairs = [_PAIR.fullmatch(argument) for argument in arguments]
    if not arguments:
        return None
    if len(arguments) == 1 and pairs[0] is None:
        return parse_json(arguments[0], "the payload")
    payload: dict[str, Any] = {}
    for argument, pair in zip(arguments, pairs, strict=True):
        if pair is None:
            raise click.UsageError(f"{argument!r} is neither key=text nor key:=json")
        key, kind, text = pair.groups()
        payload[key] = parse_json(text, key) if kind == ":=" else text
    return payload


def hint_at_json(arguments: Sequence[str], problems: Sequence[str]) -> str:
    """Return the advice to write `count:=3` if `count=3` has a problem, or an empty string."""
    for pair in map(_PAIR.fullmatch, arguments):
        if pair is None or pair[2] == ":=" or not _is_json(pair[3]):
            continue
        if any(problem.startswith(f"{pair[1]}: ") for problem in problems):
            return f"; write {pair[1]}:={pair[3]} for a value that is not a string"
    return ""


def _is_json(text: str) -> bool:
    try:
        parse_json(text, "value")
    except InvalidArgument:
        return False
    return True


def parse_options(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Parse `name=value` options."""
    options: dict[str, str] = {}
    for pair in pairs:
        name, separator, options[name] = pair.partition("=")
        if not name or not separator:
            raise click.UsageError(f"{option} is name=value, not {pair!r}")
    return options


def parse_rate(rate: str | None) -> float | None:
    """Return runs per second of `10/s`, `90/min` or a number."""
    if rate is None:
        return None
    number, _, unit = rate.partition("/")
    seconds = {"": 1, "s": 1, "min": 60, "h": 3600}.get(unit)
    try:
        value = float(number) / seconds if seconds else 0
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise click.UsageError(f"--rate is like 10/s or 90/min, not {rate!r}")
    return value
