"""Times, durations and numbers as an operator reads them. No duration is negative."""

from datetime import UTC, datetime, timedelta, tzinfo

from perdure.insights import Tally

_MILLISECOND = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)
_MINUTE = timedelta(minutes=1)
_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)


def duration(span: timedelta | None) -> str:
    """Return a duration with two units at most: "12 ms", "10.2 s", "6 h 12 min", "3 days"."""
    if span is None:
        return "–"
    span = max(span, timedelta(0))
    if span < _SECOND:
        return f"{span // _MILLISECOND} ms" if span >= _MILLISECOND or not span else "<1 ms"
    if span < 10 * _SECOND:
        return f"{span.total_seconds():.1f} s"
    if span < _MINUTE:
        return f"{span // _SECOND} s"
    if span < _HOUR:
        return _two_units(span, _MINUTE, "min", _SECOND, "s")
    if span < _DAY:
        return _two_units(span, _HOUR, "h", _MINUTE, "min")
    days = span // _DAY
    return "1 day" if days == 1 else f"{number(days)} days"


def _two_units(span: timedelta, large: timedelta, name: str, small: timedelta, unit: str) -> str:
    count, rest = span // large, span % large // small
    return f"{count} {name} {rest} {unit}" if rest else f"{count} {name}"


def age(at: datetime | None, now: datetime) -> str:
    """Return how far a time is from now, with one unit: "3 min ago", "in 2 h"."""
    if at is None:
        return "–"
    if at > now:
        return f"in {_one_unit(at - now)}"
    return f"{_one_unit(now - at)} ago"


def _one_unit(span: timedelta) -> str:
    for unit, name in ((_DAY, "day"), (_HOUR, "h"), (_MINUTE, "min")):
        if span >= unit:
            count = span // unit
            return f"{number(count)} {name}{'s' if name == 'day' and count > 1 else ''}"
    return f"{span // _SECOND} s"


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


def tally(value: Tally | None) -> str:
    """Return a count; "10,000+" means that there are at least so many."""
    if value is None:
        return "0"
    return f"{value.count:,}+" if value.capped else f"{value.count:,}"


def size(count: int) -> str:
    """Return a number of bytes: "812 B", "4.1 KB", "16 MB"."""
    amount = float(count)
    for unit in ("B", "KB", "MB"):
        if amount < 1000 or unit == "MB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
