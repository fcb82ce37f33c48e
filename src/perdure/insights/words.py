"""Format times, durations and names for sentences."""

import re
from datetime import UTC, datetime, timedelta, tzinfo

from perdure.insights.model import Tally

_MILLISECOND, _SECOND, _MINUTE = (timedelta(milliseconds=n) for n in (1, 1000, 60_000))
_HOUR, _DAY = timedelta(hours=1), timedelta(days=1)
_UNITS = ((_DAY, "day"), (_HOUR, "h"), (_MINUTE, "min"), (_SECOND, "s"))
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Control characters, and those that change the direction or the look of what follows.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def duration_words(duration: timedelta) -> str:
    """Return a duration such as "340 ms", "12 s", "6 h 12 min" or "2 days 3 h"; never negative."""
    if duration < _SECOND:
        return f"{max(duration // _MILLISECOND, 0)} ms"
    return in_units(duration, 2 if _HOUR <= duration < 7 * _DAY else 1)


def duration(span: timedelta | None) -> str:
    """Return a measured duration: "<1 ms", "12 ms", "10.2 s", "6 h 12 min", "9 days", or "–"."""
    if span is None:
        return "–"
    span = max(span, timedelta(0))
    if span < _SECOND:
        return f"{span // _MILLISECOND} ms" if span >= _MILLISECOND or not span else "<1 ms"
    if span < _MINUTE:
        return f"{span.total_seconds():.1f}".removesuffix(".0") + " s"
    return in_units(span, 2 if span < 7 * _DAY else 1)


def age(at: datetime | None, now: datetime) -> str:
    """Return how far a time is from now, with one unit: "3 min ago", "in 2 h"."""
    if at is None:
        return "–"
    return f"in {in_units(at - now, 1)}" if at > now else f"{in_units(now - at, 1)} ago"


def in_units(duration: timedelta, limit: int) -> str:
    """Return the largest units of a duration, without gaps: an hour and 5 s are "1 h"."""
    words: list[str] = []
    for unit, name in _UNITS:
        count, duration = divmod(duration, unit)
        if count:
            words.append(count_words(count, name) if name == "day" else f"{count:,} {name}")
        elif words:
            break
    return " ".join(words[:limit]) or "0 s"


def time_words(at: datetime, now: datetime) -> str:
    """Return a time such as "09:00 UTC", with the date unless it is today."""
    at, now = at.astimezone(UTC), now.astimezone(UTC)
    clock = f"{at:%H:%M} UTC"
    if at.date() == now.date():
        return clock
    year = "" if at.year == now.year else f" {at.year}"
    return f"{at.day} {_MONTHS[at.month - 1]}{year} {clock}"


def in_zone(at: datetime, zone: tzinfo | None) -> datetime:
    """Return a time in a zone, by default this machine's, or in UTC if it has no such year."""
    try:
        return at.astimezone(zone)
    except (OverflowError, ValueError):
        return at.astimezone(UTC)


def date_and_time(at: datetime | None, zone: tzinfo = UTC) -> str:
    """Return a time in full: "3 Nov 2026 14:01:20 UTC"."""
    if at is None:
        return "–"
    local = in_zone(at, zone)
    return f"{local.day} {local:%b %Y %H:%M:%S} {local.tzname()}"


def time_of_day(at: datetime | None, now: datetime, zone: tzinfo = UTC) -> str:
    """Return a time of today as "14:01:20 UTC" or "14:00 UTC", any other as "3 Nov 14:01 UTC"."""
    if at is None:
        return "–"
    local = in_zone(at, zone)
    if local.date() == now.astimezone(zone).date():
        is_whole = not local.second and not local.microsecond
        return f"{local:{'%H:%M' if is_whole else '%H:%M:%S'}} {local.tzname()}"
    return f"{local.day} {local:%b %H:%M} {local.tzname()}"


def size(count: int) -> str:
    """Return a number of bytes: "812 B", "4.1 KB", "16 MB"."""
    amount = float(count)
    for unit in ("B", "KB", "MB"):
        if amount < 1000 or unit == "MB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"


def count_words(number: int, noun: str) -> str:
    """Return a number with its noun: "1 run", "1,204 runs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tally_words(tally: Tally | None) -> str:
    """Return a count: "1,204", or "10,000+" if there may be more."""
    return "0" if tally is None else f"{tally.count:,}{'+' if tally.capped else ''}"


def list_words(words: list[str]) -> str:
    """Return words joined as in "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def visible(text: str) -> str:
    """Return a string whose invisible characters are written as escapes."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
