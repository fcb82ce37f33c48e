"""Times, durations and numbers as an operator reads them. No duration is negative."""

from datetime import UTC, datetime, timedelta, tzinfo

from perdure.insights.words import in_units

_MILLISECOND = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)
_WEEK = timedelta(days=7)


def duration(span: timedelta | None) -> str:
    """Return a duration with two units at most: "12 ms", "10.2 s", "6 h 12 min", "9 days"."""
    if span is None:
        return "–"
    span = max(span, timedelta(0))
    if span < _SECOND:
        return f"{span // _MILLISECOND} ms" if span >= _MILLISECOND or not span else "<1 ms"
    if span < 10 * _SECOND:
        return f"{span.total_seconds():.1f} s"
    return in_units(span, 2 if span < _WEEK else 1)


def age(at: datetime | None, now: datetime) -> str:
    """Return how far a time is from now, with one unit: "3 min ago", "in 2 h"."""
    if at is None:
        return "–"
    return f"in {in_units(at - now, 1)}" if at > now else f"{in_units(now - at, 1)} ago"


def date_and_time(at: datetime | None, zone: tzinfo = UTC) -> str:
    """Return a time in full: "3 Nov 2026 14:01:20 UTC"."""
    if at is None:
        return "–"
    local = at.astimezone(zone)
    return f"{local.day} {local:%b %Y %H:%M:%S} {local.tzname()}"


def time_of_day(at: datetime | None, now: datetime, zone: tzinfo = UTC) -> str:
    """Return a time of today as "14:01:20 UTC", any other as "3 Nov 14:01 UTC"."""
    if at is None:
        return "–"
    local = at.astimezone(zone)
    if local.date() == now.astimezone(zone).date():
        return f"{local:%H:%M:%S} {local.tzname()}"
    return f"{local.day} {local:%b %H:%M} {local.tzname()}"


def number(value: float) -> str:
    """Return a number with every digit and a comma between thousands."""
    return f"{value:,}"


def size(count: int) -> str:
    """Return a number of bytes: "812 B", "4.1 KB", "16 MB"."""
    amount = float(count)
    for unit in ("B", "KB", "MB"):
        if amount < 1000 or unit == "MB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
