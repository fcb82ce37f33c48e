"""Encode exceptions in the snapshot format, and restore them.

A class is only looked up in an `ErrorScope`: among the exceptions of Python and perdure, those that
the user declared, and those that the user's functions can name. Any other becomes a `StepError`.
Constructors of the user's classes are not run.
"""

import builtins
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from perdure.codec.classes import attributes_of
from perdure.codec.scope import KNOWN, ErrorClass, ErrorScope, class_name, full_name, name_of
from perdure.codec.tags import JSONValue
from perdure.errors import CodecError, StepError

TEXT_LIMIT = 1000
_STACK_LIMIT = 16_384
_SHORTEST_STACK = 512
_CHAIN_LIMIT = 20
_UNPRINTABLE = "[unable to convert to string]"

_RECORDED = "__recorded__"
"""The attribute in which a restored exception keeps the cause it was restored from.

The cause contains the original traceback, which must survive if the exception is recorded again as
the outcome of the run. Names that begin with two underscores are not stored as attributes.
"""

_LINKED = "\nThe above exception was the direct cause of the following exception:\n\n"

Write: TypeAlias = Callable[[object], tuple[JSONValue, bool]]
"""Return a value as data, and whether it can be restored exactly."""

Read: TypeAlias = Callable[[JSONValue], object]


class ErrorCause(TypedDict):
    """An exception. Only perdure writes the fields from `className` on.

    `className` is the full name of the class, if it was in scope where the exception was recorded.
    Without it, only built-in, perdure's and declared classes are restored. `args` and `attrs` are
    encoded; parts that cannot be restored exactly are omitted and listed in `lost`. `members` are
    the causes of the members of a group. `suppressContext` means that the exception was raised
    `from None`.
    """

    type: Literal["error"]
    name: str
    message: str
    stack: NotRequired[str | None]
    cause: NotRequired["SerializedCause | None"]
    className: NotRequired[str]
    notes: NotRequired[list[str]]
    args: NotRequired[list[JSONValue]]
    attrs: NotRequired[dict[str, JSONValue]]
    lost: NotRequired[list[str]]
    members: NotRequired[list[JSONValue]]
    suppressContext: NotRequired[bool]


class ThrownCause(TypedDict):
    """A failure that is not an exception: any value, and a readable form of it."""

    type: Literal["thrown"]
    originalType: NotRequired[str | None]
    value: NotRequired[JSONValue]
    stringRepresentation: str
    truncated: NotRequired[bool | None]


SerializedCause: TypeAlias = ErrorCause | ThrownCause


_ROOTS = frozenset(
    cls
    for cls in vars(builtins).values()
    if isinstance(cls, type) and issubclass(cls, BaseException)
)


def safe_text(value: object) -> str:
    """Return `str(value)` in characters that every store accepts, whatever its `__str__` does."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - __str__ is the user's code
        return _UNPRINTABLE
    return str.encode(text, "utf-8", "backslashreplace").decode()


def cause_of(
    error: BaseException, write: Write, scope: ErrorScope, room: int = _STACK_LIMIT
) -> ErrorCause:
    """Encode an exception and the chain of its causes.

    `room` is the maximum length of its traceback.
    """
    links = [error]
    visited_ids = {id(error)}
    while (cause := links[-1].__cause__) is not None and id(cause) not in visited_ids:
        if len(links) == _CHAIN_LIMIT:
            break
        visited_ids.add(id(cause))
        links.append(cause)
    data = _link(links.pop(), write, scope, room)
    while links:
        inner, data = data, _link(links.pop(), write, scope, room)
        data["cause"] = inner
    return data


def bare_cause(error: object) -> SerializedCause:
    """Encode only the name and message of a failure that cannot be encoded in full."""
    name = class_name(type(error))
    if issubclass(type(error), BaseException):
        name = name_of(type(error))
        return ErrorCause(type="error", name=name, message=safe_text(error), lost=["args"])
    text = safe_text(error)[:TEXT_LIMIT]
    return ThrownCause(type="thrown", originalType=name, stringRepresentation=text)


def _link(error: BaseException, write: Write, scope: ErrorScope, room: int) -> ErrorCause:
    cls = type(error)
    link = ErrorCause(type="error", name=name_of(cls), message=safe_text(error))
    if stack := _stack(error)[-room:]:
        link["stack"] = stack
    if KNOWN.get(link["name"]) is not cls and scope.contains(cls):
        link["className"] = full_name(cls)
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and notes:
        link["notes"] = [safe_text(note) for note in notes]
    if error.__suppress_context__ and error.__cause__ is None:
        link["suppressContext"] = True
    if isinstance(error, BaseExceptionGroup):
        # A group with many members must not make the record too large for the store.
        share = max(room // len(error.exceptions), _SHORTEST_STACK)
        link["members"] = [cause_of(member, write, scope, share) for member in error.exceptions]
    _write_state(error, link, write)
    return link


def _write_state(error: BaseException, link: ErrorCause, write: Write) -> None:
    arguments, attributes = _state(error)
    encoded_args = [write(argument) for argument in arguments]
    encoded_attributes = {name: write(value) for name, value in attributes.items()}
    lost_names = [name for name, (_, exact) in encoded_attributes.items() if not exact]
    if all(exact for _, exact in encoded_args):
        link["args"] = [data for data, _ in encoded_args]
    else:
        lost_names.insert(0, "args")
    if attrs := {name: data for name, (data, exact) in encoded_attributes.items() if exact}:
        link["attrs"] = attrs
    if lost_names:
        link["lost"] = lost_names


def _stack(error: BaseException) -> str:
    cause = recorded_cause(error)
    if cause is not None and type(stack := cause.get("stack")) is str:
        return stack
    try:
        lines = traceback.format_exception(error, chain=error.__cause__ is None)
    except Exception:  # noqa: BLE001 - formatting runs the user's __str__ and reads files
        return ""
    return safe_text("".join(lines))[-_STACK_LIMIT:]


def recorded_cause(error: BaseException) -> ErrorCause | None:
    """Return the cause from which an exception was restored, or `None` if it was not."""
    try:
        # Not by `getattr`: a class of the user may define `__getattr__`.
        cause: ErrorCause = object.__getattribute__(error, _RECORDED)
    except AttributeError:
        return None
    return cause


def traceback_of(cause: SerializedCause | None) -> str:
    """Format a stored traceback, with those of its causes, as Python prints them."""
    stacks: list[str] = []
    link: Any = cause
    while link is not None:
        if type(stack := link.get("stack")) is str and stack:
            stacks.append(stack)
        link = link.get("cause")
    return _LINKED.join(reversed(stacks))


def members_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the members of a group, including those of nested groups."""
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield member
        yield from members_of(member)


def _root(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if base in _ROOTS)


def _state(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an exception's arguments and attributes, as pickle would collect them.

    The members of a group are not among its arguments.
    """
    _, arguments, *rest = _root(type(error)).__reduce__(error)
    if isinstance(error, BaseExceptionGroup):
        arguments = (error.message,)
    attributes = (rest[0] if rest else None) or {}
    for name, value in attributes_of(error).items():
        attributes.setdefault(name, value)
    return arguments, {name: value for name, value in attributes.items() if _is_settable(name)}


def _is_settable(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def thrown_of(value: object, write: Write) -> ThrownCause:
    """Encode a failure that is not an exception."""
    text = _TEXT.get(value, "") if value is None or type(value) is bool else safe_text(value)
    cause = ThrownCause(
        type="thrown", originalType=_foreign_name(value), stringRepresentation=text[:TEXT_LIMIT]
    )
    if len(text) > TEXT_LIMIT:
        cause["truncated"] = True
    data, _ = write(value)
    if data is not None or value is None:
        cause["value"] = data
    return cause


_TEXT = {None: "null", True: "true", False: "false"}

_FOREIGN_NAMES: dict[type, str] = {
    type(None): "null",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "Object",
    list: "Array",
    FunctionType: "function",
}


def _foreign_name(value: object) -> str:
    names = (name for kind, name in _FOREIGN_NAMES.items() if kind is type(value))
    return next(names, class_name(type(value)))


def restore(cause: Any, scope: ErrorScope, read_value: Read) -> object:
    """Restore the exception, or the thrown value, of a stored cause."""
    kind = _field(cause, "type")
    if kind == "error":
        return _restore_error(cause, scope, read_value)
    if kind != "thrown":
        raise CodecError(f"unknown type of cause {kind!r}", "cause.type")
    if "value" in cause:
        return read_value(cause["value"])
    # For JavaScript's undefined, the string only describes the value.
    return (
        None if cause.get("originalType") == "undefined" else _field(cause, "stringRepresentation")
    )


def _field(cause: Any, name: str) -> str:
    value = cause.get(name) if type(cause) is dict else None
    if type(value) is not str:
        raise CodecError(f"cause.{name} is missing or not a string", f"cause.{name}")
    return value


def _restore_error(cause: Any, scope: ErrorScope, read_value: Read) -> BaseException:
    name, message = _field(cause, "name"), _field(cause, "message")
    cls = _class_of(cause, name, scope)
    error = None if cls is None else _restore_class(cls, cause, message, scope, read_value)
    if error is None:
        stack = cause.get("stack")
        error = StepError(name, message, stack if type(stack) is str else "")
    notes = cause.get("notes")
    for note in notes if type(notes) is list else ():
        error.add_note(str(note))
    if cause.get("cause") is not None:
        error.__cause__ = _as_exception(restore(cause["cause"], scope, read_value))
    elif cause.get("suppressContext") is True:
        error.__suppress_context__ = True
    object.__setattr__(error, _RECORDED, cause)
    return error


def _class_of(cause: Any, name: str, scope: ErrorScope) -> ErrorClass | None:
    if type(full := cause.get("className")) is str:
        return scope.find(full)
    return scope.find_declared(name) or KNOWN.get(name)


def _as_exception(cause: object) -> BaseException | None:
    if cause is None or isinstance(cause, BaseException):
        return cause
    return StepError(_foreign_name(cause), safe_text(cause))


def _restore_class(
    cls: ErrorClass, cause: Any, message: str, scope: ErrorScope, read_value: Read
) -> BaseException | None:
    """Create an instance without running `__init__`, or return `None` if that fails."""
    arguments, attributes = cause.get("args"), cause.get("attrs", {})
    if (type(arguments) is not list and arguments is not None) or type(attributes) is not dict:
        raise CodecError("args or attrs of the cause are malformed", "cause")
    args = None if arguments is None else [read_value(argument) for argument in arguments]
    if "members" in cause:
        args = [*(args or [message]), _restore_members(cause["members"], scope, read_value)]
    values = {name: read_value(value) for name, value in attributes.items() if _is_settable(name)}
    try:
        error = _create(cls, args, message, values)
    except Exception:  # noqa: BLE001 - setting an attribute may run the user's code
        return None
    # If str() fails, the instance lacks something that was not stored.
    is_whole = message == _UNPRINTABLE or safe_text(error) != _UNPRINTABLE
    return error if is_whole else None


def _restore_members(members: Any, scope: ErrorScope, read_value: Read) -> list[BaseException]:
    if type(members) is not list:
        raise CodecError("members of the cause are malformed", "cause.members")
    return [_restore_error(member, scope, read_value) for member in members]


def _create(
    cls: ErrorClass, args: list[Any] | None, message: str, values: dict[str, object]
) -> BaseException | None:
    root = _root(cls)
    if args is None:
        error = root.__new__(cls)
        error.args = (message,)
    else:
        error = root.__new__(cls, *args)
        root.__init__(error, *args)
    for name, value in values.items():
        object.__setattr__(error, name, value)
    return error if type(error) is cls else None
