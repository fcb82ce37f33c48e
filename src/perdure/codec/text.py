"""JSON text: written from encoded data, and parsed."""

import msgspec

from perdure.codec.tags import JSONValue, is_shallow
from perdure.errors import CodecError

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode

# Data with fewer containers can be read whatever their shape; data with more must not be deeper
# than this.
_MANY_CONTAINERS, _MAX_JSON_DEPTH = 10_000, 300


def dumps(data: JSONValue) -> bytes:
    """Return encoded data as JSON in UTF-8."""
    try:
        text = _to_json(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot be written as JSON: {error}") from error
    # Since Python 3.14, only the stack limits the depth, so more can be written than read back.
    # Most texts are too short for that: their containers need not be counted.
    if len(text) > _MANY_CONTAINERS and _has_many_containers(text) and not _is_readable(data):
        raise CodecError("cannot be written as JSON: nested too deeply to be read back")
    return text


def _has_many_containers(text: bytes) -> bool:
    return text.count(b"[") + text.count(b"{") > _MANY_CONTAINERS


def _is_readable(data: JSONValue) -> bool:
    try:
        return is_shallow(data, _MAX_JSON_DEPTH)
    except RecursionError:
        return False


def loads(data: bytes | str) -> JSONValue:
    """Parse JSON, or raise `CodecError`."""
    try:
        return _from_json(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"not valid JSON: {error}") from error
