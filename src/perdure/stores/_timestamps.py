"""Moments as whole microseconds since 1970, the form in which the stores keep and compare them."""

from datetime import UTC, datetime, timedelta

from perdure.clock import as_utc

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_microseconds(moment: datetime, parameter: str = "moment") -> int:
    """Give a moment as microseconds since 1970."""
    return (as_utc(moment, parameter) - _BEGINNING) // _MICROSECOND


def from_microseconds(to_microseconds: int) -> datetime:
    """Give the moment so many microseconds after the beginning of 1970."""
    return _BEGINNING + timedelta(microseconds=to_microseconds)
