"""Stored JSON with its tags undone. No class is looked up here by a name that was stored."""

from collections.abc import Callable
from typing import Any

from perdure.codec.exceptions import restored
from perdure.codec.tags import LEAF_BY_NAME, MALFORMED, JSONValue, is_tagged
from perdure.errors import CodecError
from perdure.result import Err, Ok


def opened(data: JSONValue) -> tuple[str | None, JSONValue]:
    """Give the tag of data and what it holds; None, and the data itself, when it has no tag."""
    if type(data) is dict and is_tagged(data):
        ((key, payload),) = data.items()
        return key[1:], payload
    return None, data


def untag(data: JSONValue, path: str) -> Any:
    """Give the value that stored JSON stands for."""
    kind = type(data)
    if kind is list:
        return [untag(item, f"{path}[{place}]") for place, item in enumerate(data)]
    if kind is not dict:
        return data
    if not is_tagged(data):
        return {key: untag(item, f"{path}.{key}") for key, item in data.items()}
    tag, payload = opened(data)
    return _untag(str(tag), payload, path)


def _untag(tag: str, payload: JSONValue, path: str) -> Any:
    if leaf := LEAF_BY_NAME.get(tag):
        try:
            return leaf.read(payload)
        except MALFORMED as error:
            raise CodecError(f"malformed {tag}: {error}", path) from error
    if container := _CONTAINERS.get(tag):
        return container(payload, path)
    raise CodecError(f"unknown tag '~{tag}'; was this written by a newer perdure?", path)


def list_of(payload: JSONValue, path: str) -> list[Any]:
    """Give a payload that has to be a list, or raise `CodecError`."""
    if type(payload) is not list:
        raise CodecError(f"{type(payload).__name__} where a list belongs", path)
    return payload


def dict_of(payload: JSONValue, path: str) -> dict[str, Any]:
    """Give a payload that has to be an object, or raise `CodecError`."""
    if type(payload) is not dict:
        raise CodecError(f"{type(payload).__name__} where an object belongs", path)
    return payload


def pair_of(payload: JSONValue, path: str) -> list[Any]:
    """Give a payload that has to be a list of two, or raise `CodecError`."""
    if len(list_of(payload, path)) != 2:
        raise CodecError("a pair that is no pair", path)
    return list_of(payload, path)


def gathered(kind: Callable[[list[Any]], Any], items: list[Any], path: str) -> Any:
    """Give a set or a dict of items, whose hashes may be the user's code."""
    try:
        return kind(items)
    except Exception as error:
        raise CodecError(f"a member or key cannot be hashed: {error}", path) from error


def _untag_items(payload: JSONValue, path: str) -> list[Any]:
    return [untag(item, f"{path}[{place}]") for place, item in enumerate(list_of(payload, path))]


def _untag_map(payload: JSONValue, path: str) -> dict[Any, Any]:
    pairs = [pair_of(pair, path) for pair in list_of(payload, path)]
    read = [(untag(key, path), untag(item, path)) for key, item in pairs]
    made: dict[Any, Any] = gathered(dict, read, path)
    return made


def _untag_err(payload: JSONValue, path: str) -> Err[Any]:
    parts = dict_of(payload, path)
    if "error" not in parts:
        raise CodecError("an Err without its error", path)
    cause = untag(parts["cause"], f"{path}.cause") if "cause" in parts else None
    return Err(untag(parts["error"], f"{path}.error"), cause)


def _untag_dict(payload: JSONValue, path: str) -> dict[str, Any]:
    return {key: untag(item, f"{path}.{key}") for key, item in dict_of(payload, path).items()}


_CONTAINERS: dict[str, Callable[[JSONValue, str], Any]] = {
    "": _untag_dict,
    "tuple": lambda payload, path: tuple(_untag_items(payload, path)),
    "set": lambda payload, path: gathered(set, _untag_items(payload, path), path),
    "frozenset": lambda payload, path: gathered(frozenset, _untag_items(payload, path), path),
    "map": _untag_map,
    "ok": lambda payload, path: Ok(untag(payload, path)),
    "err": _untag_err,
    "error": lambda payload, path: restored(payload, (), lambda data: untag(data, path)),
    # Without a type to say which class it was, an object is its fields.
    "named": untag,
    "record": lambda payload, path: untag(pair_of(payload, path)[1], path),
    "dumped": lambda payload, path: payload,
}
