"""Stored JSON as a given type: where the annotation names a class, its instance is put back.

An annotation is believed only as far as it says where classes are. What it says about plain values
is not enforced: Python did not do so when the step ran, and the function is to see the same again.
"""

import collections.abc
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias, get_args, get_origin, is_typeddict

from perdure.codec.annotations import bare, filled, union_members, variables_of
from perdure.codec.classes import Record, hints_of, record_of, undumped
from perdure.codec.exceptions import name_of, restored, safe_text
from perdure.codec.reader import dict_of, gathered, list_of, opened, pair_of, untag
from perdure.codec.tags import LEAF_BY_NAME, JSONValue
from perdure.errors import CodecError
from perdure.result import Err, Ok

# Alternatives inside alternatives could be tried for ever; no honest value needs so many guesses.
_MAX_GUESSES = 1000


class Builder:
    """Builds one value. `named`: each object in the data says which annotated class it was."""

    def __init__(self, named: bool = False) -> None:
        self.named = named
        self._guesses = 0

    def build(self, data: JSONValue, annotation: Any, path: str) -> Any:
        """Give the value that the data stand for, as the annotation says."""
        return _plan_of(annotation)(self, data, path)

    def guess(self, data: JSONValue, members: tuple[Any, ...], path: str) -> Any:
        """Give the value by the first member of a union that the data fit."""
        for exact in (True, False):
            for member in members:
                if not _fits(data, bare(member), self.named, exact):
                    continue
                try:
                    return _plan_of(member)(self, data, path)
                except CodecError:
                    self._guesses += 1
                    if self._guesses > _MAX_GUESSES:
                        raise
        return untag(data, path)


def _fits(data: JSONValue, member: Any, named: bool, exact: bool) -> bool:
    """Say whether data may be meant for a member of a union, as far as one look can tell."""
    tag, payload = opened(data)
    cls = get_origin(member) or member
    if not isinstance(cls, type):
        return cls is Any or cls is Literal
    if tag == "record":
        return bool(cls.__name__ == pair_of(payload, "")[0])
    if issubclass(cls, BaseException):
        return tag == "error" and type(payload) is dict and payload.get("name") == name_of(cls)
    if issubclass(cls, Enum):
        return not named and _is_value(cls, data)
    stored = _stored_type(tag, payload)
    if record := record_of(cls) if cls not in (Ok, Err) else None:
        return not named and stored is dict and _has_fields(record, payload, exact)
    if is_typeddict(cls):
        return stored is dict
    return _is_kind(stored, cls) or (stored is int and cls is float)


def _is_kind(stored: type, cls: type) -> bool:
    try:
        return issubclass(stored, cls)
    except TypeError:  # a protocol that says nothing at run time
        return False


def _is_value(cls: type[Enum], data: JSONValue) -> bool:
    try:
        return untag(data, "") in cls._value2member_map_ or issubclass(cls, Flag)
    except TypeError:  # a value that cannot be hashed is compared with each member
        return True


def _has_fields(record: Record, payload: JSONValue, exact: bool) -> bool:
    if type(payload) is not dict:
        return False
    return payload.keys() == set(record.names) if exact else payload.keys() >= record.required


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


def build(data: JSONValue, annotation: Any, path: str) -> Any:
    """Give the value that stored JSON stands for, with the classes that the annotation names."""
    tag, payload = opened(data)
    named = tag == "named"
    try:
        return Builder(named).build(payload if named else data, annotation, path)
    except (CodecError, RecursionError):
        raise
    except Exception as error:
        raise CodecError(f"the type {safe_text(annotation)} cannot be used: {error!r}") from error


def _plan_of(annotation: Any) -> Plan:
    try:
        return _plan(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return _plan.__wrapped__(annotation)


@lru_cache(maxsize=2048)
def _plan(annotation: Any) -> Plan:
    meaning = bare(annotation)
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
    if record := record_of(cls):
        return _record(cls, record, meaning)
    if issubclass(cls, tuple) and arguments and arguments[-1] is not Ellipsis:
        return _elements(arguments)
    if issubclass(cls, collections.abc.Mapping) and len(arguments) == 2:
        return _mapping(*arguments)
    if issubclass(cls, collections.abc.Iterable) and arguments:
        return _elements((arguments[0],), alike=True)
    return _as_stored


def _as_stored(builder: Builder, data: JSONValue, path: str) -> Any:
    return untag(data, path)


def _literal(values: tuple[Any, ...]) -> Plan:
    members = [each for each in values if isinstance(each, Enum)]

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        held = untag(data, path)
        if builder.named and opened(data)[0] != "record":
            return held
        return next((each for each in members if each.value == held), held)

    return plan if members else _as_stored


_GATHERERS: Mapping[str | None, Callable[[list[Any]], Any]] = {
    None: list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _elements(types: tuple[Any, ...], alike: bool = False) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = opened(data)
        if tag not in _GATHERERS or type(payload) is not list:
            return untag(data, path)
        each = repeat(types[0]) if alike else chain(types, repeat(Any))
        items = [
            builder.build(item, annotation, f"{path}[{place}]")
            for place, (item, annotation) in enumerate(zip(payload, each, strict=False))
        ]
        return gathered(_GATHERERS[tag], items, path)

    return plan


def _mapping(key_type: Any, item_type: Any) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = opened(data)
        if tag == "map":
            pairs = [pair_of(pair, path) for pair in list_of(payload, path)]
        elif tag in (None, "") and type(payload) is dict:
            pairs = [[key, item] for key, item in payload.items()]
        else:
            return untag(data, path)
        built = [
            (builder.build(key, key_type, path), builder.build(item, item_type, f"{path}.{key}"))
            for key, item in pairs
        ]
        return gathered(dict, built, path)

    return plan


def _result(held: Any) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = opened(data)
        if tag == "ok":
            return Ok(builder.build(payload, held, f"{path}.value"))
        if tag == "err" and "error" in dict_of(payload, path):
            cause = untag(payload["cause"], path) if "cause" in payload else None
            return Err(builder.build(payload["error"], held, f"{path}.error"), cause)
        return untag(data, path)

    return plan


def _classed(builder: Builder, cls: type, data: JSONValue, path: str) -> tuple[bool, JSONValue]:
    """Say whether data are meant as an instance of the class, and give what it was written as."""
    tag, payload = opened(data)
    if not builder.named:
        return True, data
    if tag != "record":
        return False, data
    name, held = pair_of(payload, path)
    if name != cls.__name__:
        raise CodecError(f"a {name} where the type says {cls.__name__}", path)
    return True, held


def _enum(cls: type[Enum]) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        meant, data = _classed(builder, cls, data, path)
        held = untag(data, path)
        if not meant:
            return held
        try:
            return cls(held)
        except Exception as error:
            raise CodecError(f"{held!r} is no {cls.__name__}", path) from error

    return plan


def _exception(cls: type[BaseException]) -> Plan:
    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = opened(data)
        if tag != "error":
            return untag(data, path)
        return restored(payload, (cls,), lambda part: untag(part, path))

    return plan


def _typed_dict(cls: type, meaning: Any) -> Plan:
    variables = variables_of(meaning)
    types = {name: filled(bare(hint), variables) for name, hint in hints_of(cls).items()}

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        tag, payload = opened(data)
        if tag not in (None, "") or type(payload) is not dict:
            return untag(data, path)
        return {
            key: builder.build(item, types.get(key, Any), f"{path}.{key}")
            for key, item in payload.items()
        }

    return plan


def _record(cls: type, record: Record, meaning: Any) -> Plan:
    variables = variables_of(meaning)
    types = {name: filled(bare(hint), variables) for name, hint in record.types.items()}

    def plan(builder: Builder, data: JSONValue, path: str) -> Any:
        meant, held = _classed(builder, cls, data, path)
        tag, payload = opened(held)
        if not meant or tag not in (None, "") or type(payload) is not dict:
            return untag(data, path)
        if missing := record.required - set(payload):
            raise CodecError(f"{cls.__name__} without its field {min(missing)!r}", path)
        values: dict[str, Any] = {}
        for name, item in payload.items():
            if record.model and opened(item)[0] == "dumped":
                values[name] = _undumped(cls, name, item, path)
            elif record.open or name in record.names:
                values[name] = builder.build(item, types.get(name, Any), f"{path}.{name}")
        try:
            return record.make(values)
        except Exception as error:
            raise CodecError(f"no {cls.__name__} can be made of this: {error}", path) from error

    return plan


def _undumped(cls: type, name: str, data: JSONValue, path: str) -> Any:
    try:
        return undumped(cls, name, opened(data)[1])
    except Exception as error:
        raise CodecError(f"no {name} of {cls.__name__}: {error}", f"{path}.{name}") from error
