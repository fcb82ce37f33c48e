"""Restore values from stored JSON, building instances of the classes that an annotation names.

The annotation is used only to find classes. It is not enforced for plain values: Python did not
enforce it when the step ran, and the function must see the same value again.
"""

import collections.abc
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias, get_args, get_origin, is_typeddict

from perdure.codec.annotations import strip_annotation, substitute, union_members, variables_of
from perdure.codec.classes import ClassInfo, class_info, hints_of, load_field
from perdure.codec.declared import NO_TYPES, DeclaredTypes
from perdure.codec.exceptions import restore, safe_text
from perdure.codec.reader import collect, dict_of, list_of, pair_of, split_tag, untag
from perdure.codec.scope import ErrorScope, name_of
from perdure.codec.tags import LEAF_BY_NAME, VERSION, JSONValue
from perdure.errors import CodecError
from perdure.result import Err, Ok

# Nested unions multiply the alternatives: without a limit, hostile data could take forever.
_MAX_GUESSES = 1000


class Builder:
    """Builds one value. With `named`, each object in the data has the name of its class."""

    def __init__(self, named: bool = False) -> None:
        self.named = named
        self._guesses = 0

    def build(self, data: JSONValue, annotation: Any, path: str) -> Any:
        """Build a value from the data, with the classes that the annotation names."""
        return _plan_of(annotation)(self, data, path)

    def guess(self, data: JSONValue, members: tuple[Any, ...], path: str) -> Any:
        """Build a value as the first member of a union that fits the data."""
        for exact in (True, False):
            for member in members:
                if not _fits(data, strip_annotation(member), self.named, exact):
                    continue
                try:
                    return _plan_of(member)(self, data, path)
                except CodecError:
                    self._guesses += 1
                    if self._guesses > _MAX_GUESSES:
                        raise
        return untag(data, path)


class DeclaredBuilder(Builder):
    """Builds a value from data with the full names of its classes, without annotations."""

    def __init__(self, types: DeclaredTypes) -> None:
        super().__init__(named=True)
        self._types = types

    def build(self, data: JSONValue, annotation: Any, path: str) -> Any:
        """Build a value from the data, with the declared classes that it names."""
        tag, payload = split_tag(data)
        if tag == "record":
            name, content = pair_of(payload, path)
            cls = self._types.find(name, path)
            return _plan_of(cls)(self, {"~record": [cls.__name__, content]}, path)
        if tag in ("ok", "err"):
            return _result(Any)(self, data, path)
        is_mapping = tag in ("", "map") or (tag is None and type(payload) is dict)
        plan = _mapping(Any, Any) if is_mapping else _elements((Any,), is_uniform=True)
        return plan(self, data, path)


def _fits(data: JSONValue, member: Any, is_named: bool, exact: bool) -> bool:
    """Return whether data may belong to this member of a union, judging by the outermost level."""
    tag, payload = split_tag(data)
    cls = get_origin(member) or member
    if not isinstance(cls, type):
        return cls is Any or cls is Literal
    if tag == "record":
        return bool(cls.__name__ == pair_of(payload, "")[0])
    if issubclass(cls, BaseException):
        return tag == "error" and type(payload) is dict and payload.get("name") == name_of(cls)
    if issubclass(cls, Enum):
        return not is_named and _is_value(cls, data)
    stored_type = _stored_type(tag, payload)
    if info := class_info(cls) if cls not in (Ok, Err) else None:
        return not is_named and stored_type is dict and _has_fields(info, payload, exact)
    if is_typeddict(cls):
        return stored_type is dict
    return _is_kind(stored_type, cls) or (stored_type is int and cls is float)


def _is_kind(stored_type: type, cls: type) -> bool:
    try:
        return issubclass(stored_type, cls)
    except TypeError:  # the protocol cannot be checked at run time
        return False


def _is_value(cls: type[Enum], data: JSONValue) -> bool:
    try:
        return untag(data, "") in cls._value2member_map_ or issubclass(cls, Flag)
    except TypeError:  # an unhashable value is compared with each member
        return True


def _has_fields(info: ClassInfo, payload: JSONValue, exact: bool) -> bool:
    if type(payload) is not dict:
        return False
    return payload.keys() == set(info.names) if exact else payload.keys() >= info.required


_STORED_TYPES: Mapping[str | None, type] = {
    "": dict,
    "map": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "ok": Ok,
    "err": Err,
}


def _stored_type(tag: str | None, payload: JSONValue) -> type:
    if tag is None:
        return type(payload)
    leaf = LEAF_BY_NAME.get(tag)
    return leaf.type if leaf else _STORED_TYPES.get(tag, object)


Plan: TypeAlias = Callable[[Builder, JSONValue, str], Any]


def build(data: JSONValue, annotation: Any, path: str, types: DeclaredTypes = NO_TYPES) -> Any:
    """Build a value from stored JSON, with the classes that the annotation names.

    If the value was stored with the names of declared classes, those are used.
    """
    tag, payload = split_tag(data)
    try:
        if tag == "declared":
            return DeclaredBuilder(types).build(payload, annotation, path)
        is_named = tag == "named"
        return Builder(is_named).build(payload if is_named else data, annotation, path)
    except (CodecError, RecursionError):
        raise
    except Exception as error:
        raise CodecError(f"unusable type {safe_text(annotation)}: {error!r}") from error


def _plan_of(annotation: Any) -> Plan:
    try:
        return _plan(annotation)
    except TypeError:  # an unhashable annotation
        return _plan.__wrapped__(annotation)


@lru_cache(maxsize=2048)
def _plan(annotation: Any) -> Plan:
    meaning = strip_annotation(annotation)
    origin, arguments = get_origin(meaning), get_args(meaning)
    if origin is Literal:
        return _literal(arguments)
    members = union_members(meaning)
    if len(members) > 1:
        return lambda builder, data, path: builder.guess(data, members, path)
    cls = origin or meaning
    if not isinstance(cls, type):
        return _as_stored
    return _class_plan(cls, meaning, arguments)


def _class_plan(cls: type, meaning: Any, arguments: tuple[Any, ...]) -> Plan:
    if cls is Ok or cls is Err:
        return _result(arguments[0] if arguments else Any)
    if issubclass(cls, Enum):
        return _enum(cls)
    if issubclass(cls, BaseException):
        return _exception(cls)
    if is_typeddict(cls):
        return _typed_dict(cls, meaning)
    if info := class_info(cls):
        return _class_with_fields(cls, info, meaning)
    if issubclass(cls, tuple) and arguments and arguments[-1] is not Ellipsis:
        return _elements(arguments)
    if issubclass(cls, collections.abc.Mapping) and len(arguments) == 2:
        return _mapping(*arguments)
    if issubclass(cls, collections.abc.Iterable) and arguments:
        return _elements((arguments[0],), is_uniform=True)
    return _as_stored


def _as_stored(builder: Builder, data: JSONValue, path: str) -> Any:
    return untag(data, path)


def _literal(values: tuple[Any, ...]) -> Plan:
    members = [value for value in values if isinstance(value, Enum)]

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        value = untag(data, path)
        if builder.named and split_tag(data)[0] != "record":
            return value
        return next((member for member in members if member.value == value), value)

    return plan if members else _as_stored


_COLLECTIONS: Mapping[str | None, Callable[[list[Any]], Any]] = {
    None: list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _elements(types: tuple[Any, ...], is_uniform: bool = False) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = split_tag(data)
        if tag not in _COLLECTIONS or type(payload) is not list:
            return untag(data, path)
        annotations = repeat(types[0]) if is_uniform else chain(types, repeat(Any))
        items = [
            builder.build(item, annotation, f"{path}[{index}]")
            for index, (item, annotation) in enumerate(zip(payload, annotations, strict=False))
        ]
        return collect(_COLLECTIONS[tag], items, path)

    return plan


def _mapping(key_type: Any, item_type: Any) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = split_tag(data)
        if tag == "map":
            pairs = [pair_of(pair, path) for pair in list_of(payload, path)]
        elif tag in (None, "") and type(payload) is dict:
            pairs = [[key, item] for key, item in payload.items()]
        else:
            return untag(data, path)
        items = [
            (builder.build(key, key_type, path), builder.build(item, item_type, f"{path}.{key}"))
            for key, item in pairs
        ]
        return collect(dict, items, path)

    return plan


def _result(content_type: Any) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = split_tag(data)
        if tag == "ok":
            return Ok(builder.build(payload, content_type, f"{path}.value"))
        if tag == "err" and "error" in dict_of(payload, path):
            cause = untag(payload["cause"], path) if "cause" in payload else None
            return Err(builder.build(payload["error"], content_type, f"{path}.error"), cause)
        return untag(data, path)

    return plan


def _open_class(builder: Builder, cls: type, data: JSONValue, path: str) -> tuple[bool, JSONValue]:
    """Return whether the data represents an instance of the class, and the data inside it."""
    tag, payload = split_tag(data)
    if not builder.named:
        return True, data
    if tag != "record":
        return False, data
    name, content = pair_of(payload, path)
    if name != cls.__name__:
        raise CodecError(f"expected {cls.__name__}, got {name}", path)
    return True, content


def _enum(cls: type[Enum]) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        is_instance, data = _open_class(builder, cls, data, path)
        content = untag(data, path)
        if not is_instance:
            return content
        try:
            return cls(content)
        except Exception as error:
            raise CodecError(f"{content!r} is not a {cls.__name__}", path) from error

    return plan


def _exception(cls: type[BaseException]) -> Plan:
    scope = ErrorScope((cls,))

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = split_tag(data)
        if tag != "error":
            return untag(data, path)
        return restore(payload, scope, lambda part: untag(part, path))

    return plan


def _typed_dict(cls: type, meaning: Any) -> Plan:
    variables = variables_of(meaning)
    types = {
        name: substitute(strip_annotation(hint), variables) for name, hint in hints_of(cls).items()
    }

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = split_tag(data)
        if tag not in (None, "") or type(payload) is not dict:
            return untag(data, path)
        return {
            key: builder.build(item, types.get(key, Any), f"{path}.{key}")
            for key, item in payload.items()
        }

    return plan


def _class_with_fields(cls: type, info: ClassInfo, meaning: Any) -> Plan:
    variables = variables_of(meaning)
    types = {
        name: substitute(strip_annotation(hint), variables) for name, hint in info.types.items()
    }

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        is_instance, content = _open_class(builder, cls, data, path)
        tag, payload = split_tag(content)
        if not is_instance or tag not in (None, "") or type(payload) is not dict:
            return untag(data, path)
        if tag is None and VERSION in payload:
            text = (
                f"{cls.__name__} has a version ({VERSION!r}); was this written by a newer perdure?"
            )
            raise CodecError(text, path)
        if missing := info.required - set(payload):
            raise CodecError(f"{cls.__name__}: field {min(missing)!r} is missing", path)
        values: dict[str, Any] = {}
        for name, item in payload.items():
            if info.model and split_tag(item)[0] == "dumped":
                values[name] = _load_field(cls, name, item, path)
            elif info.open or name in info.names:
                values[name] = builder.build(item, types.get(name, Any), f"{path}.{name}")
        try:
            return info.make(values)
        except Exception as error:
            raise CodecError(f"cannot create a {cls.__name__}: {error}", path) from error

    return plan


def _load_field(cls: type, name: str, data: JSONValue, path: str) -> Any:
    try:
        return load_field(cls, name, split_tag(data)[1])
    except Exception as error:
        raise CodecError(
            f"cannot restore {cls.__name__}.{name}: {error}", f"{path}.{name}"
        ) from error
