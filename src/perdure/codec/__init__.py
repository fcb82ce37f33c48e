"""Encode Python values as JSON, and decode them: how the values of steps are stored.

Types that JSON lacks are written with a tag: `{"~datetime": "2024-05-01T09:30:00"}`. Objects with
fields are written as their fields and rebuilt from the step's return type. A part that cannot be
restored is reported as a `Loss` with its path. Nothing is pickled, and nothing is imported because
its name is stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from perdure.codec.annotations import error_type, return_type, returns_result
from perdure.codec.builder import build
from perdure.codec.compare import difference
from perdure.codec.conversion import convert_foreign
from perdure.codec.declared import NO_TYPES, DeclaredTypes, check_types, is_restorable
from perdure.codec.exceptions import (
    ErrorCause,
    SerializedCause,
    ThrownCause,
    bare_cause,
    cause_of,
    members_of,
    recorded_cause,
    restore,
    thrown_of,
    traceback_of,
)
from perdure.codec.reader import split_tag, untag
from perdure.codec.scope import NOWHERE, ErrorScope, class_name, full_name
from perdure.codec.tags import MAX_DEPTH, JSONValue, is_plain, is_shallow
from perdure.codec.writer import Form, Loss, Writer, sorted_json
from perdure.errors import CodecError

__all__ = [
    "EXCEPTION",
    "MAX_DEPTH",
    "NOWHERE",
    "NO_TYPES",
    "DeclaredTypes",
    "ErrorCause",
    "ErrorScope",
    "JSONValue",
    "Loss",
    "Prepared",
    "SerializedCause",
    "ThrownCause",
    "check_types",
    "class_name",
    "convert",
    "decode",
    "decode_cause",
    "dumps",
    "encode",
    "encode_cause",
    "error_type",
    "fingerprint",
    "is_plain",
    "is_restorable",
    "is_shallow",
    "loads",
    "members_of",
    "prepare",
    "prepare_error",
    "recorded_cause",
    "return_type",
    "returns_result",
    "traceback_of",
]

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

EXCEPTION = "exception"
"""The first part of the paths of losses in an exception."""

_NO_ARGUMENTS = f"{crc32(b'[]'):08x}"
_TOO_DEEP = "nested too deeply for the remaining Python stack"
# Data with fewer containers can be read whatever their shape; data with more must not be deeper
# than this.
_MANY_CONTAINERS, _MAX_JSON_DEPTH = 10_000, 300


class Prepared(NamedTuple):
    """A value as it is stored, and as the workflow function sees it.

    `typed` means that the step's return type or declared types are needed to restore the value.
    """

    data: JSONValue
    value: Any
    typed: bool
    losses: tuple[Loss, ...]


def prepare(
    value: object,
    returns: Callable[[], object],
    root: str = "value",
    types: DeclaredTypes = NO_TYPES,
) -> Prepared:
    """Return a value as it is stored, and as the workflow function sees it.

    Plain JSON serves as both, without a copy. `returns` returns the type of the value or `None`; it
    is called only if restoring the value requires a class. Classes that this type does not name are
    looked up in the declared `types`. The paths of losses begin with `root`. Raise `CodecError` if
    the value is nested more than `MAX_DEPTH` deep.
    """
    try:
        if is_plain(value):
            return Prepared(value, value, False, ())
        return _prepare_rich(value, returns, root, types)
    except RecursionError:
        raise CodecError(_TOO_DEEP, root) from None


def _prepare_rich(
    value: object, returns: Callable[[], object], root: str, types: DeclaredTypes
) -> Prepared:
    writer = Writer(Form.FIELDS)
    data = writer.write_root(value, root)
    if writer.typed:
        by_type = _prepare_by_type(value, returns(), writer, data, root)
        if by_type is None or by_type.losses:
            by_name = _prepare_declared(value, types, root)
            # A type that restores part of the value is still better than nothing.
            if by_name is not None and (by_type is None or not by_name.losses):
                return by_name
        if by_type is not None:
            return by_type
        writer = Writer(Form.LOST)
        data = writer.write_root(value, root)
    return Prepared(data, untag(data, root), False, tuple(writer.losses))


def _prepare_declared(value: object, types: DeclaredTypes, root: str) -> Prepared | None:
    """Return the value with the names of its declared classes, or `None` if it contains none."""
    if not types:
        return None
    writer = Writer(Form.DECLARED, types)
    try:
        data = writer.write_root(value, root)
    except CodecError:  # names add levels, and may exceed the limit
        return None
    return _attempt(value, Any, writer, data, root, types) if writer.typed else None


def _prepare_by_type(
    value: object, annotation: object, writer: Writer, data: JSONValue, root: str
) -> Prepared | None:
    """Return the value as plain fields if they suffice, else as fields with class names."""
    if annotation is None:
        return None
    fields = _attempt(value, annotation, writer, data, root)
    if fields is not None and not fields.losses:
        return fields
    namer = Writer(Form.NAMED)
    try:
        with_names = _attempt(value, annotation, namer, namer.write_root(value, root), root)
    except CodecError:  # names add levels, and may exceed the limit
        return fields
    # If writing loses something anyway, names are the safer form. Otherwise they are used only if
    # they avoid the loss.
    if with_names is not None and (namer.losses or not with_names.losses):
        return with_names
    return fields


def _attempt(
    value: object,
    annotation: object,
    writer: Writer,
    data: JSONValue,
    root: str,
    types: DeclaredTypes = NO_TYPES,
) -> Prepared | None:
    try:
        new_value = build(data, annotation, root, types)
    except CodecError:
        return None
    path = difference(value, new_value, root)
    if path is not None and _is_untyped(new_value, data, root):
        return None
    losses = tuple(writer.losses)
    if path is not None and not losses:
        losses = (Loss(path, "non-json"),)
    return Prepared(data, new_value, True, losses)


def _is_untyped(new_value: object, data: JSONValue, root: str) -> bool:
    """Return whether the annotation restored no class at all, and can be ignored."""
    try:
        return difference(untag(data, root), new_value, root) is None
    except CodecError:
        return False


def encode(value: object, returns: object = None) -> JSONValue:
    """Return a value as JSON with tags, or raise `CodecError` if it could not be restored."""
    data, _, _, losses = prepare(value, lambda: returns)
    if losses:
        loss = losses[0]
        subject = "the value" if loss.cls is None else f"a value of class {loss.cls.__name__}"
        hint = (
            "it contains itself"
            if loss.reason == "circular"
            else "neither JSON nor the given type can represent it"
        )
        raise CodecError(f"{subject} cannot be stored: {hint}", loss.path)
    return data


def decode(
    data: JSONValue,
    returns: object = None,
    typed: bool = False,
    types: DeclaredTypes = NO_TYPES,
) -> Any:
    """Decode a value from stored JSON.

    The classes are those of `returns` if the value is `typed`, or the declared `types` if it was
    stored with their names.

    JSON without tags is returned as it is, without a copy. Malformed data raises `CodecError` with
    the path.
    """
    try:
        if not typed:
            return data if is_plain(data) else untag(_shallow(data), "value")
        if returns is None and split_tag(data)[0] != "declared":
            raise CodecError(
                "a type is needed to restore the value; annotate the step, or pass returns="
            )
        return build(_shallow(data), returns, "value", types)
    except RecursionError:
        raise CodecError(_TOO_DEEP, "value") from None


def _shallow(data: JSONValue) -> JSONValue:
    if not is_shallow(data):
        raise CodecError(f"nested more than {MAX_DEPTH} levels deep", "value")
    return data


def convert(data: JSONValue, type: object) -> Any:
    """Convert untagged JSON from another source to a type.

    Raise `CodecError` with the path of the field that does not fit.
    """
    try:
        return convert_foreign(data, type, "value")
    except CodecError:
        raise
    except RecursionError:
        raise CodecError(_TOO_DEEP, "value") from None
    except Exception as error:
        raise CodecError(f"the type cannot be used: {error!r}", "value") from error


def dumps(data: JSONValue) -> bytes:
    """Return encoded data as JSON in UTF-8."""
    try:
        text = _to_json(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot be written as JSON: {error}") from error
    # Since Python 3.14, only the stack limits the depth, so more can be written than read back.
    # Most texts are too short for that: their containers need not be counted.
    if len(text) > _MANY_CONTAINERS and _has_many_containers(text) and not _is_readable(data):
        raise CodecError("cannot be written as JSON: nested too deeply to be read back")
    return text


def _has_many_containers(text: bytes) -> bool:
    return text.count(b"[") + text.count(b"{") > _MANY_CONTAINERS


def _is_readable(data: JSONValue) -> bool:
    try:
        return is_shallow(data, _MAX_JSON_DEPTH)
    except RecursionError:
        return False


def loads(data: bytes | str) -> JSONValue:
    """Parse JSON, or raise `CodecError`."""
    try:
        return _from_json(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"not valid JSON: {error}") from error


def fingerprint(args: tuple[object, ...]) -> str:
    """Return a short string that is the same for equal arguments in every process. Never raises.

    An argument that is not data is represented by the name of its class.
    """
    if not args:
        return _NO_ARGUMENTS
    data: Any = args
    for arg in args:
        if type(arg) is not str or not arg.isascii():
            data = [_fingerprint_data(arg) for arg in args]
            break
    return f"{crc32(sorted_json(data)):08x}"


def _fingerprint_data(arg: object) -> JSONValue:
    try:
        return arg if is_plain(arg) else Writer(Form.FINGERPRINT).write_root(arg, "")
    except (CodecError, RecursionError):
        return {"~type": full_name(type(arg))}


def encode_cause(error: object, scope: ErrorScope = NOWHERE) -> SerializedCause:
    """Encode an exception, or any other value that stands for a failure. Never raises.

    If the class of an exception is found in `scope`, its full name is stored.
    """
    writer = Writer(Form.LOST)

    def write(value: object) -> tuple[JSONValue, bool]:
        loss_count = writer.loss_count
        return writer.write_root(value, "cause"), writer.loss_count == loss_count

    try:
        cause = (
            cause_of(error, write, scope)
            if isinstance(error, BaseException)
            else thrown_of(error, write)
        )
    except Exception:  # noqa: BLE001 - a failure must be recorded, whatever it contains
        return bare_cause(error)
    return cause if is_shallow(cause) else bare_cause(error)


def decode_cause(cause: SerializedCause, scope: ErrorScope = NOWHERE) -> object:
    """Decode the exception or value of a stored cause.

    An exception is restored with its class if the class is built into Python, belongs to perdure or
    is found in `scope`; otherwise it becomes a `StepError` with its name, message and traceback.
    Its causes, its notes and the members of a group are restored as well.
    """
    try:
        return restore(_shallow(cause), scope, lambda data: untag(data, "cause"))
    except RecursionError:
        raise CodecError(_TOO_DEEP, "cause") from None


def prepare_error(
    error: BaseException, scope: ErrorScope
) -> tuple[SerializedCause, BaseException, tuple[Loss, ...]]:
    """Return an exception as it is stored, as the workflow function sees it, and its losses.

    The function sees the original object if a replay can raise an equal one. Otherwise it sees what
    a replay will raise: a `StepError`, or an exception of the same class without the lost parts.
    """
    cause = encode_cause(error, scope)
    visible = decode_cause(cause, scope)
    if not isinstance(visible, BaseException):
        raise CodecError("the stored exception was not restored as an exception", "cause")
    losses = _losses(error, visible)
    if not losses:
        return cause, error, ()
    visible.__traceback__ = error.__traceback__
    visible.__context__ = error
    return cause, visible, tuple(loss for loss in losses if loss.path)


def _losses(error: BaseException, visible: BaseException) -> list[Loss]:
    """Return what distinguishes a restored exception from the original.

    A class that was not found is not listed: the `StepError` that the function sees shows it.
    """
    cause = recorded_cause(visible)
    if type(visible) is not type(error) or cause is None:
        return [Loss("", "non-json")]
    losses = [Loss(f"{EXCEPTION}.{name}", "non-json") for name in cause.get("lost", ())]
    if isinstance(error, BaseExceptionGroup) and isinstance(visible, BaseExceptionGroup):
        for pair in zip(error.exceptions, visible.exceptions, strict=True):
            losses += _losses(*pair)
    return losses
