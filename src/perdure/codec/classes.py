"""Classes with named fields: read the fields of an instance, and create instances.

Dataclasses, attrs classes, pydantic models, msgspec Structs and NamedTuples are supported. attrs
and pydantic are not imported here: if there is an instance, its library is already loaded.
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

# The attribute in which attrs caches the hash; generated code expects it to exist.
_CACHED_HASH = "_attrs_cached_hash"


class ClassInfo(NamedTuple):
    """What the codec knows about a class with fields.

    `read` returns the fields that are set. `make` creates an instance from field values, with
    defaults for missing fields; it runs the user's code, which may raise. `model` marks a pydantic
    model, `open` a class that accepts undeclared fields.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    types: Mapping[str, object]
    read: Callable[[Any], Values]
    make: Callable[[Values], object]
    model: bool = False
    open: bool = False


def class_info(cls: type) -> ClassInfo | None:
    """Return what is known about a class with fields, or `None` for any other class."""
    return _class_info(cls)


@lru_cache(maxsize=1024)
def _class_info(cls: type) -> ClassInfo | None:
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
    """Return the resolved annotations of a class; `Any` where a name cannot be resolved."""
    namespace = {cls.__name__: cls}
    try:
        return get_type_hints(cls, localns=namespace, include_extras=True)
    except Exception:  # noqa: BLE001 - annotations are the user's code, evaluated here a second time
        return {name: _hint(cls, name, namespace) for name in _annotated(cls)}


def _annotated(cls: type) -> dict[str, type]:
    return {name: base for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)}


def _hint(cls: type, name: str, namespace: dict[str, Any]) -> Any:
    base = _annotated(cls)[name]
    holder = type(
        cls.__name__, (), {"__annotations__": {name: inspect.get_annotations(base)[name]}}
    )
    names = vars(sys.modules.get(base.__module__, sys))
    try:
        return get_type_hints(holder, globalns=names, localns=namespace, include_extras=True)[name]
    except Exception:  # noqa: BLE001 - as above; ignore what cannot be resolved
        return Any


def attributes_of(instance: object) -> Values:
    """Return the attributes of an instance, from its `__dict__` and its slots."""
    attributes: Values = {}
    for base in reversed(type(instance).__mro__):
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
                attributes[name] = getattr(instance, name)
    if hasattr(instance, "__dict__"):
        attributes.update(vars(instance))
    return attributes


def derived_names(cls: type) -> frozenset[str]:
    """Return the names of cached properties, which instances compute themselves."""
    return _derived_names(cls)


@lru_cache(maxsize=1024)
def _derived_names(cls: type) -> frozenset[str]:
    return frozenset(
        name
        for base in cls.__mro__
        for name, attribute in vars(base).items()
        if isinstance(attribute, cached_property)
    )


def _read_set(names: tuple[str, ...]) -> Callable[[Any], Values]:
    def read(instance: Any) -> Values:
        values = ((name, getattr(instance, name, _UNSET)) for name in names)
        return {name: value for name, value in values if value is not _UNSET}

    return read


def _maker(cls: type, defaults: Mapping[str, Default], hook: str) -> Callable[[Values], object]:
    """Return a function that creates an instance without `__init__`.

    `__init__` may take other arguments than the fields.

    It runs the class's post-init hook, because that may set attributes that are not fields. Then it
    sets the fields again: the hook may change fields, and the stored values already include such
    changes.
    """

    post_init = _post_init(cls, hook)

    def make(values: Values) -> object:
        instance: Any = object.__new__(cls)
        _set_all(instance, {name: default() for name, default in defaults.items()} | values)
        if post_init is not None:
            post_init(instance)
            _set_all(instance, values)
        return instance

    return make


def _post_init(cls: type, name: str) -> Callable[[Any], object] | None:
    hook = getattr(cls, name, None)
    # A hook with arguments (dataclasses' InitVar) cannot run again: the arguments are not stored.
    return hook if hook and len(inspect.signature(hook).parameters) == 1 else None


def _set_all(instance: object, values: Values) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _constant(value: object) -> Default:
    return lambda: value


def _dataclass(cls: type) -> ClassInfo:
    fields = dataclasses.fields(cls)
    defaults: dict[str, Default] = {}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _constant(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory
    names = tuple(field.name for field in fields)
    required = frozenset(field.name for field in fields if field.init) - set(defaults)
    make = _maker(cls, defaults, "__post_init__")
    return ClassInfo(names, required, hints_of(cls), _read_set(names), make)


def _attrs(cls: Any) -> ClassInfo:
    fields = {field.name: field for field in cls.__attrs_attrs__}
    nothing_type = type(sys.modules["attr"].NOTHING)
    defaults: dict[str, Default] = {}
    optional: set[str] = set()
    for name, field in fields.items():
        factory = getattr(field.default, "factory", None)
        if not isinstance(field.default, nothing_type):
            optional.add(name)
            # The factory takes the instance, which does not exist yet, so the field must be in the
            # data.
            if factory is None:
                defaults[name] = _constant(field.default)
            elif not field.default.takes_self:
                defaults[name] = factory
    if hasattr(cls, _CACHED_HASH):
        defaults[_CACHED_HASH] = _constant(None)
    names = tuple(fields)
    required = frozenset(name for name, field in fields.items() if field.init) - optional
    make = _maker(cls, defaults, "__attrs_post_init__")
    return ClassInfo(names, required, hints_of(cls), _read_set(names), make)


def _struct(cls: type[msgspec.Struct]) -> ClassInfo:
    fields = msgspec.structs.fields(cls)
    names = tuple(field.name for field in fields)
    required = frozenset(field.name for field in fields if field.required)

    def read(instance: Any) -> Values:
        values = _read_set(names)(instance)
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}

    def make(values: Values) -> object:
        return cls(**values)

    return ClassInfo(names, required, hints_of(cls), read, make)


def _named_tuple(cls: Any) -> ClassInfo:
    names: tuple[str, ...] = cls._fields
    defaults: dict[str, object] = cls._field_defaults

    def read(instance: Any) -> Values:
        return dict(zip(names, tuple.__iter__(instance), strict=True))

    def make(values: Values) -> object:
        items = defaults | values
        return tuple.__new__(cls, [items[name] for name in names])

    return ClassInfo(names, frozenset(names) - set(defaults), hints_of(cls), read, make)


def _model(cls: Any) -> ClassInfo:
    fields: dict[str, Any] = cls.model_fields
    names = tuple(fields)

    def read(instance: Any) -> Values:
        state = vars(instance)
        values = {name: state[name] for name in names if name in state}
        return values | (instance.__pydantic_extra__ or {})

    def make(values: Values) -> object:
        # Not validated: a validator may not accept its own output, such as a string that it split
        # into a list.
        return cls.model_construct(_fields_set=set(values), **values)

    required = frozenset(name for name, field in fields.items() if field.is_required())
    types = {name: field.annotation for name, field in fields.items()}
    accepts_extra = cls.model_config.get("extra") == "allow"
    return ClassInfo(names, required, types, read, make, model=True, open=accepts_extra)


def dump_field(model: Any, name: str) -> object:
    """Return one field of a pydantic model as pydantic serializes it to JSON."""
    return model.model_dump(mode="json", round_trip=True, include={name})[name]


@lru_cache(maxsize=256)
def _adapter(cls: Any, name: str) -> Any:
    return sys.modules["pydantic"].TypeAdapter(cls.model_fields[name].annotation)


def load_field(cls: type, name: str, data: object) -> object:
    """Return the value of a pydantic model's field from its serialized form."""
    return _adapter(cls, name).validate_python(data)
