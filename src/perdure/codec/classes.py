"""Classes with named fields: how their instances come apart, and together again as they were.

Dataclasses, attrs classes, pydantic models, msgspec Structs and NamedTuples. No library is imported
for it: whoever holds an instance has done that.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

Values = dict[str, Any]
Default = Callable[[], object]

_UNSET = object()

# The slot in which attrs keeps a hash, once computed; it has to be there from the start.
_CACHED_HASH = "_attrs_cached_hash"


class Record(NamedTuple):
    """What the codec knows about one class with fields.

    `read` gives the fields that are set. `make` gives an instance from the values of its fields,
    with defaults for those that are missing; it runs the user's code and raises what that raises.
    `model`: it is pydantic's. `open`: it takes fields beside those that have names.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    types: Mapping[str, object]
    read: Callable[[Any], Values]
    make: Callable[[Values], object]
    model: bool = False
    open: bool = False


def record_of(cls: type) -> Record | None:
    """Give what is known about a class with fields, or None when it is no such class."""
    return _record_of(cls)


@lru_cache(maxsize=1024)
def _record_of(cls: type) -> Record | None:
    if issubclass(cls, BaseException):
        return None
    if dataclasses.is_dataclass(cls):
        return _dataclass(cls)
    if hasattr(cls, "__attrs_attrs__"):
        return _attrs(cls)
    if issubclass(cls, msgspec.Struct):
        return _struct(cls)
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return _named_tuple(cls)
    if hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_construct"):
        return _model(cls)
    return None


def hints_of(cls: type) -> dict[str, Any]:
    """Give the resolved annotations of a class; `Any` where a name cannot be resolved."""
    known = {cls.__name__: cls}
    try:
        return get_type_hints(cls, localns=known, include_extras=True)
    except Exception:  # noqa: BLE001 - annotations are the user's code, run here a second time
        return {name: _hint(cls, name, known) for name in _annotated(cls)}


def _annotated(cls: type) -> dict[str, type]:
    return {name: base for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)}


def _hint(cls: type, name: str, known: dict[str, Any]) -> Any:
    home = _annotated(cls)[name]
    alone = type(cls.__name__, (), {"__annotations__": {name: inspect.get_annotations(home)[name]}})
    names = vars(sys.modules.get(home.__module__, sys))
    try:
        return get_type_hints(alone, globalns=names, localns=known, include_extras=True)[name]
    except Exception:  # noqa: BLE001 - as above: what has no meaning here is left as it is
        return Any


def attributes_of(instance: object) -> Values:
    """Give what an instance of a Python class holds, in its `__dict__` and in slots."""
    found: Values = {}
    for base in reversed(type(instance).__mro__):
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
                found[name] = getattr(instance, name)
    if hasattr(instance, "__dict__"):
        found.update(vars(instance))
    return found


def derived_names(cls: type) -> frozenset[str]:
    """Give the names that instances compute by themselves and keep: cached properties."""
    return _derived_names(cls)


@lru_cache(maxsize=1024)
def _derived_names(cls: type) -> frozenset[str]:
    kept = (vars(base).items() for base in cls.__mro__)
    return frozenset(
        name for items in kept for name, found in items if isinstance(found, cached_property)
    )


def _read_set(names: tuple[str, ...]) -> Callable[[Any], Values]:
    def read(instance: Any) -> Values:
        found = ((name, getattr(instance, name, _UNSET)) for name in names)
        return {name: value for name, value in found if value is not _UNSET}

    return read


def _revive(cls: type, defaults: Mapping[str, Default], finish: str) -> Callable[[Values], object]:
    """Give a maker that sets fields without `__init__`, which may want other arguments.

    The class's own finishing touch is run, for it may derive what is no field; the fields are then
    set again, for it may change them, and has already done so.
    """

    touch = _finishing_touch(cls, finish)

    def make(values: Values) -> object:
        instance: Any = object.__new__(cls)
        _set_all(instance, {name: default() for name, default in defaults.items()} | values)
        if touch is not None:
            touch(instance)
            _set_all(instance, values)
        return instance

    return make


def _finishing_touch(cls: type, name: str) -> Callable[[Any], object] | None:
    touch = getattr(cls, name, None)
    # One that wants arguments (dataclasses' InitVar) cannot be run again: they are gone.
    return touch if touch and len(inspect.signature(touch).parameters) == 1 else None


def _set_all(instance: object, values: Values) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _constant(value: object) -> Default:
    return lambda: value


def _dataclass(cls: type) -> Record:
    fields = dataclasses.fields(cls)
    defaults: dict[str, Default] = {}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _constant(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory
    names = tuple(field.name for field in fields)
    required = frozenset(field.name for field in fields if field.init) - set(defaults)
    make = _revive(cls, defaults, "__post_init__")
    return Record(names, required, hints_of(cls), _read_set(names), make)


def _attrs(cls: Any) -> Record:
    fields = {field.name: field for field in cls.__attrs_attrs__}
    nothing = type(sys.modules["attr"].NOTHING)
    defaults: dict[str, Default] = {}
    optional: set[str] = set()
    for name, field in fields.items():
        factory = getattr(field.default, "factory", None)
        if not isinstance(field.default, nothing):
            optional.add(name)
            # A factory that wants the instance has none here: such a field must be in the record.
            if factory is None:
                defaults[name] = _constant(field.default)
            elif not field.default.takes_self:
                defaults[name] = factory
    if hasattr(cls, _CACHED_HASH):
        defaults[_CACHED_HASH] = _constant(None)
    names = tuple(fields)
    required = frozenset(name for name, field in fields.items() if field.init) - optional
    make = _revive(cls, defaults, "__attrs_post_init__")
    return Record(names, required, hints_of(cls), _read_set(names), make)


def _struct(cls: type[msgspec.Struct]) -> Record:
    fields = msgspec.structs.fields(cls)
    names = tuple(field.name for field in fields)
    required = frozenset(field.name for field in fields if field.required)

    def read(instance: Any) -> Values:
        found = _read_set(names)(instance)
        return {name: value for name, value in found.items() if value is not msgspec.UNSET}

    def make(values: Values) -> object:
        return cls(**values)

    return Record(names, required, hints_of(cls), read, make)


def _named_tuple(cls: Any) -> Record:
    names: tuple[str, ...] = cls._fields
    defaults: dict[str, object] = cls._field_defaults

    def read(instance: Any) -> Values:
        return dict(zip(names, tuple.__iter__(instance), strict=True))

    def make(values: Values) -> object:
        whole = defaults | values
        return tuple.__new__(cls, [whole[name] for name in names])

    return Record(names, frozenset(names) - set(defaults), hints_of(cls), read, make)


def _model(cls: Any) -> Record:
    fields: dict[str, Any] = cls.model_fields
    names = tuple(fields)

    def read(instance: Any) -> Values:
        state = vars(instance)
        found = {name: state[name] for name in names if name in state}
        return found | (instance.__pydantic_extra__ or {})

    def make(values: Values) -> object:
        # Validators ran once and need not take their own output: a text they split is a list now.
        return cls.model_construct(_fields_set=set(values), **values)

    required = frozenset(name for name, field in fields.items() if field.is_required())
    types = {name: field.annotation for name, field in fields.items()}
    takes_more = cls.model_config.get("extra") == "allow"
    return Record(names, required, types, read, make, model=True, open=takes_more)


def dumped(model: Any, name: str) -> object:
    """Give one field of a pydantic model in the JSON form of its own making."""
    return model.model_dump(mode="json", round_trip=True, include={name})[name]


@lru_cache(maxsize=256)
def _adapter(cls: Any, name: str) -> Any:
    return sys.modules["pydantic"].TypeAdapter(cls.model_fields[name].annotation)


def undumped(cls: type, name: str, data: object) -> object:
    """Give back a field of a pydantic model from its own JSON form."""
    return _adapter(cls, name).validate_python(data)
