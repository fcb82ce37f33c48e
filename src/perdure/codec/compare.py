"""Whether a value that was read back is the one that was written: by class too, not only `==`."""

from typing import Any

from perdure.codec.classes import Record, derived_names, record_of
from perdure.codec.tags import LEAF_BY_TYPE, is_plain
from perdure.result import Err, Ok


def difference(old: object, new: object, path: str) -> str | None:
    """Give the path of the first place where two values differ, or None."""
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
    if record := record_of(kind):
        return _records_differ(old, new, record, path)
    return None if old == new else path


def _parts(result: Ok[object] | Err[object]) -> dict[str, object]:
    if isinstance(result, Ok):
        return {"value": result.value}
    return {"error": result.error, "cause": result.cause}


def _items_differ(old: list[Any], new: list[Any], path: str) -> str | None:
    if len(old) != len(new):
        return path
    pairs = enumerate(zip(old, new, strict=True))
    found = (_difference(a, b, f"{path}[{place}]") for place, (a, b) in pairs)
    return next((where for where in found if where), None)


def _values_differ(old: dict[Any, Any], new: dict[Any, Any], path: str) -> str | None:
    # The keys are known to be alike, in the same order.
    pairs = zip(old.items(), new.values(), strict=True)
    found = (_difference(a, b, f"{path}.{key}") for (key, a), b in pairs)
    return next((where for where in found if where), None)


def _records_differ(old: Any, new: Any, record: Record, path: str) -> str | None:
    before, after = record.read(old), record.read(new)
    if before.keys() != after.keys():
        return f"{path}.{min(before.keys() ^ after.keys())}"
    ordered = {name: after[name] for name in before}
    return _values_differ(before, ordered, path) or _undeclared_differ(old, new, record, path)


def _undeclared_differ(old: Any, new: Any, record: Record, path: str) -> str | None:
    """Compare what instances hold beside their fields.

    A lock or a connection that the class makes anew for each instance is never the same; that it is
    there again is enough. Data have to be equal.
    """
    before, after = _undeclared(old, record), _undeclared(new, record)
    for name, value in before.items():
        if name not in after or (is_plain(value) and value != after[name]):
            return f"{path}.{name}"
    return None


def _undeclared(instance: Any, record: Record) -> dict[str, Any]:
    if record.model:
        return instance.__pydantic_private__ or {}
    ignored = derived_names(type(instance)).union(record.names)
    return {
        name: held
        for name, held in getattr(instance, "__dict__", {}).items()
        if name not in ignored
    }
