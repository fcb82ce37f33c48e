"""Inspect type annotations: return types, members of unions, type variables."""

import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    NewType,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from perdure.result import Err, Ok

_WRAPPERS = (Annotated, Final, Required, NotRequired)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation as its only member."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def strip_annotation(annotation: Any) -> Any:
    """Return an annotation without the wrappers, new types and aliases around it."""
    return unwrap(annotation)[0]


def unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """Return an annotation without what is around it, and the metadata of each `Annotated`."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) in _WRAPPERS:
            metadata += getattr(annotation, "__metadata__", ())
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif type(get_origin(annotation)).__name__ == "TypeAliasType":
            annotation = _alias_value(get_origin(annotation), get_args(annotation))
        else:
            return annotation, metadata


def _alias_value(alias: Any, arguments: tuple[Any, ...]) -> Any:
    return substitute(alias.__value__, _match_variables(alias, arguments))


def substitute(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation with its type variables replaced; unknown ones become `Any`."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, Any)
    expected = getattr(annotation, "__parameters__", ())
    if not expected or isinstance(annotation, type):
        return annotation
    return annotation[tuple(variables.get(variable, Any) for variable in expected)]


def variables_of(annotation: Any) -> dict[Any, Any]:
    """Return the values of a generic class's type variables, including those of its bases."""
    origin = get_origin(annotation) or annotation
    variables = _match_variables(origin, get_args(annotation))
    for base in getattr(origin, "__orig_bases__", ()):
        if get_origin(base) is not Generic:
            variables = variables_of(substitute(base, variables)) | variables
    return variables


def _match_variables(generic: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    expected: Any = getattr(generic, "__parameters__", None)
    expected = expected or getattr(generic, "__type_params__", ())
    return dict(zip(expected, arguments, strict=False))


def return_type(fn: Callable[..., object]) -> object | None:
    """Return the type of the value that a call of `fn` results in, or `None` if it is unknown.

    Awaitables are awaited and results unwrapped: for `Awaitable[Ok[User] | Err[str]]` it is `User`.
    """
    try:
        return _value_type(_annotation(fn))
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return None


def error_type(fn: Callable[..., object]) -> object | None:
    """Return the type of the errors that a function returns in `Err`, or `None` if it is unknown.

    For `Awaitable[Ok[User] | Err[NotFound]]` it is `NotFound`.
    """
    try:
        return _error_type(_annotation(fn))
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return None


def returns_result(fn: Callable[..., object]) -> bool:
    """Return whether a function is annotated to return `Ok` or `Err`."""
    try:
        return _has_result(_annotation(fn))
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return False


def annotations_of(fn: Callable[..., object]) -> list[object]:
    """Return the resolvable annotations of a function's parameters and return value."""
    known_types: list[object] = []
    try:
        function = inspect.unwrap(fn)
        annotations = list(function.__annotations__.values())
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return known_types
    for annotation in annotations:
        with suppress(Exception):  # as above: skip what cannot be resolved
            known_types.append(_resolve(annotation, function))
    return known_types


def _annotation(fn: Any) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, type):
        return fn
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        fn = type(fn).__call__
    annotation = fn.__annotations__.get("return")
    return _resolve(annotation, inspect.unwrap(fn))


def _resolve(annotation: Any, fn: Any) -> Any:
    """Resolve the names in an annotation in the scope of the function."""
    if isinstance(annotation, type):
        return annotation
    names = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    local = {name: cell.cell_contents for name, cell in names if _is_filled(cell)}
    holder = types.SimpleNamespace(__annotations__={"return": annotation})
    return get_type_hints(holder, fn.__globals__, local, include_extras=True)["return"]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@lru_cache(maxsize=1024)
def _value_type(annotation: Any) -> object | None:
    annotation = strip_annotation(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Awaitable, Coroutine):
        return _value_type(arguments[-1])
    members = union_members(annotation)
    values = [_ok_type(member) for member in members if (get_origin(member) or member) is not Err]
    if values != list(members):
        return _value_type(Union[tuple(values)]) if values else None  # noqa: UP007 - known only at run time
    if annotation in (Any, object, types.NoneType) or isinstance(annotation, TypeVar):
        return None
    value_type: object = annotation
    return value_type


def _has_result(annotation: Any) -> bool:
    annotation = strip_annotation(annotation)
    if get_origin(annotation) in (Awaitable, Coroutine):
        return _has_result(get_args(annotation)[-1])
    return any((get_origin(each) or each) in (Ok, Err) for each in union_members(annotation))


@lru_cache(maxsize=1024)
def _error_type(annotation: Any) -> object | None:
    annotation = strip_annotation(annotation)
    if get_origin(annotation) in (Awaitable, Coroutine):
        return _error_type(get_args(annotation)[-1])
    errors = [
        get_args(member)[0] for member in union_members(annotation) if get_origin(member) is Err
    ]
    if not errors:
        return None
    error: Any = Union[tuple(errors)]  # noqa: UP007 - known only at run time
    return None if error in (Any, object) or isinstance(error, TypeVar) else error


def _ok_type(member: Any) -> Any:
    if get_origin(member) is Ok:
        return get_args(member)[0]
    return Any if member is Ok else member
