"""Exceptions as data, in the snapshot format's own shape, and back as the class they were.

A class is found in one of three closed lists only: Python's own exceptions, perdure's, and those
the user declared. Anything else comes back as a `StepError`. No constructor of the user's is run.
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

# To raise these in a coroutine would end something else than the step.
_UNSAFE = (StopIteration, StopAsyncIteration)

Write: TypeAlias = Callable[[object], tuple[JSONValue, bool]]
"""Gives a value as data, and whether it will come back as it was."""

Read: TypeAlias = Callable[[JSONValue], object]


class ErrorCause(TypedDict):
    """An exception. `notes`, `args` and `attrs` (encoded) are perdure's own; others ignore them."""

    type: Literal["error"]
    name: str
    message: str
    stack: NotRequired[str | None]
    cause: NotRequired["SerializedCause | None"]
    notes: NotRequired[list[str]]
    args: NotRequired[list[JSONValue]]
    attrs: NotRequired[dict[str, JSONValue]]


class ThrownCause(TypedDict):
    """A failure that is no exception: any value, and text for people."""

    type: Literal["thrown"]
    originalType: NotRequired[str | None]
    value: NotRequired[JSONValue]
    stringRepresentation: str
    truncated: NotRequired[bool | None]


SerializedCause: TypeAlias = ErrorCause | ThrownCause


def _exceptions(found: Iterable[object], base: type[Exception]) -> dict[str, type[Exception]]:
    return {
        each.__name__: each
        for each in found
        if isinstance(each, type) and issubclass(each, base) and not issubclass(each, _UNSAFE)
    }


_BUILT_IN = _exceptions(vars(builtins).values(), Exception)
_OWN = _exceptions(vars(errors).values(), PerdureError)
_KNOWN = _BUILT_IN | _OWN
_ROOTS = frozenset(
    each
    for each in vars(builtins).values()
    if isinstance(each, type) and issubclass(each, BaseException)
)


def safe_text(value: object) -> str:
    """Give `str(value)` in characters that every store takes, whatever its `__str__` does."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - __str__ is the user's code
        return _UNPRINTABLE
    return str.encode(text, "utf-8", "backslashreplace").decode()


def class_name(cls: type) -> str:
    """Give a class's name, whatever its metaclass does."""
    return str(type.__getattribute__(cls, "__name__"))


def full_name(cls: type) -> str:
    """Give a class's name with its module and the classes and functions it stands in."""
    names = (type.__getattribute__(cls, part) for part in ("__module__", "__qualname__"))
    return ".".join(str(name) for name in names)


def is_known(cls: type[BaseException]) -> bool:
    """Say whether an exception class comes back without having been declared."""
    return _KNOWN.get(class_name(cls)) is cls


def name_of(cls: type[BaseException]) -> str:
    """Give the name by which an exception class is stored: none that another class answers to."""
    name = class_name(cls)
    return name if _KNOWN.get(name, cls) is cls else full_name(cls)


def cause_of(error: BaseException, write: Write) -> ErrorCause:
    """Give an exception and the chain of its causes as data."""
    links = [error]
    met = {id(error)}
    while (cause := links[-1].__cause__) is not None and id(cause) not in met:
        if len(links) == _CHAIN_LIMIT:
            break
        met.add(id(cause))
        links.append(cause)
    whole = _link(links.pop(), write)
    while links:
        inner, whole = whole, _link(links.pop(), write)
        whole["cause"] = inner
    return whole


def bare_cause(error: object) -> SerializedCause:
    """Give only the name and text of a failure, for one that cannot be told in full."""
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
    written = [write(argument) for argument in arguments]
    if all(exact for _, exact in written):
        link["args"] = [data for data, _ in written]
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
    """Give an exception's arguments and attributes as Python itself would pickle them."""
    _, arguments, *rest = _root(type(error)).__reduce__(error)
    attributes = (rest[0] if rest else None) or {}
    for name, value in attributes_of(error).items():
        attributes.setdefault(name, value)
    return arguments, {name: each for name, each in attributes.items() if _is_settable(name)}


def _is_settable(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def thrown_of(value: object, write: Write) -> ThrownCause:
    """Give a failure that is no exception as data."""
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


def restored(cause: Any, declared: Sequence[type[BaseException]], read: Read) -> object:
    """Give the exception, or the thrown value, that a stored cause tells of."""
    kind = _field(cause, "type")
    if kind == "error":
        return _restored_error(cause, declared, read)
    if kind != "thrown":
        raise CodecError(f"a cause of unknown type {kind!r}", "cause.type")
    if "value" in cause:
        return read(cause["value"])
    # JavaScript's "there was none" is no text.
    return (
        None if cause.get("originalType") == "undefined" else _field(cause, "stringRepresentation")
    )


def _field(cause: Any, name: str) -> str:
    value = cause.get(name) if type(cause) is dict else None
    if type(value) is not str:
        raise CodecError(f"a cause without the text {name!r}", f"cause.{name}")
    return value


def _restored_error(
    cause: Any, declared: Sequence[type[BaseException]], read: Read
) -> BaseException:
    name, message = _field(cause, "name"), _field(cause, "message")
    named = (each for each in declared if name_of(each) == name)
    cls = next(named, _KNOWN.get(name))
    error = None if cls is None else _revived(cls, cause, message, read)
    if error is None:
        stack = cause.get("stack")
        error = StepError(name, message, stack if type(stack) is str else "")
    notes = cause.get("notes")
    for note in notes if type(notes) is list else ():
        error.add_note(str(note))
    if "cause" in cause:
        error.__cause__ = _as_exception(restored(cause["cause"], declared, read))
    return error


def _as_exception(cause: object) -> BaseException | None:
    if cause is None or isinstance(cause, BaseException):
        return cause
    return StepError(_foreign_name(cause), safe_text(cause))


def _revived(
    cls: type[BaseException], cause: Any, message: str, read: Read
) -> BaseException | None:
    """Give an instance of the class, or None when there is none without running its `__init__`."""
    arguments, attributes = cause.get("args"), cause.get("attrs", {})
    if (type(arguments) is not list and arguments is not None) or type(attributes) is not dict:
        raise CodecError("an error whose args or attrs are malformed", "cause")
    given = None if arguments is None else [read(argument) for argument in arguments]
    values = {name: read(value) for name, value in attributes.items() if _is_settable(name)}
    try:
        return _filled(cls, given, message, values)
    except Exception:  # noqa: BLE001 - setting an attribute may run the user's code
        return None


def _filled(
    cls: type[BaseException], given: list[object] | None, message: str, values: dict[str, object]
) -> BaseException | None:
    root = _root(cls)
    if given is None:
        error = root.__new__(cls)
        error.args = (message,)
    else:
        error = root.__new__(cls, *given)
        root.__init__(error, *given)
    for name, value in values.items():
        object.__setattr__(error, name, value)
    return error if type(error) is cls else None
