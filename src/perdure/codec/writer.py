"""Write any value as JSON with tags, and collect the parts that cannot be restored."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timezone
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.codec.classes import ClassInfo, attributes_of, class_info, dump_field
from perdure.codec.declared import NO_TYPES, DeclaredTypes
from perdure.codec.exceptions import cause_of, members_of, safe_text
from perdure.codec.scope import NOWHERE, full_name, is_known, name_of
from perdure.codec.tags import (
    LEAF_BY_TYPE,
    MAX_DEPTH,
    VERSION,
    ForeignZone,
    JSONValue,
    Tag,
    is_clean,
    is_plain,
    is_shallow,
    is_tagged,
)
from perdure.errors import CodecError
from perdure.result import Err, Ok

# A list of a thousand objects without a type is one problem, not a thousand warnings.
_MAX_LOSSES = 20

# An object without declared fields may reference the whole program, so only part of it is written.
_MAX_UNDECLARED = 100
_MAX_UNDECLARED_DEPTH = 8

_HEAP_TYPE = 1 << 9

sorted_json = msgspec.json.Encoder(order="deterministic").encode


Reason: TypeAlias = Literal["non-json", "circular", "encode-failed"]


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a value that cannot be restored: its path and, if known, its class.

    A path looks like `value.user.tags[3]`.
    """

    path: str
    reason: Reason
    cls: type | None = field(default=None, compare=False)


class Form(Enum):
    """How to write an object that cannot be restored without its class."""

    FIELDS = "as its fields: the return type names the class"
    NAMED = "as its fields and the name of its class, for a return type with alternatives"
    DECLARED = (
        "as its fields and the full name of its class, if the class is declared; otherwise as lost"
    )
    LOST = "as its fields, with a loss: there is no return type"
    FINGERPRINT = "as named, but objects without fields only as their class"


class Writer:
    """Writes one value; afterwards `losses` and `typed` describe what it contained."""

    def __init__(self, form: Form, types: DeclaredTypes = NO_TYPES) -> None:
        self.form = form
        self._types = types
        self.losses: list[Loss] = []
        self.loss_count = 0
        self.typed = False
        self._open: set[int] = set()
        self._undeclared_count = 0
        self._undeclared_depth = 0
        self._hashed = 0

    def write_root(self, value: object, root: str) -> JSONValue:
        """Return a value as JSON with tags, or raise `CodecError` if it is nested too deeply."""
        data = self.write(value, root)
        if self.form in (Form.NAMED, Form.DECLARED):
            data = {f"~{self.form.name.lower()}": data}
        if not is_shallow(data):
            raise CodecError(f"nested more than {MAX_DEPTH} levels of JSON deep", root)
        return data

    def write(self, value: object, path: str) -> JSONValue:
        """Return a part of the value as JSON with tags."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        try:
            if leaf := LEAF_BY_TYPE.get(kind):
                return self._leaf(value, leaf, path)
            if id(value) in self._open:
                return self._lose(value, path, "circular")
            if len(self._open) >= MAX_DEPTH:
                raise CodecError(f"nested more than {MAX_DEPTH} levels deep", _shortened(path))
            self._open.add(id(value))
            try:
                return _CONTAINERS.get(kind, Writer._object)(self, value, path)
            finally:
                self._open.discard(id(value))
        except (CodecError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - reading attributes runs the user's code
            return self._lose(value, path, "encode-failed")

    def report(self, value: object, path: str, reason: Reason = "non-json") -> None:
        """Collect a loss: one per path, and only the first few of a value."""
        self.loss_count += 1
        if len(self.losses) < _MAX_LOSSES and all(loss.path != path for loss in self.losses):
            self.losses.append(Loss(path, reason, type(value)))

    def _lose(self, value: object, path: str, reason: Reason) -> JSONValue:
        self.report(value, path, reason)
        return {"~type": full_name(type(value))} if self.form is Form.FINGERPRINT else None

    def _leaf(self, value: Any, leaf: Tag, path: str) -> JSONValue:
        if leaf.bare(value):
            return value
        try:
            return {"~" + leaf.name: leaf.write(value)}
        except ForeignZone:
            self.report(value, path)
            offset = value.utcoffset()
            fixed_zone = None if offset is None else timezone(offset)
            return {"~" + leaf.name: leaf.write(value.replace(tzinfo=fixed_zone))}

    def _list(self, value: list[object], path: str) -> JSONValue:
        return [self.write(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _tuple(self, value: tuple[object, ...], path: str) -> JSONValue:
        return {"~tuple": [self.write(item, f"{path}[{i}]") for i, item in enumerate(value)]}

    def _set(self, value: set[object] | frozenset[object], path: str) -> JSONValue:
        self._hashed += 1
        items = [self.write(item, f"{path}[{index}]") for index, item in enumerate(value)]
        self._hashed -= 1
        # A set has no order, but must be written as the same bytes in every process.
        return {"~" + type(value).__name__: sorted(items, key=sorted_json)}

    def _dict(self, value: dict[Any, object], path: str) -> JSONValue:
        if not all(type(key) is str and is_clean(key) for key in value):
            return self._map(value, path)
        data = {key: self.write(item, _child(path, key)) for key, item in value.items()}
        return {"~": data} if is_tagged(data) else data

    def _map(self, value: dict[Any, object], path: str) -> JSONValue:
        pairs: list[JSONValue] = []
        for index, (key, item) in enumerate(value.items()):
            self._hashed += 1
            key_data = self.write(key, f"{path}.keys[{index}]")
            self._hashed -= 1
            pairs.append([key_data, self.write(item, _child(path, key))])
        return {"~map": sorted(pairs, key=sorted_json) if self.form is Form.FINGERPRINT else pairs}

    def _object(self, value: Any, path: str) -> JSONValue:
        kind = type(value)
        if issubclass(kind, Enum):
            return self._classed(value, self.write(value._value_, path), path)
        if info := class_info(kind):
            return self._fields(value, info, path)
        if issubclass(kind, BaseException):
            return self._error(value, path)
        for base, exact in _EXACT:
            if issubclass(kind, base):
                self.report(value, path)
                unhashable = self._hashed and base in _UNHASHABLE
                return safe_text(value) if unhashable else self.write(exact(value), path)
        return self._undeclared(value, path)

    def _ok(self, value: Ok[object], path: str) -> JSONValue:
        return {"~ok": self.write(value.value, f"{path}.value")}

    def _err(self, value: Err[object], path: str) -> JSONValue:
        data = {"error": self.write(value.error, f"{path}.error")}
        if value.cause is not None:
            data["cause"] = self.write(value.cause, f"{path}.cause")
        return {"~err": data}

    def _form_of(self, value: object) -> Form:
        is_undeclared = self.form is Form.DECLARED and type(value) not in self._types
        return Form.LOST if is_undeclared else self.form

    def _classed(self, value: object, data: JSONValue, path: str) -> JSONValue:
        match self._form_of(value):
            case Form.FIELDS:
                self.typed = True
                return data
            case Form.NAMED:
                self.typed = True
                return {"~record": [type(value).__name__, data]}
            case Form.DECLARED:
                self.typed = True
                return {"~record": [full_name(type(value)), data]}
            case Form.FINGERPRINT:
                return {"~record": [full_name(type(value)), data]}
            case Form.LOST:
                self.report(value, path)
                return safe_text(value) if self._hashed and type(data) in (dict, list) else data

    def _fields(self, value: object, info: ClassInfo, path: str) -> JSONValue:
        data: dict[str, JSONValue] = {}
        for name, item in info.read(value).items():
            count, known_losses = self.loss_count, len(self.losses)
            data[name] = self.write(item, _child(path, name))
            # pydantic can often serialize its own types (a URL, a secret) itself.
            if info.model and self.loss_count > count and self._form_of(value) is not Form.LOST:
                plain_value = dump_field(value, name)
                if is_plain(plain_value):
                    data[name] = {"~dumped": plain_value}
                    self.loss_count = count
                    del self.losses[known_losses:]
        is_escaped = VERSION in data or is_tagged(data)
        return self._classed(value, {"~": data} if is_escaped else data, path)

    def _error(self, error: BaseException, path: str) -> JSONValue:
        if self.form is Form.FINGERPRINT:
            return {"~error": [name_of(type(error)), safe_text(error)]}

        def write(value: object) -> tuple[JSONValue, bool]:
            loss_count = self.loss_count
            return self._untyped(value, f"{path}.args"), self.loss_count == loss_count

        cause = cause_of(error, write, NOWHERE)
        if not is_known(type(error)):
            self.typed = True
            if self.form in (Form.LOST, Form.DECLARED):
                self.report(error, path)
        # An annotation names the class of a group, but not the classes of its members.
        if not all(is_known(type(member)) for member in members_of(error)):
            self.report(error, path)
        return {"~error": cause}

    def _untyped(self, value: object, path: str) -> JSONValue:
        form, self.form = self.form, Form.LOST
        try:
            return self.write(value, path)
        finally:
            self.form = form

    def _undeclared(self, value: object, path: str) -> JSONValue:
        if (
            self._undeclared_count >= _MAX_UNDECLARED
            or self._undeclared_depth >= _MAX_UNDECLARED_DEPTH
        ):
            return self._lose(value, path, "non-json")
        if self.form is Form.FINGERPRINT or not _is_data(value):
            return self._lose(value, path, "non-json")
        self.report(value, path)
        if self._hashed:
            return safe_text(value)
        attributes = attributes_of(value)
        self._undeclared_count += 1
        self._undeclared_depth += 1
        data = self.write(attributes, path)
        self._undeclared_depth -= 1
        return data


_CONTAINERS: dict[type, Callable[[Writer, Any, str], JSONValue]] = {
    list: Writer._list,
    tuple: Writer._tuple,
    set: Writer._set,
    frozenset: Writer._set,
    dict: Writer._dict,
    Ok: Writer._ok,
    Err: Writer._err,
}

# Through methods of the base class, because those of a subclass may do anything.
_EXACT: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (bytes, lambda value: bytes(memoryview(value))),
    (bytearray, lambda value: bytearray(memoryview(value))),
    (memoryview, bytes),
    (OrderedDict, lambda value: dict(OrderedDict.items(value))),
    (dict, lambda value: dict(dict.items(value))),
    (MappingProxyType, dict),
    (list, list.copy),
    (deque, lambda value: list(deque.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (datetime, lambda value: datetime.combine(datetime.date(value), datetime.timetz(value))),
    (date, lambda value: date.fromordinal(date.toordinal(value))),
    (time, lambda value: datetime.combine(date.min, value).timetz()),
)

_UNHASHABLE = (bytearray, OrderedDict, dict, MappingProxyType, list, deque, set)


def _is_data(value: object) -> bool:
    """Return whether an object is an instance of a Python class and not callable."""
    kind = type(value)
    bases = kind.__mro__
    open_ended = any("__dict__" in vars(base) or "__slots__" in vars(base) for base in bases)
    return bool(kind.__flags__ & _HEAP_TYPE) and open_ended and not callable(value)


def _child(path: str, key: object) -> str:
    if type(key) is str and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{key!r}]" if is_plain(key, room=0) else f"{path}[<{type(key).__name__}>]"


def _shortened(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:80]}…{path[-30:]}"
