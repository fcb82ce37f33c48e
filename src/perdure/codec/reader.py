"""Read stored JSON with tags. No class is looked up by a stored name."""

from collections.abc import Callable
from typing import Any

from perdure.codec.exceptions import restore
from perdure.codec.scope import NOWHERE
from perdure.codec.tags import LEAF_BY_NAME, MALFORMED, RESERVED, JSONValue, is_tagged
from perdure.errors import CodecError
from perdure.result import Err, Ok


def split_tag(data: JSONValue) -> tuple[str | None, JSONValue]:
    """Return the tag of the data and its payload, or `None` and the data itself.

    The tag is returned without its `~`, a reserved key as it is.
    """
    if type(data) is dict and is_tagged(data):
        ((key, payload),) = data.items()
        return key.removeprefix("~"), payload
    return None, data


def untag(data: JSONValue, path: str) -> Any:
    """Decode a value from stored JSON."""
    kind = type(data)
    if kind is list:
        return [untag(item, f"{path}[{index}]") for index, item in enumerate(data)]
    if kind is not dict:
        return data
    if not is_tagged(data):
        return {key: untag(item, f"{path}.{key}") for key, item in data.items()}
    tag, payload = split_tag(data)
    return _untag(str(tag), payload, path)


def _untag(tag: str, payload: JSONValue, path: str) -> Any:
    if leaf := LEAF_BY_NAME.get(tag):
        try:
            return leaf.read(payload)
        except MALFORMED as error:
            raise CodecError(f"malformed {tag}: {error}", path) from error
    if container := _CONTAINERS.get(tag):
        return container(payload, path)
    name = tag if tag in RESERVED else f"~{tag}"
    raise CodecError(f"unknown tag {name!r}; was this written by a newer perdure?", path)


def list_of(payload: JSONValue, path: str) -> list[Any]:
    """Return a payload that must be a list, or raise `CodecError`."""
    if type(payload) is not list:
        raise CodecError(f"expected a list, got {type(payload).__name__}", path)
    return payload


def dict_of(payload: JSONValue, path: str) -> dict[str, Any]:
    """Return a payload that must be an object, or raise `CodecError`."""
    if type(payload) is not dict:
        raise CodecError(f"expected an object, got {type(payload).__name__}", path)
    return payload


def pair_of(payload: JSONValue, path: str) -> list[Any]:
    """Return a payload that must be a list of two items, or raise `CodecError`."""
    if len(list_of(payload, path)) != 2:
        raise CodecError("expected a list of two items", path)
    return list_of(payload, path)


def collect(kind: Callable[[list[Any]], Any], items: list[Any], path: str) -> Any:
    """Create a collection of items, whose `__hash__` may be the user's code."""
    try:
        return kind(items)
    except Exception as error:
        raise CodecError(f"unhashable member or key: {error}", path) from error


def _untag_items(payload: JSONValue, path: str) -> list[Any]:
    return [untag(item, f"{path}[{index}]") for index, item in enumerate(list_of(payload, path))]


def _untag_map(payload: JSONValue, path: str) -> dict[Any, Any]:
    pairs = [pair_of(pair, path) for pair in list_of(payload, path)]
    items = [(untag(key, path), untag(item, path)) for key, item in pairs]
    mapping: dict[Any, Any] = collect(dict, items, path)
    return mapping


def _untag_err(payload: JSONValue, path: str) -> Err[Any]:
    parts = dict_of(payload, path)
    if "error" not in parts:
        raise CodecError("Err: field 'error' is missing", path)
    cause = untag(parts["cause"], f"{path}.cause") if "cause" in parts else None
    return Err(untag(parts["error"], f"{path}.error"), cause)


def _untag_dict(payload: JSONValue, path: str) -> dict[str, Any]:
    return {key: untag(item, f"{path}.{key}") for key, item in dict_of(payload, path).items()}


_CONTAINERS: dict[str, Callable[[JSONValue, str], Any]] = {
    "": _untag_dict,
    "tuple": lambda payload, path: tuple(_untag_items(payload, path)),
    "set": lambda payload, path: collect(set, _untag_items(payload, path), path),
    "frozenset": lambda payload, path: collect(frozenset, _untag_items(payload, path), path),
    "map": _untag_map,
    "ok": lambda payload, path: Ok(untag(payload, path)),
    "err": _untag_err,
    "error": lambda payload, path: restore(payload, NOWHERE, lambda data: untag(data, path)),
    # Without a type that names its class, an object is a dict of its fields.
    "named": untag,
    "declared": untag,
    "record": lambda payload, path: untag(pair_of(payload, path)[1], path),
    "dumped": lambda payload, path: payload,
}
