"""Values: how they are stored, what the function sees, and how they are restored."""

from collections.abc import Callable
from types import CoroutineType
from typing import Any, NamedTuple

from perdure.codec.builder import build
from perdure.codec.compare import difference
from perdure.codec.conversion import convert_foreign
from perdure.codec.declared import NO_TYPES, DeclaredTypes
from perdure.codec.reader import split_tag, untag
from perdure.codec.tags import MAX_DEPTH, JSONValue, is_plain, is_shallow
from perdure.codec.writer import Form, Loss, Writer
from perdure.errors import CodecError

TOO_DEEP = "nested too deeply for the remaining Python stack"


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
    the value is nested more than `MAX_DEPTH` deep, or contains a coroutine.
    """
    try:
        if is_plain(value):
            return Prepared(value, value, False, ())
        prepared = _prepare_rich(value, returns, root, types)
    except RecursionError:
        raise CodecError(TOO_DEEP, root) from None
    for loss in prepared.losses:
        if loss.cls is CoroutineType:
            raise CodecError("it contains a coroutine: an `await` is missing", loss.path)
    return prepared


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
            return data if is_plain(data) else untag(check_shallow(data), "value")
        if returns is None and split_tag(data)[0] != "declared":
            raise CodecError(
                "a type is needed to restore the value; annotate the step, or pass returns="
            )
        return build(check_shallow(data), returns, "value", types)
    except RecursionError:
        raise CodecError(TOO_DEEP, "value") from None


def check_shallow(data: JSONValue) -> JSONValue:
    """Return stored data, or raise `CodecError` if it is nested too deeply."""
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
        raise CodecError(TOO_DEEP, "value") from None
    except Exception as error:
        raise CodecError(f"the type cannot be used: {error!r}", "value") from error
