"""Validate any object as a snapshot, with checks derived from the TypedDicts of the format.

None of the object's code is run: types are compared exactly, and a key is looked up in a dict only
once all its keys are known to be strings. So a hostile object cannot raise, and validation takes
linear time.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    TypeGuard,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from perdure.clock import parse_iso
from perdure.codec import ErrorCause, SerializedCause, ThrownCause
from perdure.codec.annotations import union_members
from perdure.errors import InvalidArgument, SnapshotFormatError
from perdure.snapshot.format import (
    NULLABLE,
    Count,
    FailureRecord,
    KnownMetadata,
    Metadata,
    Milliseconds,
    PendingWait,
    Snapshot,
    SnapshotWarning,
    StepFacts,
    StepRecord,
    SuccessRecord,
    Timestamp,
    WorkflowSnapshot,
)

Check: TypeAlias = Callable[[Any], Sequence[str]]
"""Return the problems of a value, each beginning with its path inside the value."""


@dataclass(frozen=True, slots=True)
class SnapshotCheck:
    """The result of `validate_snapshot`: the snapshot, or every problem with its path."""

    valid: bool
    snapshot: Snapshot | None
    errors: tuple[str, ...]


def validate_snapshot(candidate: object) -> SnapshotCheck:
    """Check any object; every problem is reported with its path, such as `steps["key"].ok`.

    None of the object's code is run, and objects must be exactly `dict`, as JSON parsers return
    them. Unknown fields are allowed, and the values of steps are not checked.
    """
    flaw = object_flaw(candidate)
    problems = (f"snapshot{flaw}",) if flaw else _check_snapshot(candidate)
    errors = tuple(problem.removeprefix(".") for problem in problems)
    snapshot = None if errors else cast(Snapshot, candidate)
    return SnapshotCheck(valid=not errors, snapshot=snapshot, errors=errors)


def assert_valid_snapshot(candidate: object) -> Snapshot:
    """Return the snapshot, or raise `SnapshotFormatError` with every problem."""
    check = validate_snapshot(candidate)
    if check.snapshot is None:
        raise SnapshotFormatError(check.errors)
    return check.snapshot


def looks_like_workflow_snapshot(candidate: object) -> TypeGuard[Snapshot]:
    """Return whether this is probably a snapshot: the right version, with steps and execution."""
    if object_flaw(candidate):
        return False
    fields = cast(dict[str, object], candidate)
    parts = (fields.get("steps"), fields.get("execution"))
    return not version_problems(fields) and all(type(part) is dict for part in parts)


def object_flaw(value: object) -> str:
    """Return why a value is not a JSON object, or an empty string if it is one."""
    if type(value) is not dict:
        return f": expected an object, got {_short_repr(value)}"
    for key in cast(dict[object, object], value):
        if type(key) is not str:
            return f": expected strings as keys, got {_short_repr(key)}"
    return ""


def version_problems(fields: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the format version."""
    if "formatVersion" not in fields:
        return ["formatVersion is missing"]
    return ["formatVersion" + problem for problem in _check_version(fields["formatVersion"])]


def warnings_problems(warnings: object) -> list[str]:
    """Return the problems of a list of warnings."""
    return ["warnings" + problem for problem in _check_warnings(warnings)]


def _problem(expected: str, value: object) -> tuple[str]:
    return (f": expected {expected}, got {_short_repr(value)}",)


def _short_repr(value: object) -> str:
    """Describe a value briefly without running any of its code."""
    if value is None or type(value) is bool or type(value) is float:
        return repr(value)
    if type(value) is int and value.bit_length() <= 64:
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 40 else value[:37] + "...")
    # `type(value).__name__` would run code of the metaclass.
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def _check_anything(value: object) -> Sequence[str]:
    return ()


def _check_string(value: object) -> Sequence[str]:
    return () if type(value) is str else _problem("a string", value)


def _check_bool(value: object) -> Sequence[str]:
    return () if type(value) is bool else _problem("true or false", value)


def _check_count(value: object) -> Sequence[str]:
    return () if type(value) is int and value >= 1 else _problem("an int >= 1", value)


def _check_milliseconds(value: object) -> Sequence[str]:
    if (type(value) is int or type(value) is float) and 0 <= value < math.inf:
        return ()
    return _problem("a finite number >= 0", value)


def _check_timestamp(value: object) -> Sequence[str]:
    if type(value) is str:
        try:
            parse_iso(value)
        except InvalidArgument:
            pass
        else:
            return ()
    return _problem("an ISO 8601 datetime with a UTC offset", value)


def _check_step(record: object) -> Sequence[str]:
    if flaw := object_flaw(record):
        return (flaw,)
    fields = cast(dict[str, object], record)
    ok = fields.get("ok")
    if type(ok) is bool:
        return _check_success(fields) if ok else _check_failure(fields)
    problems = [f".ok{problem}" for problem in _check_bool(ok)]
    return [*(problems if "ok" in fields else [".ok is missing"]), *_check_facts(fields)]


def _check_wait(wait: object) -> Sequence[str]:
    if flaw := object_flaw(wait):
        return (flaw,)
    fields = cast(dict[str, object], wait)
    kind = fields.get("kind")
    required_fields = _NEEDED_BY_KIND.get(kind) if type(kind) is str else None
    missing = (
        []
        if required_fields is None or required_fields in fields
        else [f".{required_fields} is missing"]
    )
    return [*_check_wait_fields(fields), *missing]


def _check_causes(cause: Any) -> Sequence[str]:
    """Return the problems of the first invalid cause in a chain of any length."""
    visited_ids: set[int] = set()
    while cause is not None:
        problems = [" is its own cause"] if id(cause) in visited_ids else _check_cause(cause)
        visited_ids.add(id(cause))
        if problems:
            path = ".cause" * (len(visited_ids) - 1)
            return [path + problem for problem in problems]
        cause = cause.get("cause")
    return ()


def _check_cause(cause: Any) -> Sequence[str]:
    if flaw := object_flaw(cause):
        return (flaw,)
    kind = cause.get("type")
    if type(kind) is str and kind in _CAUSES:
        return _CAUSES[kind](cause)
    return [".type" + problem for problem in _problem('"error" or "thrown"', kind)]


_CHECKS: dict[Any, Check] = {
    Any: _check_anything,
    object: _check_anything,
    str: _check_string,
    bool: _check_bool,
    Count: _check_count,
    Milliseconds: _check_milliseconds,
    Timestamp: _check_timestamp,
    StepRecord: _check_step,
    PendingWait: _check_wait,
    SerializedCause | None: _check_causes,
}


def _check_of(annotation: Any) -> Check:
    if annotation in _CHECKS:
        return _CHECKS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Required, NotRequired):
        return _check_of(arguments[0])
    if origin is Annotated and NULLABLE in arguments:
        inner, *metadata = (argument for argument in arguments if argument is not NULLABLE)
        return _nullable(_check_of(Annotated[inner, *metadata] if metadata else inner))
    members = union_members(annotation)
    if type(None) in members:
        (member,) = (member for member in members if member is not type(None))
        return _nullable(_check_of(member))
    if origin is Literal:
        return _one_of(arguments)
    if origin is list:
        return _list_of(_check_of(arguments[0]))
    if origin is dict:
        return _dict_of(_check_of(arguments[1]))
    return _object_of(annotation)


def _nullable(check: Check) -> Check:
    return lambda value: () if value is None else check(value)


def _one_of(options: tuple[object, ...]) -> Check:
    kind = type(options[0])
    expected = " or ".join(json.dumps(option) for option in options)

    def check(value: object) -> Sequence[str]:
        return () if type(value) is kind and value in options else _problem(expected, value)

    return check


def _list_of(check_item: Check) -> Check:
    def check(value: object) -> Sequence[str]:
        if type(value) is not list:
            return _problem("a list", value)
        return [
            f"[{index}]{problem}"
            for index, item in enumerate(value)
            for problem in check_item(item)
        ]

    return check


def _dict_of(check_item: Check) -> Check:
    def check(value: object) -> Sequence[str]:
        if flaw := object_flaw(value):
            return (flaw,)
        return [
            f"[{json.dumps(key, ensure_ascii=False)}]{problem}"
            for key, item in cast(dict[str, object], value).items()
            for problem in check_item(item)
        ]

    return check


def _object_of(shape: Any) -> Check:
    check_fields = _fields_of(shape)

    def check(value: object) -> Sequence[str]:
        flaw = object_flaw(value)
        return (flaw,) if flaw else check_fields(value)

    return check


def _fields_of(shape: Any, *, without: str = "") -> Check:
    """Return a check of the fields of a TypedDict, for a dict whose keys are strings."""
    hints = get_type_hints(shape, include_extras=True)
    checks = {name: _check_of(hint) for name, hint in hints.items() if name != without}
    checks = {name: check for name, check in checks.items() if check is not _check_anything}
    required: frozenset[str] = shape.__required_keys__

    def check(fields: dict[str, object]) -> Sequence[str]:
        problems: dict[str, Sequence[str]] = {}
        for name, value in fields.items():
            if (check_value := checks.get(name)) is not None and (errors := check_value(value)):
                problems[name] = errors
        for name in required:
            if name not in fields:
                problems[name] = (" is missing",)
        if not problems:
            return ()
        return [f".{name}{problem}" for name in hints for problem in problems.get(name, ())]

    return check


_NEEDED_BY_KIND = {"sleep": "wakeAt", "event": "event"}
_CHECKS[Metadata] = _object_of(KnownMetadata)
_CAUSES: dict[str, Check] = {
    # The inner cause is checked by `_check_causes`, without recursion.
    "error": _fields_of(ErrorCause, without="cause"),
    "thrown": _fields_of(ThrownCause),
}
_check_facts = _fields_of(StepFacts)
# `_check_step` has checked `ok` to choose between them.
_check_success = _fields_of(SuccessRecord, without="ok")
_check_failure = _fields_of(FailureRecord, without="ok")
_check_wait_fields = _fields_of(PendingWait)
_check_version = _check_of(get_type_hints(WorkflowSnapshot)["formatVersion"])
_check_warnings = _list_of(_object_of(SnapshotWarning))
_check_snapshot = _fields_of(WorkflowSnapshot)
