"""Type annotations, taken apart: what a function gives back, what a type variable stands for."""

import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Mapping
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
    """Give the members of a union, or the annotation as the only one."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def bare(annotation: Any) -> Any:
    """Give what an annotation means without wrappers, new names and aliases around it."""
    while True:
        if get_origin(annotation) in _WRAPPERS:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif type(get_origin(annotation)).__name__ == "TypeAliasType":
            alias = get_origin(annotation)
            annotation = filled(alias.__value__, _matched(alias, get_args(annotation)))
        else:
            return annotation


def filled(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Give an annotation with its type variables replaced; `Any` for those that nobody knows."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, Any)
    expected = getattr(annotation, "__parameters__", ())
    if not expected or isinstance(annotation, type):
        return annotation
    return annotation[tuple(variables.get(variable, Any) for variable in expected)]


def variables_of(annotation: Any) -> dict[Any, Any]:
    """Give what a generic class's type variables stand for, those of its bases included."""
    origin = get_origin(annotation) or annotation
    found = _matched(origin, get_args(annotation))
    for base in getattr(origin, "__orig_bases__", ()):
        if get_origin(base) is not Generic:
            found = variables_of(filled(base, found)) | found
    return found


def _matched(generic: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    expected: Any = getattr(generic, "__parameters__", None)
    expected = expected or getattr(generic, "__type_params__", ())
    return dict(zip(expected, arguments, strict=False))


def return_type(fn: Callable[..., object]) -> object | None:
    """Give the type of the value that a function gives in the end, or None when that is not known.

    Awaitables are awaited and results unwrapped: `Awaitable[Ok[User] | Err[str]]` gives `User`.
    """
    try:
        return _given(_annotation(fn))
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return None


def error_type(fn: Callable[..., object]) -> object | None:
    """Give the type of the errors that a function returns in `Err`, or None when that is not known.

    `Awaitable[Ok[User] | Err[NotFound]]` gives `NotFound`.
    """
    try:
        return _failed_with(_annotation(fn))
    except Exception:  # noqa: BLE001 - annotations and attributes are the user's code
        return None


def _annotation(fn: Any) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, type):
        return fn
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        fn = type(fn).__call__
    annotation = fn.__annotations__.get("return")
    return _resolved(annotation, inspect.unwrap(fn))


def _resolved(annotation: Any, fn: Any) -> Any:
    """Give an annotation with the names in it looked up where the function was written."""
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
def _given(annotation: Any) -> object | None:
    annotation = bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Awaitable, Coroutine):
        return _given(arguments[-1])
    members = union_members(annotation)
    values = [_held(member) for member in members if (get_origin(member) or member) is not Err]
    if values != list(members):
        return _given(Union[tuple(values)]) if values else None  # noqa: UP007 - known at run time only
    if annotation in (Any, object, types.NoneType) or isinstance(annotation, TypeVar):
        return None
    found: object = annotation
    return found


@lru_cache(maxsize=1024)
def _failed_with(annotation: Any) -> object | None:
    annotation = bare(annotation)
    if get_origin(annotation) in (Awaitable, Coroutine):
        return _failed_with(get_args(annotation)[-1])
    errors = [
        get_args(member)[0] for member in union_members(annotation) if get_origin(member) is Err
    ]
    if not errors:
        return None
    error: Any = Union[tuple(errors)]  # noqa: UP007 - known at run time only
    return None if error in (Any, object) or isinstance(error, TypeVar) else error


def _held(member: Any) -> Any:
    if get_origin(member) is Ok:
        return get_args(member)[0]
    return Any if member is Ok else member
