"""A run's snapshot as an embedded document, and back as JSON.

Keys are written as they are, so that others find in the document what they would write themselves.
Only what BSON or a driver would misread is escaped: a key that begins with `$` or holds NUL gets a
`%` before it, and so does one that begins with `%`. What no document can hold (nested too deep, too
large) lies beside an outline as compressed JSON.

The number 1 in `formatVersion` is written with 64 bits. Other writers of the format use 32, so its
width tells whose hand a snapshot is: theirs has no escapes, and numbers as JavaScript knows them.
"""

import re
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions, DatetimeConversion, TypeDecoder, TypeRegistry
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.errors import InvalidBSON
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from bson.regex import Regex
from bson.timestamp import Timestamp

from perdure import codec
from perdure.clock import isoformat
from perdure.codec import JSONValue
from perdure.errors import SnapshotFormatError, ValueTooLarge
from perdure.snapshot import Snapshot
from perdure.stores._awaitly import as_snapshot
from perdure.stores._reading import merged, reading

Fields = dict[str, Any]

# A document may have 16 MiB; the header, the epochs and the names of awaited events need some room.
DOCUMENT_ROOM = 16 * 1024 * 1024 - 256 * 1024
# The server's own limit is 180, counted from the whole document.
_DEEPEST = 160
_LARGEST_INT, _LARGEST_UNSIGNED = 2**63 - 1, 2**64 - 1
_EXACT_IN_JAVASCRIPT = 2**53

# In JSON, a key that may need an escape; in BSON, a key (after its type, a byte) that may have one.
_MAY_NEED_ESCAPES = (b'"$', b'"%', b"\\u00")
_MAY_HAVE_ESCAPES = re.compile(rb"[\x01-\x13]%")
_OUTLINED = ("status", "state", "lastUpdated", "completedAt")


def body_of(data: bytes, what: str) -> Fields:
    """Give the fields of a run's document that hold this snapshot, given as JSON."""
    value = codec.loads(data)
    if type(value) is not dict:
        raise SnapshotFormatError([f"{what} must be an object"])
    embedded = _embedded(value, data)
    if embedded is not None and len(embedded) <= DOCUMENT_ROOM:
        return {"snapshot": RawBSONDocument(embedded)}
    packed = pack(data, what)
    return {"snapshot": _outline(value), "packed": packed}


def room_of(body: Mapping[str, Any]) -> int:
    """Give how many bytes the fields that `body_of` gave need, about."""
    packed: bytes | None = body.get("packed")
    return len(body["snapshot"].raw if packed is None else packed)


def pack(data: bytes, what: str) -> bytes:
    """Give JSON compressed, or raise `ValueTooLarge` when a document cannot hold even that."""
    packed = zlib.compress(data, 1)
    if len(packed) > DOCUMENT_ROOM:
        raise ValueTooLarge(f"compressed, {what}", len(packed), DOCUMENT_ROOM)
    return packed


def unpack(packed: bytes) -> bytes:
    """Give the JSON that `pack` was given."""
    return zlib.decompress(packed)


def read_run(id: str, run: Mapping[str, Any], entries: Iterable[bytes]) -> Snapshot:
    """Give a run's snapshot with the entries merged into it, or raise `StoreCorrupted`."""
    with reading(id, zlib.error, InvalidBSON):
        deltas: Any = codec.loads(b"[%b]" % b",".join(entries))
        return merged(_snapshot_in(run), *deltas)


def _snapshot_in(run: Mapping[str, Any]) -> Snapshot:
    raw = run.get("snapshot")
    if not isinstance(raw, RawBSONDocument):
        raise SnapshotFormatError(["the field `snapshot` holds no document"])
    # The runs' own reading of documents makes plain integers of all: here their width counts.
    if not isinstance(RawBSONDocument(raw.raw).get("formatVersion"), Int64):
        foreign = _in_python(bson.decode(raw.raw, _AS_JSON))
        return as_snapshot(foreign, run.get("updatedAt", _BEGINNING))
    if (packed := run.get("packed")) is not None:
        return cast(Snapshot, codec.loads(unpack(packed)))
    own = bson.decode(raw.raw, _AS_JSON)
    return cast(Snapshot, _unescaped(own) if _MAY_HAVE_ESCAPES.search(raw.raw) else own)


def _embedded(value: JSONValue, data: bytes) -> bytes | None:
    if data.count(b"{") + data.count(b"[") > _DEEPEST and not _fits(value, _DEEPEST):
        return None
    if any(mark in data for mark in _MAY_NEED_ESCAPES):
        value = _escaped(value)
    if type(value.get("formatVersion")) is int:
        value["formatVersion"] = Int64(value["formatVersion"])
    try:
        return bson.encode(value)
    except OverflowError:
        return _encode_large(value)


def _encode_large(value: JSONValue) -> bytes | None:
    """Give a value whose integers need more than 63 bits, or None when some need more than 64."""
    try:
        return bson.encode(_widened(value))
    except OverflowError:
        return None


def _fits(value: JSONValue, room: int) -> bool:
    """Tell whether no more than `room` containers lie in each other."""
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if (kind is dict or kind is list) and not (room > 1 and _fits(item, room - 1)):
            return False
    return True


def _outline(value: JSONValue) -> Fields:
    """Give what a look at the document should show; without steps, nobody takes it for the run."""
    execution = value.get("execution", {})
    shown = {name: execution[name] for name in _OUTLINED if name in execution}
    return {"formatVersion": Int64(1), "execution": shown}


def _escaped(value: JSONValue) -> Any:
    kind = type(value)
    if kind is dict:
        return {_escaped_key(key): _escaped(item) for key, item in value.items()}
    if kind is list:
        return [_escaped(item) for item in value]
    return value


def _widened(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _widened(item) for key, item in value.items()}
    if kind is list:
        return [_widened(item) for item in value]
    if kind is int and _LARGEST_INT < value <= _LARGEST_UNSIGNED:
        return Decimal128(str(value))
    return value


def _escaped_key(key: str) -> str:
    if not key.startswith(("$", "%")) and "\0" not in key:
        return key
    return "%" + key.replace("%", "%25").replace("\0", "%00")


def _unescaped(value: JSONValue) -> JSONValue:
    kind = type(value)
    if kind is dict:
        return {_unescaped_key(key): _unescaped(item) for key, item in value.items()}
    if kind is list:
        return [_unescaped(item) for item in value]
    return value


def _unescaped_key(key: str) -> str:
    if not key.startswith("%"):
        return key
    return key[1:].replace("%00", "\0").replace("%25", "%")


def _in_python(value: JSONValue) -> JSONValue:
    """Give what a JavaScript driver wrote: it had to write large whole numbers as doubles."""
    kind = type(value)
    if kind is dict:
        return {key: _in_python(item) for key, item in value.items()}
    if kind is list:
        return [_in_python(item) for item in value]
    if kind is float and value.is_integer() and abs(value) <= _EXACT_IN_JAVASCRIPT:
        return int(value)
    return value


def _decoder(kind: type, read: Callable[[Any], JSONValue]) -> TypeDecoder:
    class Decoder(TypeDecoder):
        @property
        def bson_type(self) -> type:
            return kind

        def transform_bson(self, value: Any) -> JSONValue:
            return read(value)

    return Decoder()


def _number(value: Decimal128) -> int | float:
    number = value.to_decimal()
    whole = number.is_finite() and number == number.to_integral_value()
    return int(number) if whole else float(number)


def _base64(value: bytes) -> str:
    return b64encode(value).decode()


_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)

AS_PLAIN_INTEGERS = [_decoder(Int64, int)]

# What BSON has and JSON lacks, as JSON.stringify would write it.
_AS_JSON: CodecOptions[Any] = CodecOptions(
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    type_registry=TypeRegistry(
        [
            *AS_PLAIN_INTEGERS,
            _decoder(Decimal128, _number),
            _decoder(datetime, isoformat),
            _decoder(DatetimeMS, int),
            _decoder(ObjectId, str),
            _decoder(bytes, _base64),
            _decoder(Binary, _base64),
            _decoder(Regex, lambda _: {}),
            _decoder(Timestamp, lambda timestamp: int(timestamp.time)),
            _decoder(DBRef, lambda reference: dict(reference.as_doc())),
        ]
    ),
)
