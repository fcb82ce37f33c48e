"""Clocks, durations, cron expressions and timestamps.

Only this module reads the time or sleeps. Everything that waits takes a `Clock`, so a test can
advance a week at once.
"""

import asyncio
import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeAlias, cast
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure.errors import InvalidArgument, InvalidCron, InvalidDuration

Duration: TypeAlias = timedelta | int | float | str

_EXPECTED_DURATION = 'a timedelta, a number of seconds, or a string such as "90s" or "1h30m"'
_UNITS = {
    unit: timedelta(**{keyword: 1})
    for keyword, units in {
        "milliseconds": ("ms",),
        "seconds": ("s", "sec", "second", "seconds"),
        "minutes": ("m", "min", "minute", "minutes"),
        "hours": ("h", "hour", "hours"),
        "days": ("d", "day", "days"),
        "weeks": ("w", "week", "weeks"),
    }.items()
    for unit in units
}
_DAY = timedelta(days=1)
_TICK = timedelta(seconds=1)
_MICROSECONDS = 1_000_000
_HOURS = 24
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


class Clock(Protocol):
    """Reads the time and sleeps."""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease; only differences are meaningful."""
        ...

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Sleep for the given time. Zero or less yields to the event loop once."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        return datetime.now(UTC)

    # The function itself, because a step reads this clock twice, and a method would double the
    # cost.
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Sleep for the given time. Zero or less yields to the event loop once."""
        await asyncio.sleep(finite_seconds(seconds))


def check_clock(clock: object) -> Clock:
    """Check for an object with the methods of a `Clock`."""
    if type(clock) is SystemClock:
        return clock
    methods = (getattr(clock, name, None) for name in ("now", "monotonic", "sleep"))
    if isinstance(clock, type) or not all(map(callable, methods)):
        raise InvalidArgument("clock", clock, "a Clock: an object with now, monotonic and sleep")
    return cast(Clock, clock)


class SyncedClock:
    """A clock that was set once, and then advances with another clock.

    A run uses its store's time, so that machines with different clocks agree on its waits.
    """

    __slots__ = ("_clock", "_from", "_second", "_set_to", "_text", "monotonic")

    def __init__(self, clock: Clock, set_to: datetime) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic
        self._from = self.monotonic()
        self._set_to = set_to
        self._second = 0.0
        self._text = ""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        return self._set_to + timedelta(seconds=self.monotonic() - self._from)

    def isoformat(self, monotonic: float) -> str:
        """Return the time at a reading of `monotonic`, formatted by `isoformat`."""
        # Called for each step, often several times per second: with the current second cached, no
        # datetime is needed, which is five times as fast. `_second` is the reading at its start.
        microseconds = round((monotonic - self._second) * 1e6)
        if not 0 <= microseconds < _MICROSECONDS or not self._text:
            at = self._set_to + timedelta(seconds=monotonic - self._from)
            self._text = isoformat(at)[:-5]
            microseconds = at.microsecond
            self._second = monotonic - microseconds / 1e6
        return self._text + _MILLISECONDS[microseconds // 1000]

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Sleep for the given time. Zero or less yields to the event loop once."""
        await self._clock.sleep(seconds)


def finite_seconds(value: float | timedelta) -> float:
    """Return a duration in seconds, at least zero; raise `InvalidDuration` if it is not finite."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    try:
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    except (TypeError, OverflowError):
        pass
    raise InvalidDuration("seconds", value, "a timedelta or a finite number of seconds")


def parse_duration(value: Duration, parameter: str = "duration") -> timedelta:
    """Return the duration as a `timedelta`, or raise `InvalidDuration` that names `parameter`.

    A string consists of numbers with units (ms, s, m, h, d, w, or their longer names): `"1h30m"`,
    `"2 days"`.
    """
    if type(value) is timedelta and value.days >= 0:
        return value
    try:
        duration = _read_duration(value)
    except OverflowError:
        expected = "a finite duration of at most 999,999,999 days"
        raise InvalidDuration(parameter, value, expected) from None
    except KeyError as error:
        hint = f"The unit {error} is not one of: {', '.join(_UNITS)}"
        raise InvalidDuration(parameter, value, _EXPECTED_DURATION, hint) from None
    if duration is None:
        raise InvalidDuration(parameter, value, _EXPECTED_DURATION)
    if duration < timedelta(0):
        raise InvalidDuration(parameter, value, "a duration >= 0")
    return duration


def add_duration(time: datetime, value: Duration, parameter: str = "duration") -> datetime:
    """Return the time after a duration, or raise `InvalidDuration` that names `parameter`."""
    try:
        return time + parse_duration(value, parameter)
    except OverflowError:
        expected = "a duration that ends before the year 10000"
        raise InvalidDuration(parameter, value, expected) from None


def from_milliseconds(number: float) -> timedelta:
    """Return a recorded duration, at most `timedelta.max`."""
    try:
        return timedelta(milliseconds=number)
    except OverflowError:
        return timedelta.max


def _read_duration(value: object) -> timedelta | None:
    match value:
        case timedelta():
            return value
        case str():
            return _read_duration_string(value.lower())
        case bool():
            return None
        case int() | float() if not math.isnan(value):
            return timedelta(seconds=value)
        case _:
            return None


def _read_duration_string(text: str) -> timedelta | None:
    total = timedelta(0)
    position = 0
    while position < len(text):
        amount = _AMOUNT.match(text, position)
        if amount is None:
            return None
        number, unit = amount.groups()
        total += float(number) * _UNITS[unit]
        position = amount.end()
    return total if position else None


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression with five fields, or six with seconds first, in a time zone.

    A local time that is skipped when daylight saving begins occurs once, at the change. A local
    time that is repeated when it ends occurs once, the first time. Expressions that match every
    hour of a day, such as `*/5 * * * *`, continue through the repeated hour.

        Cron("0 9 * * MON-FRI", tz="Europe/Berlin")
    """

    expr: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        # Any start will do: cronsim searches 50 years ahead, and leap years are at most 8 years
        # apart.
        self.next(datetime(2000, 1, 1, tzinfo=UTC))

    def next(self, after: datetime) -> datetime:
        """Return the first match strictly after `after`, in UTC."""
        start, zone = as_utc(after, "after"), _zone(self.tz)
        try:
            match = _next_match(self.expr, start, zone)
        except (CronSimError, TypeError, ValueError) as error:
            expected = "a cron expression of 5 fields, or 6 with seconds first"
            raise InvalidCron("expr", self.expr, expected, str(error)) from None
        except OverflowError:
            raise InvalidArgument("after", after, "a datetime well before the year 9999") from None
        except StopIteration:
            expected = "a cron expression that matches some date"
            raise InvalidCron("expr", self.expr, expected) from None
        return match


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        expected = 'the name of a time zone, such as "Europe/Berlin"'
        raise InvalidCron("tz", name, expected) from None


def _next_match(expr: str, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the first match after `after`.

    Cronsim gets naive local times, because its own handling of clock changes depends on how an
    expression is written.
    """
    if not isinstance(expr, str):
        raise TypeError("Not a string")
    local_times = CronSim(expr, _naive(after.astimezone(zone)))
    if len(local_times.hours) == _HOURS:
        return _next_by_the_clock(expr, after, zone)
    # When clocks are set back, a repeated local time was already matched.
    return next(match for each in local_times if (match := _first_instant(each, zone)) > after)


def _next_by_the_clock(expr: str, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the next match of an expression that continues through a repeated hour."""
    offset = _offset(after, zone)
    while True:
        local_time = next(CronSim(expr, _naive(after + offset)))
        match = local_time.replace(tzinfo=UTC) - offset
        change = _next_change(after, match, zone, offset)
        if change is None:
            return match
        offset = _offset(change, zone)
        if local_time < _naive(change + offset):
            return change
        after = change - _TICK


def _next_change(
    after: datetime, until: datetime, zone: ZoneInfo, offset: timedelta
) -> datetime | None:
    """Return when the zone's offset first changes after `after` and not after `until`."""
    start = after.replace(microsecond=0)
    # No zone has changed its clocks twice in a day.
    while (end := min(start + _DAY, until)) > start:
        if _offset(end, zone) != offset:
            while end - start > _TICK:
                middle = start + (end - start) // _TICK // 2 * _TICK
                if _offset(middle, zone) == offset:
                    start = middle
                else:
                    end = middle
            return end
        start = end
    return None


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta(0)


def _naive(local_time: datetime) -> datetime:
    return local_time.replace(tzinfo=None)


def _first_instant(local_time: datetime, zone: ZoneInfo) -> datetime:
    """Return when a local time first occurs in the zone, or when it is skipped, in UTC."""
    instant = local_time.replace(tzinfo=zone).astimezone(UTC)
    while _naive(instant.astimezone(zone)) != local_time:
        local_time = local_time.replace(second=0) + timedelta(minutes=1)
        instant = local_time.replace(tzinfo=zone).astimezone(UTC)
    return instant


_MILLISECONDS = tuple(f".{milliseconds:03}Z" for milliseconds in range(1000))
_latest_second = (datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01T00:00:00")


def isoformat(value: datetime) -> str:
    """Return a datetime in ISO 8601 format, in UTC with milliseconds and `Z`."""
    # This is called for each step, mostly several times per second: with the last second cached,
    # only the milliseconds are formatted, which is four times as fast. The pair is replaced as a
    # whole, so other threads see either the old or the new one.
    global _latest_second  # noqa: PLW0603  # a cache with one entry
    if type(value) is not datetime or value.tzinfo is not UTC:
        value = as_utc(value)
    second, text = _latest_second
    offset = value - second
    if offset.seconds or offset.days:
        second = value.replace(microsecond=0)
        text = second.isoformat()[:19]
        _latest_second = (second, text)
        offset = value - second
    return text + _MILLISECONDS[offset.microseconds // 1000]


def parse_iso(text: str, parameter: str = "text") -> datetime:
    """Parse an ISO 8601 string with a UTC offset, or raise `InvalidArgument`; return it in UTC."""
    try:
        value = datetime.fromisoformat(text)
        if value.tzinfo is UTC:
            return value
        if value.tzinfo is not None:
            return value.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    expected = 'an ISO 8601 string with a UTC offset, such as "2030-01-01T00:00:00.000Z"'
    raise InvalidArgument(parameter, text, expected)


def as_utc(value: object, parameter: str = "datetime") -> datetime:
    """Convert an aware datetime to UTC; raise `InvalidArgument` if it is naive."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        hint = "Pass tzinfo=, such as datetime(2030, 1, 1, tzinfo=UTC)"
        raise InvalidArgument(parameter, value, "a datetime with a time zone", hint)
    if value.tzinfo is UTC:
        return value
    try:
        return value.astimezone(UTC)
    except OverflowError:
        expected = "a datetime that can be represented in UTC"
        raise InvalidArgument(parameter, value, expected) from None
