"""Times, durations and names as people read them in a sentence."""

from datetime import UTC, datetime, timedelta

from perdure.insights.model import Tally

_SECOND, _HOUR, _DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
_UNITS = ((_DAY, "day"), (_HOUR, "h"), (timedelta(minutes=1), "min"), (_SECOND, "s"))
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def duration_words(duration: timedelta) -> str:
    """Return a duration such as "340 ms", "12 s", "6 h 12 min" or "2 days 3 h"; never negative."""
    if duration < _SECOND:
        return f"{max(duration // timedelta(milliseconds=1), 0)} ms"
    return in_units(duration, 2 if _HOUR <= duration < 7 * _DAY else 1)


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
    """Return a time such as "09:00 UTC", with the date if that is not today's."""
    at, now = at.astimezone(UTC), now.astimezone(UTC)
    clock = f"{at:%H:%M} UTC"
    if at.date() == now.date():
        return clock
    year = "" if at.year == now.year else f" {at.year}"
    return f"{at.day} {_MONTHS[at.month - 1]}{year} {clock}"


def count_words(number: int, noun: str) -> str:
    """Return a number with its noun: "1 run", "1,204 runs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tally_words(tally: Tally | None) -> str:
    """Return a count: "1,204", or "10,000+" if there are at least so many."""
    return "0" if tally is None else f"{tally.count:,}{'+' if tally.capped else ''}"


def list_words(words: list[str]) -> str:
    """Return words joined as in "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
