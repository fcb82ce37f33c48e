"""Values as JSON, and back as they were: what a run remembers of what its steps returned.

Types that JSON lacks are written with a tag: `{"~datetime": "2024-05-01T09:30:00"}`. Objects with
fields are written as their fields and come back by the step's return type. What cannot come back is
a `Loss` that names its place. Nothing is pickled, and no class is looked up by a stored name.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from perdure.codec.annotations import error_type, return_type
from perdure.codec.builder import build
from perdure.codec.compare import difference
from perdure.codec.conversion import convert_foreign
from perdure.codec.exceptions import (
    ErrorCause,
    SerializedCause,
    ThrownCause,
    bare_cause,
    cause_of,
    full_name,
    restored,
    thrown_of,
)
from perdure.codec.reader import untag
from perdure.codec.tags import MAX_DEPTH, JSONValue, is_plain, is_shallow
from perdure.codec.writer import Form, Loss, Writer, sorted_json
from perdure.errors import CodecError

__all__ = [
    "MAX_DEPTH",
    "ErrorCause",
    "JSONValue",
    "Loss",
    "Prepared",
    "SerializedCause",
    "ThrownCause",
    "convert",
    "decode",
    "decode_cause",
    "dumps",
    "encode",
    "encode_cause",
    "error_type",
    "fingerprint",
    "is_plain",
    "loads",
    "prepare",
    "prepare_error",
    "return_type",
]

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

_NO_ARGUMENTS = f"{crc32(b'[]'):08x}"
_NO_STACK = "nested too deep for what is left of Python's stack"


class Prepared(NamedTuple):
    """A value as it is stored, and as the workflow function sees it now and after a crash.

    `typed`: the data need the step's return type to come back.
    """

    data: JSONValue
    value: object
    typed: bool
    losses: tuple[Loss, ...]


def prepare(value: object, returns: Callable[[], object], root: str = "value") -> Prepared:
    """Give what is stored of a value, and what the workflow function sees of it.

    A value that is plain JSON is both, without a copy. `returns` gives the type of the value, or
    None; it is asked only when something in the value needs its class to come back. Losses are
    named by their path from `root`. A value nested more than `MAX_DEPTH` deep is a `CodecError`.
    """
    try:
        if is_plain(value):
            return Prepared(value, value, False, ())
        return _prepare_rich(value, returns, root)
    except RecursionError:
        raise CodecError(_NO_STACK, root) from None


def _prepare_rich(value: object, returns: Callable[[], object], root: str) -> Prepared:
    writer = Writer(Form.FIELDS)
    data = writer.whole(value, root)
    if writer.typed:
        settled = _prepare_by_type(value, returns(), writer, data, root)
        if settled is not None:
            return settled
        writer = Writer(Form.LOST)
        data = writer.whole(value, root)
    return Prepared(data, untag(data, root), False, tuple(writer.losses))


def _prepare_by_type(
    value: object, annotation: object, writer: Writer, data: JSONValue, root: str
) -> Prepared | None:
    """Give the value by its type: as bare fields if they do, else with the names of classes."""
    if annotation is None:
        return None
    fields = _attempt(value, annotation, writer, data, root)
    if fields is not None and not fields.losses:
        return fields
    namer = Writer(Form.NAMED)
    try:
        named = _attempt(value, annotation, namer, namer.whole(value, root), root)
    except CodecError:  # names take room, and may be what is too deep
        return fields
    # Where something is lost in writing, names are the surer of the two; else they have to pay off.
    if named is not None and (namer.losses or not named.losses):
        return named
    return fields


def _attempt(
    value: object, annotation: object, writer: Writer, data: JSONValue, root: str
) -> Prepared | None:
    try:
        back = build(data, annotation, root)
    except CodecError:
        return None
    where = difference(value, back, root)
    if where is not None and _is_untyped(back, data, root):
        return None
    losses = tuple(writer.losses)
    if where is not None and not losses:
        losses = (Loss(where, "non-json"),)
    return Prepared(data, back, True, losses)


def _is_untyped(back: object, data: JSONValue, root: str) -> bool:
    """Say whether the type has put no class back, so that it is as good as none."""
    try:
        return difference(untag(data, root), back, root) is None
    except CodecError:
        return False


def encode(value: object, returns: object = None) -> JSONValue:
    """Give a value as JSON with tags, or raise `CodecError` if it would not come back as it was."""
    data, _, _, losses = prepare(value, lambda: returns)
    if losses:
        path, reason = losses[0]
        hint = (
            "it holds itself" if reason == "circular" else "JSON and the type given cannot hold it"
        )
        raise CodecError(f"a value cannot be stored as it is: {hint}", path)
    return data


def decode(data: JSONValue, returns: object = None, typed: bool = False) -> Any:
    """Give the value that stored JSON stands for, with its classes when it is `typed`.

    JSON without tags comes back as the same object. Malformed data are a `CodecError` that names
    the path.
    """
    try:
        if not typed:
            return data if is_plain(data) else untag(_shallow(data), "value")
        if returns is None:
            raise CodecError(
                "these data need a type to come back; annotate the step, or pass returns="
            )
        return build(_shallow(data), returns, "value")
    except RecursionError:
        raise CodecError(_NO_STACK, "value") from None


def _shallow(data: JSONValue) -> JSONValue:
    if not is_shallow(data):
        raise CodecError(f"data of more than {MAX_DEPTH} levels", "value")
    return data


def convert(data: JSONValue, type: object) -> Any:
    """Give JSON from elsewhere, without tags, as a type.

    `CodecError` names the field that does not fit.
    """
    try:
        return convert_foreign(data, type, "value")
    except CodecError:
        raise
    except RecursionError:
        raise CodecError(_NO_STACK, "value") from None
    except Exception as error:
        raise CodecError(f"the type cannot be used: {error!r}", "value") from error


def dumps(data: JSONValue) -> bytes:
    """Give encoded data as JSON text in UTF-8."""
    try:
        return _to_json(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot be written as JSON: {error}") from error


def loads(data: bytes | str) -> JSONValue:
    """Give the data of a JSON text, or raise `CodecError` when it is none."""
    try:
        return _from_json(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"not valid JSON: {error}") from error


def fingerprint(args: tuple[object, ...]) -> str:
    """Give a short text that is the same for equal arguments in every process. Never raises.

    An argument that is no data counts by the name of its class.
    """
    if not args:
        return _NO_ARGUMENTS
    printed: Any = args
    for arg in args:
        if type(arg) is not str or not arg.isascii():
            printed = [_print(arg) for arg in args]
            break
    return f"{crc32(sorted_json(printed)):08x}"


def _print(arg: object) -> JSONValue:
    try:
        return arg if is_plain(arg) else Writer(Form.PRINT).whole(arg, "")
    except (CodecError, RecursionError):
        return {"~type": full_name(type(arg))}


def encode_cause(error: object) -> SerializedCause:
    """Give an exception, or any other value that stands for a failure, as data. Never raises."""
    writer = Writer(Form.LOST)

    def write(value: object) -> tuple[JSONValue, bool]:
        lost = writer.lost
        return writer.whole(value, "cause"), writer.lost == lost

    try:
        cause = (
            cause_of(error, write) if isinstance(error, BaseException) else thrown_of(error, write)
        )
    except Exception:  # noqa: BLE001 - a failure has to be told, whatever it holds
        return bare_cause(error)
    return cause if is_shallow(cause) else bare_cause(error)


def decode_cause(cause: SerializedCause, declared: Sequence[type[BaseException]] = ()) -> object:
    """Give the exception or value that a stored cause tells of.

    An exception comes back as the same class when that is Python's own, perdure's own or declared;
    otherwise as a `StepError` with its name, message and traceback. Causes and notes come with it.
    """
    try:
        return restored(_shallow(cause), declared, lambda data: untag(data, "cause"))
    except RecursionError:
        raise CodecError(_NO_STACK, "cause") from None


def prepare_error(
    error: BaseException, declared: Sequence[type[BaseException]]
) -> tuple[SerializedCause, BaseException]:
    """Give what is stored of an exception, and the exception that the workflow function sees.

    That is the same object when its class will come back, and otherwise the `StepError` that comes
    back in its place, raised from it.
    """
    cause = encode_cause(error)
    seen = decode_cause(cause, declared)
    if type(seen) is type(error):
        return cause, error
    if not isinstance(seen, BaseException):
        raise CodecError("an exception did not come back as one", "cause")
    seen.__cause__ = error
    return cause, seen
