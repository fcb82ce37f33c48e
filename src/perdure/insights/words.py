"""Times, durations and names as people read them in a sentence."""

from datetime import UTC, datetime, timedelta

from perdure.insights.model import Tally

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def duration_words(duration: timedelta) -> str:
    """Return a duration such as "340 ms", "12 s", "6 h 12 min" or "2 days"; never negative."""
    seconds = max(duration.total_seconds(), 0.0)
    if seconds < 1:
        return f"{int(seconds * 1000)} ms"
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return _two(whole // _HOUR, "h", whole % _HOUR // _MINUTE, "min")
    days, hours = whole // _DAY, whole % _DAY // _HOUR
    return _two(days, "day", hours, "h") if days == 1 else f"{days:,} days"


def _two(large: int, unit: str, small: int, small_unit: str) -> str:
    return f"{large} {unit} {small} {small_unit}" if small else f"{large} {unit}"


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
