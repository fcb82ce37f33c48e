"""Convert datetimes to integer microseconds since 1970, as stores keep and compare them."""

from datetime import UTC, datetime, timedelta

from perdure.clock import as_utc

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_microseconds(time: datetime, parameter: str = "time") -> int:
    """Return a datetime as microseconds since 1970."""
    return (as_utc(time, parameter) - _EPOCH) // _MICROSECOND


def from_microseconds(microseconds: int) -> datetime:
    """Return the datetime that many microseconds after the start of 1970, in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds)
