"""Convert a run's snapshot to an embedded document, and back.

Keys are stored unchanged, so that other programs find what they would write themselves. Only keys
that BSON or a driver would misread are escaped: a key that starts with `$` or `%` or contains NUL
gets a leading `%`. A snapshot that no document can hold (nested too deeply, too large) is stored as
compressed JSON beside an outline of it.

The 1 in `formatVersion` is stored with 64 bits. Other writers of the format use 32 bits, so the
width shows who wrote a snapshot: theirs have no escapes, and have JavaScript's numbers.
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
from perdure.stores._reading import merge_journal, reading

Fields = dict[str, Any]

# A document can have at most 16 MiB; the header, the epochs and the awaited names need some room.
MAX_DOCUMENT_SIZE = 16 * 1024 * 1024 - 256 * 1024
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# The server allows 180 levels, counted from the whole document.
_MAX_DEPTH = 160
_MAX_INT64, _MAX_UINT64 = 2**63 - 1, 2**64 - 1
_MAX_SAFE_INTEGER = 2**53

# In JSON, a key that may need an escape; in BSON, a key (after its type byte) that may have one.
_MAY_NEED_ESCAPES = (b'"$', b'"%', b"\\u00")
_MAY_HAVE_ESCAPES = re.compile(rb"[\x01-\x13]%")
# After the size of a document, the type and the name of its first field.
_SIZE_BYTES, _OWN_VERSION = 4, b"\x12formatVersion\0"
_OUTLINE_FIELDS = ("status", "state", "lastUpdated", "completedAt")


def encode_snapshot(data: bytes, what: str) -> Fields:
    """Return the fields of a run's document for a snapshot given as JSON; `what` is for errors."""
    value = codec.loads(data)
    if type(value) is not dict:
        raise SnapshotFormatError([f"{what} must be an object"])
    document = _embed(value, data)
    if document is not None and len(document) <= MAX_DOCUMENT_SIZE:
        return {"snapshot": RawBSONDocument(document)}
    packed = pack(data, what)
    return {"snapshot": _outline(value), "packed": packed}


def size_of(fields: Mapping[str, Any]) -> int:
    """Return the approximate size in bytes of the fields of `encode_snapshot`."""
    packed: bytes | None = fields.get("packed")
    return len(fields["snapshot"].raw if packed is None else packed)


def pack(data: bytes, what: str) -> bytes:
    """Compress JSON, or raise `ValueTooLarge` if even that does not fit in a document."""
    compressed_data = zlib.compress(data, 1)
    if len(compressed_data) > MAX_DOCUMENT_SIZE:
        raise ValueTooLarge(f"compressed, {what}", len(compressed_data), MAX_DOCUMENT_SIZE)
    return compressed_data


def unpack(data: bytes) -> bytes:
    """Return the JSON that was packed."""
    return zlib.decompress(data)


def read_run(id: str, run: Mapping[str, Any], entries: Iterable[bytes]) -> Snapshot:
    """Return a run's snapshot with its entries merged, or raise `StoreCorrupted`."""
    with reading(id, zlib.error, InvalidBSON):
        deltas: Any = codec.loads(b"[%b]" % b",".join(entries))
        return merge_journal(_read_snapshot(run), *deltas)


def _read_snapshot(run: Mapping[str, Any]) -> Snapshot:
    raw = run.get("snapshot")
    if not isinstance(raw, RawBSONDocument):
        raise SnapshotFormatError(["the field `snapshot` is not a document"])
    if not _is_own(raw.raw):
        foreign = _transform(bson.decode(raw.raw, _AS_JSON), leaf=_from_javascript)
        return as_snapshot(foreign, run.get("updatedAt", UNIX_EPOCH))
    if (packed := run.get("packed")) is not None:
        return cast(Snapshot, codec.loads(unpack(packed)))
    own = bson.decode(raw.raw, _AS_JSON)
    has_escapes = _MAY_HAVE_ESCAPES.search(raw.raw)
    return cast(Snapshot, _transform(own, key=_unescape) if has_escapes else own)


def _is_own(snapshot: bytes | memoryview) -> bool:
    """Return whether this store wrote a snapshot: awaitly's versions have another width."""
    # The codec of the runs converts all numbers to plain integers. Nothing needs to be decoded if
    # the version is the first field, as in most snapshots.
    if snapshot[_SIZE_BYTES : _SIZE_BYTES + len(_OWN_VERSION)] == _OWN_VERSION:
        return True
    return isinstance(RawBSONDocument(snapshot).get("formatVersion"), Int64)


def _embed(value: JSONValue, data: bytes) -> bytes | None:
    if data.count(b"{") + data.count(b"[") > _MAX_DEPTH and not _fits(value, _MAX_DEPTH):
        return None
    if any(mark in data for mark in _MAY_NEED_ESCAPES):
        value = _transform(value, key=_escape)
    if type(value.get("formatVersion")) is int:
        value["formatVersion"] = Int64(value["formatVersion"])
    try:
        return bson.encode(value)
    except OverflowError:
        return _encode_large_integers(value)


def _encode_large_integers(value: JSONValue) -> bytes | None:
    """Encode integers of 64 bits as decimals; return `None` if some need more than 64."""
    try:
        return bson.encode(_transform(value, leaf=_as_decimal))
    except OverflowError:
        return None


def _fits(value: JSONValue, depth: int) -> bool:
    """Return whether containers are nested at most `depth` levels deep."""
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if (kind is dict or kind is list) and not (depth > 1 and _fits(item, depth - 1)):
            return False
    return True


def _outline(value: JSONValue) -> Fields:
    """Return an outline for people; without steps, it does not count as a snapshot."""
    execution = value.get("execution", {})
    fields = {name: execution[name] for name in _OUTLINE_FIELDS if name in execution}
    return {"formatVersion": Int64(1), "execution": fields}


def _transform(
    value: Any,
    *,
    key: Callable[[str], str] = lambda key: key,
    leaf: Callable[[Any], Any] = lambda item: item,
) -> Any:
    """Return a JSON value with its keys and its leaves replaced."""
    kind = type(value)
    if kind is dict:
        return {key(k): _transform(item, key=key, leaf=leaf) for k, item in value.items()}
    if kind is list:
        return [_transform(item, key=key, leaf=leaf) for item in value]
    return leaf(value)


def _escape(key: str) -> str:
    if not key.startswith(("$", "%")) and "\0" not in key:
        return key
    return "%" + key.replace("%", "%25").replace("\0", "%00")


def _unescape(key: str) -> str:
    if not key.startswith("%"):
        return key
    return key[1:].replace("%00", "\0").replace("%25", "%")


def _as_decimal(value: Any) -> Any:
    is_large = type(value) is int and _MAX_INT64 < value <= _MAX_UINT64
    return Decimal128(str(value)) if is_large else value


def _from_javascript(value: Any) -> Any:
    # A JavaScript driver writes integers beyond 32 bits as doubles.
    is_integer = type(value) is float and value.is_integer() and abs(value) <= _MAX_SAFE_INTEGER
    return int(value) if is_integer else value


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
    is_integer = number.is_finite() and number == number.to_integral_value()
    return int(number) if is_integer else float(number)


def _base64(value: bytes) -> str:
    return b64encode(value).decode()


AS_PLAIN_INTEGERS = [_decoder(Int64, int)]

# Types that JSON lacks, converted as JSON.stringify would.
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
