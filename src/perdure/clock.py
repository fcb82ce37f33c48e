"""Time: the only module that reads the clock or sleeps, and the texts and durations time comes in.

Everything that waits takes a `Clock`, so a test can move a week in a microsecond.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeAlias, cast
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure.errors import InvalidArgument, InvalidCron, InvalidDuration

Duration: TypeAlias = timedelta | int | float | str

_WANTED_DURATION = 'a duration: a timedelta, seconds as a number, or text such as "90s" or "1h30m"'
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
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


class Clock(Protocol):
    """What tells the time and waits."""

    def now(self) -> datetime:
        """Give the present moment in UTC."""
        ...

    def monotonic(self) -> float:
        """Give seconds that only grow; good for measuring, meaningless by themselves."""
        ...

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait so long; zero or less lets other tasks run once."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Give the present moment in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Give seconds that only grow, also when the machine's time is set back."""
        return time.monotonic()

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait so long; zero or less lets other tasks run once."""
        await asyncio.sleep(finite_seconds(seconds))


def check_clock(clock: object, parameter: str = "clock") -> Clock:
    """Give the clock back, or raise: an object that tells the time and waits."""
    verbs = (getattr(clock, verb, None) for verb in ("now", "monotonic", "sleep"))
    if isinstance(clock, type) or not all(map(callable, verbs)):
        raise InvalidArgument(parameter, clock, "a clock: an object with now, monotonic and sleep")
    return cast(Clock, clock)


class SyncedClock:
    """A clock that was set by another at one moment, and goes on at its own clock's pace.

    A run lives by the time of its store: two machines whose clocks differ agree on its waits.
    """

    __slots__ = ("_clock", "_from", "_set_to")

    def __init__(self, clock: Clock, set_to: datetime) -> None:
        self._clock = clock
        self._from = clock.monotonic()
        self._set_to = set_to

    def now(self) -> datetime:
        """Give the present moment in UTC."""
        return self._set_to + timedelta(seconds=self._clock.monotonic() - self._from)

    def monotonic(self) -> float:
        """Give seconds that only grow."""
        return self._clock.monotonic()

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait so long; zero or less lets other tasks run once."""
        await self._clock.sleep(seconds)


def finite_seconds(value: float | timedelta, parameter: str = "seconds") -> float:
    """Give a time to wait as seconds, never negative; NaN and infinity are `InvalidDuration`."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    try:
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    except (TypeError, OverflowError):
        pass
    raise InvalidDuration(parameter, value, "a timedelta or a finite number of seconds")


def parse_duration(value: Duration, parameter: str = "duration") -> timedelta:
    """Give the duration as a `timedelta`, or raise `InvalidDuration` naming `parameter`.

    Text is amounts with units (ms, s, m, h, d, w, or their longer names): `"1h30m"`, `"2 days"`.
    """
    try:
        duration = _read_duration(value)
    except OverflowError:
        expected = "a finite duration of at most 999,999,999 days"
        raise InvalidDuration(parameter, value, expected) from None
    except KeyError as error:
        hint = f"The unit {error} is none of: {', '.join(_UNITS)}"
        raise InvalidDuration(parameter, value, _WANTED_DURATION, hint) from None
    if duration is None:
        raise InvalidDuration(parameter, value, _WANTED_DURATION)
    if duration < timedelta(0):
        raise InvalidDuration(parameter, value, "a duration of zero or more")
    return duration


def _read_duration(value: object) -> timedelta | None:
    match value:
        case timedelta():
            return value
        case str():
            return _read_duration_text(value.lower())
        case bool():
            return None
        case int() | float() if not math.isnan(value):
            return timedelta(seconds=value)
        case _:
            return None


def _read_duration_text(text: str) -> timedelta | None:
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
    """A recurring time of five fields, or six with seconds first, in a time zone.

    Fixed times of day come once on every matching day: one that the zone's clocks skip comes when
    they jump, one that comes twice counts the first time. Expressions whose minutes or hours begin
    with `*` follow the clock as it goes.

        Cron("0 9 * * MON-FRI", tz="Europe/Berlin")
    """

    expr: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        # Any moment will do: cronsim looks 50 years ahead, and no gap between leap years is longer.
        self.next(datetime(2000, 1, 1, tzinfo=UTC))

    def next(self, after: datetime) -> datetime:
        """Give the first time strictly after `after`, in UTC."""
        start, zone = as_utc(after, "after"), _zone(self.tz)
        try:
            for moment in _occurrences(self.expr, start, zone):
                # Clocks set back show times again that were counted when they came first.
                if moment > start:
                    return moment
        except (CronSimError, TypeError, ValueError) as error:
            expected = "a cron expression of 5 fields, or 6 with seconds first"
            raise InvalidCron("expr", self.expr, expected, str(error)) from None
        except OverflowError:
            raise InvalidArgument("after", after, "a moment well before the year 9999") from None
        raise InvalidCron("expr", self.expr, "a cron expression that some day comes true")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        expected = 'the name of a time zone, such as "Europe/Berlin"'
        raise InvalidCron("tz", name, expected) from None


def _occurrences(expr: str, after: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    if not isinstance(expr, str):
        raise TypeError("Not text")
    local = after.astimezone(zone)
    minutes_and_hours = expr.split()[-5:-3]
    if any(field.startswith("*") for field in minutes_and_hours):
        return (moment.astimezone(UTC) for moment in CronSim(expr, local))
    wall_times = CronSim(expr, local.replace(tzinfo=None))
    return (_first_showing(wall_time, zone) for wall_time in wall_times)


def _first_showing(wall_time: datetime, zone: ZoneInfo) -> datetime:
    """Give the moment at which clocks in the zone first show this time, or jump over it."""
    moment = wall_time.replace(tzinfo=zone).astimezone(UTC)
    while moment.astimezone(zone).replace(tzinfo=None) != wall_time:
        wall_time = wall_time.replace(second=0) + timedelta(minutes=1)
        moment = wall_time.replace(tzinfo=zone).astimezone(UTC)
    return moment


_MILLISECONDS = tuple(f".{milliseconds:03}Z" for milliseconds in range(1000))
_latest_second = (datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01T00:00:00")


def isoformat(moment: datetime) -> str:
    """Give a moment as ISO 8601 text in UTC with milliseconds and `Z`."""
    # Each step asks for this text, and most ask within the same second: only the last three digits
    # are new then, which is four times as quick. The pair is replaced whole: threads see either.
    global _latest_second  # noqa: PLW0603  # a cache of one
    if type(moment) is not datetime or moment.tzinfo is not UTC:
        moment = as_utc(moment)
    second, text = _latest_second
    since = moment - second
    if since.seconds or since.days:
        second = moment.replace(microsecond=0)
        text = second.isoformat()[:19]
        _latest_second = (second, text)
        since = moment - second
    return text + _MILLISECONDS[since.microseconds // 1000]


def parse_iso(text: str, parameter: str = "text") -> datetime:
    """Give the moment of an ISO 8601 text in UTC; one without an offset is `InvalidArgument`."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is UTC:
            return moment
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    expected = 'ISO 8601 text with an offset, such as "2030-01-01T00:00:00.000Z"'
    raise InvalidArgument(parameter, text, expected)


def as_utc(moment: object, parameter: str = "moment") -> datetime:
    """Give an aware datetime in UTC; a naive one is `InvalidArgument`."""
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidArgument(parameter, moment, "a datetime with a time zone")
    if moment.tzinfo is UTC:
        return moment
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        expected = "a datetime that UTC has too"
        raise InvalidArgument(parameter, moment, expected) from None
