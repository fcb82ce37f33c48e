"""Nominal times of cron expressions, compared with a list that is made minute by minute."""

from array import array
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from perdure.clock import Cron
from tests.lengths import LONG

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")
# This year has each change of the offset, and a 29 February.
BEGIN, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030 if LONG else 2021, 1, 1, tzinfo=UTC)
MINUTE, DAY = timedelta(minutes=1), 24 * 60

EXPRESSIONS = (
    "30 2 * * *",
    "0 9 * * MON-FRI",
    "15,45 1-3 * * *",
    "*/20 2 * * *",
    "0 */2 * * *",
    "30 1 * 4,10 SUN#1",
    "0 2 L * *",
    "0 * * * *",
    "30 * * * *",
    "*/20 * * 3,4,10,11 *",
    "*/15 0-23 * 3,10 *",
)


@cache
def local_minutes(tz: str) -> "array[int]":
    """Return the local time at each UTC minute, in minutes."""
    zone, first = ZoneInfo(tz), BEGIN.toordinal() * DAY
    instants = (BEGIN + MINUTE * n for n in range((END - BEGIN) // MINUTE))
    offsets = (instant.astimezone(zone).utcoffset() or MINUTE * 0 for instant in instants)
    return array("q", (first + n + offset // MINUTE for n, offset in enumerate(offsets)))


def brute_force(expr: str, tz: str) -> Iterator[datetime]:
    """Yield each minute at which the expression occurs.

    A local time that is seen again does not count, unless the expression matches every hour. If
    local times between one minute and the next are skipped, one that matches occurs at the latter.
    """
    matches, is_hourly = matcher(expr)
    local_times = local_minutes(tz)
    latest = local_times[0] - 1
    for n, local in enumerate(local_times):
        if local == latest + 1:
            is_match = matches(local)
        elif local > latest:
            is_match = any(map(matches, range(latest + 1, local + 1)))
        elif is_hourly:
            is_match = matches(local)
        else:
            continue
        latest = local
        if is_match:
            yield BEGIN + MINUTE * n


def matcher(expr: str) -> tuple[Callable[[int], bool], bool]:
    """Return whether the expression matches a local time, and whether it matches every hour."""
    cron = CronSim(expr, datetime(2020, 1, 1))
    in_day = [n // 60 in cron.hours and n % 60 in cron.minutes for n in range(DAY)]

    @cache
    def is_on(day: int) -> bool:
        local_day = date.fromordinal(day)
        return local_day.month in cron.months and cron.match_day(local_day)

    return lambda local: in_day[local % DAY] and is_on(local // DAY), len(cron.hours) == 24


def times(expr: str, tz: str) -> Iterator[datetime]:
    cron, time = Cron(expr, tz), BEGIN - MINUTE
    while (time := cron.next(time)) < END:
        yield time


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("expr", EXPRESSIONS)
@pytest.mark.parametrize("tz", ZONES)
def test_years_equal_a_walk_minute_by_minute(expr: str, tz: str) -> None:
    assert list(times(expr, tz)) == list(brute_force(expr, tz))


def on(day: datetime, expr: str, tz: str) -> list[str]:
    """Return the local times of a day, with their offsets, at which the expression occurs."""
    cron, zone = Cron(expr, tz), ZoneInfo(tz)
    time, times = day.replace(tzinfo=zone) - MINUTE, []
    while (time := cron.next(time).astimezone(zone)).date() == day.date():
        times.append(f"{time:%H:%M%z}")
    return times


SPRING, AUTUMN = datetime(2026, 3, 29), datetime(2026, 10, 25)
LATER, EARLIER = datetime(2026, 10, 4), datetime(2026, 4, 5)


def test_every_second_hour_when_an_hour_is_skipped_or_repeated() -> None:
    """Two o'clock does not exist in spring, and comes twice in autumn."""
    spring, autumn = (on(day, "0 */2 * * *", "Europe/Berlin") for day in (SPRING, AUTUMN))
    assert spring[:3] == ["00:00+0100", "03:00+0200", "04:00+0200"]
    assert autumn[:3] == ["00:00+0200", "02:00+0200", "04:00+0100"]


def test_several_skipped_times_occur_once_together() -> None:
    assert on(SPRING, "*/20 2 * * *", "Europe/Berlin") == ["03:00+0200"]
    assert len(on(AUTUMN, "*/20 2 * * *", "Europe/Berlin")) == 3


def test_every_hour_where_clocks_change_by_half_an_hour() -> None:
    """On Lord Howe Island two o'clock is skipped, and half past one is repeated."""
    skipped = on(LATER, "0 * * * *", "Australia/Lord_Howe")
    repeated = on(EARLIER, "30 * * * *", "Australia/Lord_Howe")
    assert skipped[1:4] == ["01:00+1030", "02:30+1100", "03:00+1100"]
    assert repeated[1:4] == ["01:30+1100", "01:30+1030", "02:30+1030"]


@pytest.mark.parametrize("tz", ["Europe/Berlin", "Australia/Lord_Howe"])
def test_a_fixed_time_occurs_once_on_each_day(tz: str) -> None:
    for day in (SPRING, AUTUMN, LATER, EARLIER):
        assert len(on(day, "45 1 * * *", tz)) == 1
        assert len(on(day, "15 2 * * *", tz)) == 1
