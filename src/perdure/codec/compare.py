"""Compare a restored value with the original: by class, not only by `==`."""

from typing import Any

from perdure.codec.classes import ClassInfo, class_info, derived_names
from perdure.codec.tags import LEAF_BY_TYPE, is_plain
from perdure.result import Err, Ok


def difference(old: object, new: object, path: str) -> str | None:
    """Return the path of the first difference between two values, or `None`."""
    try:
        return _difference(old, new, path)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - the user's __eq__, properties and attributes
        return path


def _difference(old: Any, new: Any, path: str) -> str | None:
    kind = type(old)
    if old is new:
        return None
    if kind is not type(new):
        return path
    if kind is list or kind is tuple:
        return _items_differ(old, new, path)
    if kind is dict:
        return _items_differ(list(old), list(new), path) or _values_differ(old, new, path)
    if kind is Ok or kind is Err:
        return _values_differ(_parts(old), _parts(new), path)
    if kind in LEAF_BY_TYPE:
        return None if repr(old) == repr(new) or old == new else path
    if issubclass(kind, BaseException):
        return None
    if info := class_info(kind):
        return _fields_differ(old, new, info, path)
    return None if old == new else path


def _parts(result: Ok[object] | Err[object]) -> dict[str, object]:
    if isinstance(result, Ok):
        return {"value": result.value}
    return {"error": result.error, "cause": result.cause}


def _items_differ(old: list[Any], new: list[Any], path: str) -> str | None:
    if len(old) != len(new):
        return path
    pairs = enumerate(zip(old, new, strict=True))
    paths = (_difference(a, b, f"{path}[{index}]") for index, (a, b) in pairs)
    return next((path for path in paths if path), None)


def _values_differ(old: dict[Any, Any], new: dict[Any, Any], path: str) -> str | None:
    # Both have the same keys in the same order.
    pairs = zip(old.items(), new.values(), strict=True)
    paths = (_difference(a, b, f"{path}.{key}") for (key, a), b in pairs)
    return next((path for path in paths if path), None)


def _fields_differ(old: Any, new: Any, info: ClassInfo, path: str) -> str | None:
    old_values, new_values = info.read(old), info.read(new)
    if old_values.keys() != new_values.keys():
        return f"{path}.{min(old_values.keys() ^ new_values.keys())}"
    ordered_values = {name: new_values[name] for name in old_values}
    return _values_differ(old_values, ordered_values, path) or _undeclared_differ(
        old, new, info, path
    )


def _undeclared_differ(old: Any, new: Any, info: ClassInfo, path: str) -> str | None:
    """Compare the attributes of two instances that are not fields.

    Data must be equal. A lock or connection that each instance creates for itself never compares
    equal, so it is enough that both have one.
    """
    old_values, new_values = _undeclared(old, info), _undeclared(new, info)
    for name, value in old_values.items():
        if name not in new_values or (is_plain(value) and value != new_values[name]):
            return f"{path}.{name}"
    return None


def _undeclared(instance: Any, info: ClassInfo) -> dict[str, Any]:
    if info.model:
        return instance.__pydantic_private__ or {}
    ignored_names = derived_names(type(instance)).union(info.names)
    return {
        name: value
        for name, value in getattr(instance, "__dict__", {}).items()
        if name not in ignored_names
    }
