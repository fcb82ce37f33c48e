"""Write large values as JSON in small pieces, redacted on the way.

To redact and encode a copy of a run with many megabytes would need several times as much memory,
and seconds before the first byte.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from perdure.insights.model import Json
from perdure.insights.redaction import Path, Redact

SIZE = 64 * 1024
"""How many bytes a chunk has, more or less."""

# What is encoded at once: a string, an object or list of short scalars, and several of these.
_TEXT, _MEMBERS, _BATCH = 500, 50, 50
_CONTAINERS = (dict, list, tuple)


class UserValue(NamedTuple):
    """A value of a user, which is redacted, and its path."""

    value: Json
    path: Path


class JsonWriter:
    """Yields JSON in pieces; afterwards, `has_hidden` is whether a value was hidden.

    With `is_sorted`, the keys of all objects are in order.
    """

    def __init__(self, redact: Redact, *, is_sorted: bool = False) -> None:
        self.has_hidden = False
        self._redact = redact
        self._is_sorted = is_sorted
        self._encoder = msgspec.json.Encoder(order="sorted" if is_sorted else None)

    def pieces(self, value: Any, path: Path | None = None) -> Iterator[bytes]:
        """Yield the JSON of a value; one with a path is a user's."""
        if isinstance(value, UserValue):
            value, path = value
        if _is_small(value) or (path is not None and self._redact.hides(path, value)):
            yield self._encoder.encode(self._read(value, path))
        elif isinstance(value, str):
            yield from _enclosed(b'""', self._text(self._read(value, path)))
        elif isinstance(value, dict):
            yield from _enclosed(b"{}", self.members(value, path))
        else:
            items = self._joined(enumerate(value), path, is_object=False)
            yield from _enclosed(b"[]", items)

    def members(self, value: dict[str, Any], path: Path | None = None) -> Iterator[bytes]:
        """Yield the members of an object, without its brackets."""
        if path is not None and isinstance(value.get("~map"), list):
            # A dict whose keys are not all strings: they are the parts of a path, too.
            value, path = self._read(value, path), None
        items = sorted(value.items()) if self._is_sorted else value.items()
        yield from self._joined(items, path, is_object=True)

    def _joined(
        self, items: Iterable[tuple[Any, Any]], path: Path | None, *, is_object: bool
    ) -> Iterator[bytes]:
        """Yield members with commas between them; those that are small together."""
        batch: dict[Any, Any] = {}
        comma = b""
        for key, member in items:
            member_path = None if path is None else (*path, str(key))
            if is_small := _is_small(member):
                batch[key] = self._read(member, member_path)
            if batch and (not is_small or len(batch) == _BATCH):
                yield comma + self._encode_batch(batch, is_object)
                batch, comma = {}, b","
            if not is_small:
                yield comma + (self._encoder.encode(key) + b":" if is_object else b"")
                yield from self.pieces(member, member_path)
                comma = b","
        if batch:
            yield comma + self._encode_batch(batch, is_object)

    def _encode_batch(self, batch: dict[Any, Any], is_object: bool) -> bytes:
        return self._encoder.encode(batch if is_object else [*batch.values()])[1:-1]

    def _text(self, text: str) -> Iterator[bytes]:
        for first in range(0, len(text), SIZE):
            yield self._encoder.encode(text[first : first + SIZE])[1:-1]

    def _read(self, value: Any, path: Path | None) -> Any:
        if path is None:
            return value
        shown_value = self._redact.value(value, path)
        self.has_hidden |= shown_value is not value and shown_value != value
        return shown_value


def _enclosed(brackets: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield brackets[:1]
    yield from pieces
    yield brackets[1:]


def _is_small(value: Any) -> bool:
    if not isinstance(value, _CONTAINERS):
        return not isinstance(value, str) or len(value) <= SIZE
    members = value.values() if isinstance(value, dict) else value
    return len(value) <= _MEMBERS and not any(
        isinstance(each, _CONTAINERS) or (isinstance(each, str) and len(each) > _TEXT)
        for each in members
    )


def chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join pieces to chunks that are worth sending."""
    chunk = bytearray()
    for piece in pieces:
        chunk += piece
        if len(chunk) >= SIZE:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)
