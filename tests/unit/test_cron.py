"""Nominal times of cron expressions, compared with a list that is made minute by minute."""

from array import array
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from perdure.clock import Cron

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")
BEGIN, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)
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
    "*/20 * * * *",
    "*/15 0-23 * 3,4,9-11 *",
)


@cache
def local_minutes(tz: str) -> "array[int]":
    """Return the local time at each UTC minute of ten years, in minutes."""
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
@pytest.mark.parametrize("expr", EXPRESSIONS)
@pytest.mark.parametrize("tz", ZONES)
def test_ten_years_equal_a_walk_minute_by_minute(expr: str, tz: str) -> None:
    assert list(times(expr, tz)) == list(brute_force(expr, tz))
