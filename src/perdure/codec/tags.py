"""A table of the types that JSON lacks, and how each is written in JSON."""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

JSONValue: TypeAlias = Any

MAX_DEPTH = 90
"""How deeply lists and objects in stored JSON may be nested.

MySQL and MongoDB allow 100 levels, of which the snapshot around a value uses a few.
"""

VERSION = "$v"
"""Reserved among the fields of a class, for the version of the class that wrote them."""

RESERVED = frozenset({VERSION, "$sealed", "$blob"})
"""Reserved as the only key of an object, for values that are encrypted or stored elsewhere.

Users' objects with these keys are escaped, so that a later version can give the keys a meaning.
"""

SMALLEST_INT = -(2**63)
LARGEST_INT = 2**63 - 1

# Reducing a fraction takes more than linear time; at this size, still well under a millisecond.
_FRACTION_BITS = 2**14

_SECOND = timedelta(seconds=1)

MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, OSError)
"""What a reader in this table raises for a malformed payload."""


class ForeignZone(Exception):
    """A time zone that cannot be stored: neither a `ZoneInfo` nor a fixed offset."""


class Tag(NamedTuple):
    """How a type is written under `"~" + name`, and read; `bare` values need no tag."""

    name: str
    type: type
    write: Callable[[Any], JSONValue]
    read: Callable[[Any], object]
    bare: Callable[[Any], bool] = lambda _: False


def is_clean(text: str) -> bool:
    """Return whether a string can be encoded in UTF-8; lone surrogates cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_small(number: int) -> bool:
    """Return whether an int fits in 64 bits, the most that every JSON database stores."""
    return SMALLEST_INT <= number <= LARGEST_INT


def is_plain(value: Any, room: int = MAX_DEPTH) -> bool:
    """Return whether a value is JSON that reads back as itself, at most `room` containers deep."""
    kind = type(value)
    if kind is str:
        return is_clean(value)
    # Most items are short strings, booleans and null: the loops handle them without another call.
    if kind is dict:
        if room <= 0 or (len(value) == 1 and is_tagged(value)):
            return False
        for key, item in value.items():
            if type(key) is not str or not (key.isascii() or is_clean(key)):
                return False
            if (type(item) is str and item.isascii()) or item is None or item is True:
                continue
            if item is not False and not is_plain(item, room - 1):
                return False
        return True
    if kind is list:
        return room > 0 and _is_plain_list(value, room - 1)
    if kind is int:
        return is_small(value)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool


def _is_plain_list(value: list[Any], room: int) -> bool:
    for item in value:
        if type(item) is str and item.isascii():
            continue
        if not is_plain(item, room):
            return False
    return True


def is_shallow(data: JSONValue, room: int = MAX_DEPTH) -> bool:
    """Return whether stored JSON is at most `room` containers deep."""
    kind = type(data)
    if kind is dict:
        return room > 0 and all(is_shallow(item, room - 1) for item in data.values())
    if kind is list:
        return room > 0 and all(is_shallow(item, room - 1) for item in data)
    return True


def is_tagged(data: Mapping[Any, Any]) -> bool:
    """Return whether an object looks like a tag: one key, which starts with `~` or is reserved."""
    if len(data) != 1:
        return False
    (key,) = data
    return type(key) is str and (key.startswith("~") or key in RESERVED)


def _write_offset(offset: timedelta) -> list[int]:
    return [offset.days, offset.seconds, offset.microseconds]


def _read_offset(parts: Any) -> timedelta:
    days, seconds, microseconds = (_int(part) for part in parts)
    return timedelta(days, seconds, microseconds)


def _int(part: object) -> int:
    if type(part) is not int:
        raise TypeError(f"expected an int, got {type(part).__name__}")
    return part


def _string(part: object) -> str:
    if type(part) is not str:
        raise TypeError(f"expected a string, got {type(part).__name__}")
    return part


def _write_zone(zone: tzinfo) -> dict[str, JSONValue]:
    if type(zone) is ZoneInfo and zone.key is not None:
        return {"zone": zone.key}
    try:
        offset = zone.utcoffset(None)
    except Exception as error:
        raise ForeignZone from error
    # According to the protocol of tzinfo, only a zone with a fixed offset knows it without a date.
    if type(offset) is not timedelta or type(zone) is ZoneInfo:
        raise ForeignZone
    fixed_zone = timezone(offset)
    name = zone.tzname(None) if type(zone) is timezone else None
    if name is None or name == fixed_zone.tzname(None):
        return {"offset": _write_offset(offset)}
    if not is_clean(name):
        raise ForeignZone
    return {"offset": _write_offset(offset), "name": name}


def _read_zone(parts: Mapping[str, Any]) -> tzinfo | None:
    if "zone" in parts:
        return ZoneInfo(_string(parts["zone"]))
    if "offset" not in parts:
        return None
    offset = _read_offset(parts["offset"])
    return timezone(offset, _string(parts["name"])) if "name" in parts else timezone(offset)


def _write_time(value: datetime | time) -> JSONValue:
    zone = {} if value.tzinfo is None else _write_zone(value.tzinfo)
    if not value.fold and _has_iso_format(zone):
        offset = timezone(_read_offset(zone["offset"])) if zone else None
        return value.replace(tzinfo=offset).isoformat()
    fold = {"fold": 1} if value.fold else {}
    return {"at": value.replace(tzinfo=None).isoformat(), **zone, **fold}


def _has_iso_format(zone: Mapping[str, Any]) -> bool:
    """Return whether a zone can be read back from the ISO format.

    CPython's `fromisoformat` reads an offset of less than a second as UTC.
    """
    if "offset" not in zone:
        return not zone
    return len(zone) == 1 and not timedelta(0) < abs(_read_offset(zone["offset"])) < _SECOND


def _time_reader(kind: type[datetime] | type[time]) -> Callable[[Any], object]:
    def read(payload: Any) -> object:
        if type(payload) is str:
            return kind.fromisoformat(payload)
        fold = _int(payload.get("fold", 0)) if type(payload) is dict else 0
        value = kind.fromisoformat(_string(payload["at"]))
        return value.replace(tzinfo=_read_zone(payload), fold=fold)

    return read


def _write_float(value: float) -> JSONValue:
    return value if math.isfinite(value) else {"~float": repr(value)}


def _read_float(payload: object) -> float:
    if payload not in ("nan", "inf", "-inf"):
        raise ValueError("expected nan, inf or -inf")
    return float(_string(payload))


def _read_part(part: Any) -> float:
    if type(part) is float:
        return part
    return _read_float(part["~float"])


def _read_complex(payload: Any) -> complex:
    real, imaginary = (_read_part(part) for part in payload)
    return complex(real, imaginary)


def _write_fraction(value: Fraction) -> list[str]:
    _check_size(value.numerator, value.denominator)
    return [hex(value.numerator), hex(value.denominator)]


def _read_fraction(payload: Any) -> Fraction:
    numerator, denominator = (_read_int(part) for part in payload)
    _check_size(numerator, denominator)
    return Fraction(numerator, denominator)


def _check_size(numerator: int, denominator: int) -> None:
    if max(numerator.bit_length(), denominator.bit_length()) > _FRACTION_BITS:
        raise ValueError(f"a fraction of more than {_FRACTION_BITS} bits")


def _read_int(payload: object) -> int:
    # Base 16 takes linear time and is exempt from the limit on digits.
    return int(_string(payload), 16)


def _read_bytes(payload: object) -> bytes:
    return b64decode(_string(payload), validate=True)


def _write_surrogates(value: str) -> str:
    return _write_base64(value.encode("utf-8", "surrogatepass"))


def _read_surrogates(payload: object) -> str:
    return _read_bytes(payload).decode("utf-8", "surrogatepass")


def _write_path(value: Path) -> JSONValue:
    text = str(value)
    return text if is_clean(text) else {"~text": _write_surrogates(text)}


def _read_path(payload: Any) -> Path:
    return Path(_read_surrogates(payload["~text"]) if type(payload) is dict else _string(payload))


def _write_base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode()


LEAVES: tuple[Tag, ...] = (
    Tag("text", str, _write_surrogates, _read_surrogates, bare=is_clean),
    Tag("int", int, hex, _read_int, bare=is_small),
    Tag("float", float, repr, _read_float, bare=math.isfinite),
    Tag("datetime", datetime, _write_time, _time_reader(datetime)),
    Tag("date", date, date.isoformat, lambda payload: date.fromisoformat(_string(payload))),
    Tag("time", time, _write_time, _time_reader(time)),
    Tag("timedelta", timedelta, _write_offset, _read_offset),
    Tag("decimal", Decimal, str, lambda payload: Decimal(_string(payload))),
    Tag("uuid", UUID, str, lambda payload: UUID(_string(payload))),
    Tag("bytes", bytes, _write_base64, _read_bytes),
    Tag("bytearray", bytearray, _write_base64, lambda payload: bytearray(_read_bytes(payload))),
    Tag(
        "complex",
        complex,
        lambda value: [_write_float(value.real), _write_float(value.imag)],
        _read_complex,
    ),
    Tag("fraction", Fraction, _write_fraction, _read_fraction),
    Tag("path", type(Path()), _write_path, _read_path),
)

LEAF_BY_TYPE = MappingProxyType({tag.type: tag for tag in LEAVES})
LEAF_BY_NAME = MappingProxyType({tag.name: tag for tag in LEAVES})
