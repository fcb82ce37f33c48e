"""Exceptions as data, in the shape of the snapshot format, and back.

A class is only looked up among Python's built-in exceptions, perdure's, and those that the user
declared. Any other becomes a `StepError`. Constructors of the user's classes are not run.
"""

import builtins
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from perdure import errors
from perdure.codec.classes import attributes_of
from perdure.codec.tags import JSONValue
from perdure.errors import CodecError, PerdureError, StepError

TEXT_LIMIT = 1000
_STACK_LIMIT = 16_384
_CHAIN_LIMIT = 20
_UNPRINTABLE = "[unable to convert to string]"

# Raised in a coroutine, these become a RuntimeError.
_UNSAFE = (StopIteration, StopAsyncIteration)

Write: TypeAlias = Callable[[object], tuple[JSONValue, bool]]
"""Return a value as data, and whether it can be restored exactly."""

Read: TypeAlias = Callable[[JSONValue], object]


class ErrorCause(TypedDict):
    """An exception. Only perdure writes `notes`, and encoded `args` and `attrs`."""

    type: Literal["error"]
    name: str
    message: str
    stack: NotRequired[str | None]
    cause: NotRequired["SerializedCause | None"]
    notes: NotRequired[list[str]]
    args: NotRequired[list[JSONValue]]
    attrs: NotRequired[dict[str, JSONValue]]


class ThrownCause(TypedDict):
    """A failure that is not an exception: any value, and a readable form of it."""

    type: Literal["thrown"]
    originalType: NotRequired[str | None]
    value: NotRequired[JSONValue]
    stringRepresentation: str
    truncated: NotRequired[bool | None]


SerializedCause: TypeAlias = ErrorCause | ThrownCause


def _exceptions(objects: Iterable[object], base: type[Exception]) -> dict[str, type[Exception]]:
    return {
        cls.__name__: cls
        for cls in objects
        if isinstance(cls, type) and issubclass(cls, base) and not issubclass(cls, _UNSAFE)
    }


_BUILT_IN = _exceptions(vars(builtins).values(), Exception)
_OWN = _exceptions(vars(errors).values(), PerdureError)
_KNOWN = _BUILT_IN | _OWN
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


def class_name(cls: type) -> str:
    """Return a class's name, whatever its metaclass does."""
    return str(type.__getattribute__(cls, "__name__"))


def full_name(cls: type) -> str:
    """Return a class's qualified name with its module."""
    names = (type.__getattribute__(cls, part) for part in ("__module__", "__qualname__"))
    return ".".join(str(name) for name in names)


def is_known(cls: type[BaseException]) -> bool:
    """Return whether an exception class is restored without being declared."""
    return _KNOWN.get(class_name(cls)) is cls


def name_of(cls: type[BaseException]) -> str:
    """Return the name under which an exception class is stored, distinct from all known ones."""
    name = class_name(cls)
    return name if _KNOWN.get(name, cls) is cls else full_name(cls)


def cause_of(error: BaseException, write: Write) -> ErrorCause:
    """Return an exception and the chain of its causes as data."""
    links = [error]
    visited = {id(error)}
    while (cause := links[-1].__cause__) is not None and id(cause) not in visited:
        if len(links) == _CHAIN_LIMIT:
            break
        visited.add(id(cause))
        links.append(cause)
    data = _link(links.pop(), write)
    while links:
        inner, data = data, _link(links.pop(), write)
        data["cause"] = inner
    return data


def bare_cause(error: object) -> SerializedCause:
    """Return only the name and message of a failure that cannot be encoded in full."""
    name = class_name(type(error))
    if issubclass(type(error), BaseException):
        return ErrorCause(type="error", name=name_of(type(error)), message=safe_text(error))  # type: ignore[arg-type] # by issubclass
    text = safe_text(error)[:TEXT_LIMIT]
    return ThrownCause(type="thrown", originalType=name, stringRepresentation=text)


def _link(error: BaseException, write: Write) -> ErrorCause:
    link = ErrorCause(type="error", name=name_of(type(error)), message=safe_text(error))
    if stack := _stack(error):
        link["stack"] = stack
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and notes:
        link["notes"] = [safe_text(note) for note in notes]
    arguments, attributes = _state(error)
    encoded = [write(argument) for argument in arguments]
    if all(exact for _, exact in encoded):
        link["args"] = [data for data, _ in encoded]
    if attributes:
        link["attrs"] = {name: write(value)[0] for name, value in attributes.items()}
    return link


def _stack(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(error, chain=error.__cause__ is None)
    except Exception:  # noqa: BLE001 - formatting runs the user's __str__ and reads files
        return ""
    return safe_text("".join(lines))[-_STACK_LIMIT:]


def _root(cls: type[BaseException]) -> Any:
    return next(base for base in cls.__mro__ if base in _ROOTS)


def _state(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an exception's arguments and attributes, as pickle would collect them."""
    _, arguments, *rest = _root(type(error)).__reduce__(error)
    attributes = (rest[0] if rest else None) or {}
    for name, value in attributes_of(error).items():
        attributes.setdefault(name, value)
    return arguments, {name: value for name, value in attributes.items() if _is_settable(name)}


def _is_settable(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def thrown_of(value: object, write: Write) -> ThrownCause:
    """Return a failure that is not an exception as data."""
    text = _TEXT.get(value, "") if value is None or type(value) is bool else safe_text(value)
    thrown = ThrownCause(
        type="thrown", originalType=_foreign_name(value), stringRepresentation=text[:TEXT_LIMIT]
    )
    if len(text) > TEXT_LIMIT:
        thrown["truncated"] = True
    data, _ = write(value)
    if data is not None or value is None:
        thrown["value"] = data
    return thrown


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
    named = (name for kind, name in _FOREIGN_NAMES.items() if kind is type(value))
    return next(named, class_name(type(value)))


def restore(cause: Any, declared: Sequence[type[BaseException]], read: Read) -> object:
    """Return the exception, or the thrown value, of a stored cause."""
    kind = _field(cause, "type")
    if kind == "error":
        return _restore_error(cause, declared, read)
    if kind != "thrown":
        raise CodecError(f"unknown type of cause {kind!r}", "cause.type")
    if "value" in cause:
        return read(cause["value"])
    # For JavaScript's undefined, the string only describes the value.
    return (
        None if cause.get("originalType") == "undefined" else _field(cause, "stringRepresentation")
    )


def _field(cause: Any, name: str) -> str:
    value = cause.get(name) if type(cause) is dict else None
    if type(value) is not str:
        raise CodecError(f"cause.{name} is missing or not a string", f"cause.{name}")
    return value


def _restore_error(
    cause: Any, declared: Sequence[type[BaseException]], read: Read
) -> BaseException:
    name, message = _field(cause, "name"), _field(cause, "message")
    candidates = (cls for cls in declared if name_of(cls) == name)
    cls = next(candidates, _KNOWN.get(name))
    error = None if cls is None else _restore_class(cls, cause, message, read)
    if error is None:
        stack = cause.get("stack")
        error = StepError(name, message, stack if type(stack) is str else "")
    notes = cause.get("notes")
    for note in notes if type(notes) is list else ():
        error.add_note(str(note))
    if cause.get("cause") is not None:
        error.__cause__ = _as_exception(restore(cause["cause"], declared, read))
    return error


def _as_exception(cause: object) -> BaseException | None:
    if cause is None or isinstance(cause, BaseException):
        return cause
    return StepError(_foreign_name(cause), safe_text(cause))


def _restore_class(
    cls: type[BaseException], cause: Any, message: str, read: Read
) -> BaseException | None:
    """Return an instance without running `__init__` of the class, or `None` if that fails."""
    arguments, attributes = cause.get("args"), cause.get("attrs", {})
    if (type(arguments) is not list and arguments is not None) or type(attributes) is not dict:
        raise CodecError("args or attrs of the cause are malformed", "cause")
    args = None if arguments is None else [read(argument) for argument in arguments]
    values = {name: read(value) for name, value in attributes.items() if _is_settable(name)}
    try:
        return _create(cls, args, message, values)
    except Exception:  # noqa: BLE001 - setting an attribute may run the user's code
        return None


def _create(
    cls: type[BaseException], args: list[object] | None, message: str, values: dict[str, object]
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
