"""What format version 1 asks of each field of a snapshot, for any object at all.

Nothing of the object's own code is run: types are compared exactly, and a dict is asked for a key
only after all its keys are known to be text. So a hostile object cannot raise, and the time it
takes is linear in its size.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from perdure.clock import parse_iso
from perdure.errors import InvalidArgument

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class _Rule:
    """Whether a value may stand in a field, and the words for what may."""

    fits: Callable[[object], bool]
    expected: str


def _one_of(*names: str) -> _Rule:
    expected = " or ".join(json.dumps(name) for name in names)
    return _Rule(lambda value: type(value) is str and value in names, expected)


def _or_null(rule: _Rule) -> _Rule:
    # Document databases keep a field that other writers left undefined as null.
    return _Rule(lambda value: value is None or rule.fits(value), rule.expected)


def _is_moment(value: object) -> bool:
    if type(value) is not str:
        return False
    try:
        parse_iso(value)
    except InvalidArgument:
        return False
    return True


def _is_duration(value: object) -> bool:
    return (type(value) is int or type(value) is float) and 0 <= value < math.inf


def _is_list_of_text(value: object) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


_TEXT = _Rule(lambda value: type(value) is str, "text")
_FLAG = _Rule(lambda value: type(value) is bool, "true or false")
_COUNT = _Rule(lambda value: type(value) is int and value >= 1, "a whole number, 1 or more")
_MOMENT = _Rule(_is_moment, "an ISO 8601 time with an offset")

_STEP = {
    "at": _MOMENT,
    "durationMs": _Rule(_is_duration, "a finite number, 0 or more"),
    "attempts": _COUNT,
    "args": _TEXT,
    "kind": _TEXT,
    "typed": _FLAG,
    "coded": _FLAG,
    "branch": _TEXT,
    "call": _TEXT,
    "failures": _Rule(_is_list_of_text, "a list of texts"),
    "unclaimed": _TEXT,
}
_META = {"origin": _one_of("result", "throw")}
_EXECUTION = {
    "status": _one_of("running", "completed", "failed"),
    "lastUpdated": _MOMENT,
    "completedAt": _or_null(_MOMENT),
    "currentStepId": _or_null(_TEXT),
    "state": _one_of("suspended", "waiting", "paused", "cancelled"),
    "failed": _Rule(_is_list_of_text, "a list of texts"),
    "truncated": _FLAG,
    "reason": _TEXT,
}
_PENDING = {
    "id": _TEXT,
    "kind": _one_of("sleep", "event"),
    "wakeAt": _MOMENT,
    "event": _TEXT,
}
_NEEDED = {"sleep": "wakeAt", "event": "event"}
_METADATA = {"workflowId": _or_null(_TEXT), "definitionHash": _or_null(_TEXT)}
_WARNING = {"type": _TEXT, "stepId": _TEXT, "path": _TEXT, "reason": _TEXT}
_CAUSE_TYPE = _one_of("error", "thrown")
_ERROR_CAUSE = {"name": _TEXT, "message": _TEXT, "stack": _or_null(_TEXT)}
_THROWN_CAUSE = {
    "stringRepresentation": _TEXT,
    "originalType": _or_null(_TEXT),
    "truncated": _or_null(_FLAG),
}


def snapshot_problems(candidate: object) -> Iterator[str]:
    """Give every problem of a would-be snapshot, each beginning with its path."""
    if flaw := object_flaw(candidate):
        yield f"a snapshot{flaw}"
        return
    fields = cast(dict[str, object], candidate)
    yield from version_problems(fields)
    yield from _part_problems(fields, "steps", _steps_problems)
    yield from _part_problems(fields, "execution", _execution_problems)
    if fields.get("waits") is not None:
        yield from _part_problems(fields, "waits", _waits_problems)
    name = fields.get("workflowName")
    if name is not None and type(name) is not str:
        yield f"workflowName has to be text, got {_shown(name)}"
    if fields.get("metadata") is not None:
        yield from _part_problems(fields, "metadata", _metadata_problems)
    if (warnings := fields.get("warnings")) is not None:
        yield from warnings_problems(warnings)


def object_flaw(value: object) -> str:
    """Give what keeps a value from being a JSON object, in words; empty when nothing does."""
    if type(value) is not dict:
        return f" has to be an object, got {_shown(value)}"
    for key in cast(dict[object, object], value):
        if type(key) is not str:
            return f" has to have text as keys, got {_shown(key)}"
    return ""


def version_problems(fields: Mapping[str, object]) -> Iterator[str]:
    """Give the problem of the format version, if there is one."""
    version = fields.get("formatVersion")
    if "formatVersion" not in fields:
        yield f"formatVersion is missing, expected {FORMAT_VERSION}"
    elif type(version) is not int or version != FORMAT_VERSION:
        yield f"formatVersion has to be {FORMAT_VERSION}, got {_shown(version)}"


def warnings_problems(warnings: object) -> Iterator[str]:
    """Give every problem of a list of warnings."""
    return _list_problems(warnings, "warnings", _warning_problems)


def _part_problems(
    fields: dict[str, object], name: str, check: Callable[[dict[str, Any]], Iterable[str]]
) -> Iterator[str]:
    part = fields.get(name)
    if name not in fields:
        yield f"{name} is missing"
    elif flaw := object_flaw(part):
        yield name + flaw
    else:
        yield from (name + problem for problem in check(cast(dict[str, Any], part)))


def _list_problems(
    items: object, name: str, check: Callable[[dict[str, Any]], Iterable[str]]
) -> Iterator[str]:
    if type(items) is not list:
        yield f"{name} has to be a list, got {_shown(items)}"
        return
    for index, item in enumerate(items):
        for problem in [flaw] if (flaw := object_flaw(item)) else check(item):
            yield f"{name}[{index}]{problem}"


def _field_problems(
    fields: dict[str, Any], rules: Mapping[str, _Rule], *required: str
) -> Iterator[str]:
    for name in required:
        if name not in fields:
            yield f".{name} is missing"
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None and not rule.fits(value):
            yield f".{name} has to be {rule.expected}, got {_shown(value)}"


def _steps_problems(steps: dict[str, Any]) -> Iterator[str]:
    for key, record in steps.items():
        for problem in [flaw] if (flaw := object_flaw(record)) else _step_problems(record):
            yield f"[{json.dumps(key, ensure_ascii=False)}]{problem}"


def _step_problems(record: dict[str, Any]) -> Iterator[str]:
    ok = record.get("ok")
    if "ok" not in record:
        yield ".ok is missing"
    elif type(ok) is not bool:
        yield f".ok has to be true or false, got {_shown(ok)}"
    elif not ok:
        yield from _failure_problems(record)
    yield from _field_problems(record, _STEP)


def _failure_problems(record: dict[str, Any]) -> Iterator[str]:
    for name in ("error", "cause"):
        if name not in record:
            yield f".{name} is missing"
    yield from _cause_problems(record.get("cause"))
    meta = record.get("meta")
    if meta is None:
        return
    for problem in [flaw] if (flaw := object_flaw(meta)) else _field_problems(meta, _META, *_META):
        yield f".meta{problem}"


def _cause_problems(cause: Any) -> Iterator[str]:
    """Give the problems of the first bad link in a chain of causes, which may be of any length."""
    seen: set[int] = set()
    while cause is not None:
        problems = [" is its own cause"] if id(cause) in seen else list(_link_problems(cause))
        seen.add(id(cause))
        if problems:
            path = ".cause" * len(seen)
            yield from (path + problem for problem in problems)
            return
        cause = cause.get("cause")


def _link_problems(cause: Any) -> Iterable[str]:
    if flaw := object_flaw(cause):
        return [flaw]
    kind = cause.get("type")
    if not _CAUSE_TYPE.fits(kind):
        return [f".type has to be {_CAUSE_TYPE.expected}, got {_shown(kind)}"]
    if kind == "error":
        return _field_problems(cause, _ERROR_CAUSE, "name", "message")
    return _field_problems(cause, _THROWN_CAUSE, "stringRepresentation")


def _execution_problems(execution: dict[str, Any]) -> Iterator[str]:
    yield from _field_problems(execution, _EXECUTION, "status", "lastUpdated")
    if "pending" in execution:
        yield from _list_problems(execution["pending"], ".pending", _wait_problems)


def _waits_problems(waits: dict[str, Any]) -> Iterator[str]:
    for id, wait in waits.items():
        if wait is None:
            continue
        for problem in [flaw] if (flaw := object_flaw(wait)) else _wait_problems(wait):
            yield f"[{json.dumps(id, ensure_ascii=False)}]{problem}"


def _wait_problems(wait: dict[str, Any]) -> Iterator[str]:
    yield from _field_problems(wait, _PENDING, "id", "kind")
    kind = wait.get("kind")
    if type(kind) is str and (needed := _NEEDED.get(kind, "kind")) not in wait:
        yield f".{needed} is missing"


def _metadata_problems(metadata: dict[str, Any]) -> Iterator[str]:
    return _field_problems(metadata, _METADATA)


def _warning_problems(warning: dict[str, Any]) -> Iterator[str]:
    return _field_problems(warning, _WARNING, *_WARNING)


def _shown(value: object) -> str:
    """Give a value in a few words, without running any of its code."""
    if value is None or type(value) is bool or type(value) is float:
        return repr(value)
    if type(value) is int and value.bit_length() <= 64:
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 40 else value[:37] + "...")
    # `type(value).__name__` would ask the metaclass, which may be anything.
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name
