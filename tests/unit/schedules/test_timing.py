"""Nominal times, jitter and the ids of runs."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.clock import Cron
from perdure.errors import InvalidArgument, InvalidDuration
from perdure.schedules import (
    Schedule,
    Timing,
    first_time,
    next_time,
    planned_start,
    run_id_at,
    times_between,
    timing_of,
)
from perdure.schedules.timing import gap_after, skip_periods

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)

instants = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))
intervals = st.integers(1000, 10**9).map(lambda ms: timedelta(milliseconds=ms))
timings = st.builds(
    lambda every, jitter, now: timing_of(Schedule(every=every, jitter=jitter), now),
    intervals | st.sampled_from([Cron("30 2 * * *", tz="Europe/Berlin"), Cron("*/20 * * * *")]),
    st.sampled_from([0, 1, "5m", "1d"]),
    instants,
)


def timing(every: Any, **options: Any) -> Timing:
    return timing_of(Schedule(every=every, **options), NOW)


def test_an_interval_is_counted_from_the_creation_of_the_schedule() -> None:
    assert next_time(timing("1h"), NOW) == NOW + HOUR
    assert next_time(timing("1h"), NOW + HOUR * 1.5) == NOW + HOUR * 2


def test_an_interval_is_counted_from_start_at_which_is_the_first_time() -> None:
    later = timing("1h", start_at=NOW + timedelta(days=1))
    assert next_time(later, NOW) == NOW + timedelta(days=1)
    past = timing("1h", start_at=NOW - timedelta(minutes=90))
    assert next_time(past, NOW) == NOW + timedelta(minutes=30)


def test_a_cron_expression_does_not_start_before_start_at() -> None:
    start_at = NOW.replace(day=10, hour=9)
    daily = timing(Cron("0 9 * * *"), start_at=start_at)
    assert next_time(daily, NOW) == start_at


def test_end_at_is_the_last_time() -> None:
    twice = timing("1h", end_at=NOW + HOUR * 2)
    assert next_time(twice, NOW + HOUR) == NOW + HOUR * 2
    assert next_time(twice, NOW + HOUR * 2) is None


@given(timings, instants)
def test_times_advance_and_leave_none_out(timing: Timing, after: datetime) -> None:
    """The time after the one before it is the same time."""
    following = next_time(timing, after)
    assert following is not None
    assert following > after
    assert next_time(timing, following - timedelta(microseconds=1)) == following


@given(timings, instants, st.text(min_size=1, max_size=5))
def test_jitter_is_fixed_and_ends_before_the_next_time(
    timing: Timing, after: datetime, name: str
) -> None:
    time = next_time(timing, after)
    assert time is not None
    start = planned_start(timing, name, time)
    assert start == planned_start(timing, name, time)
    assert time <= start <= time + min(timing.jitter, gap_after(timing, time))


def test_jitter_spreads_schedules_and_times() -> None:
    jittered = timing("1d", jitter="1h")
    days = [NOW + timedelta(days=n) for n in range(100)]
    by_name = {planned_start(jittered, f"s{n}", NOW) - NOW for n in range(100)}
    by_time = {planned_start(jittered, "s", day) - day for day in days}
    for delays in (by_name, by_time):
        assert len(delays) == 100
        assert max(delays) - min(delays) > timedelta(minutes=50)


@given(intervals, instants, instants)
def test_skipped_periods_are_those_that_a_walk_counts(
    every: timedelta, after: datetime, until: datetime
) -> None:
    until = min(until, after + every * 50)
    interval = timing_of(Schedule(every=every), NOW)
    walked, time = 0, after
    while (following := next_time(interval, time)) is not None and following <= until:
        walked, time = walked + 1, following
    assert skip_periods(interval, after, until) == (walked, time)


def test_times_between_include_both_ends_and_ignore_the_bounds_of_the_schedule() -> None:
    hourly = timing("1h", start_at=NOW, end_at=NOW + HOUR)
    times = list(times_between(hourly, NOW - HOUR, NOW + HOUR * 2))
    assert times == [NOW + HOUR * n for n in (-1, 0, 1, 2)]


def test_the_id_of_a_run_contains_its_time_in_utc() -> None:
    assert run_id_at("daily", NOW) == "daily@2030-01-01T12:00:00Z"
    precise = NOW + timedelta(milliseconds=5)
    assert run_id_at("daily", precise) == "daily@2030-01-01T12:00:00.005Z"


@pytest.mark.parametrize("every", [0, "0s", -1, 0.5, "1500us", 1.0005, None, True, float("inf")])
def test_intervals_that_are_refused(every: Any) -> None:
    with pytest.raises(InvalidDuration, match=r"^every: expected a Cron, or a duration"):
        Schedule(every=every)


def test_an_interval_of_more_than_a_century_is_refused() -> None:
    with pytest.raises(InvalidDuration, match=r"^every: expected a duration of at most 100 years"):
        Schedule(every=timedelta(days=999_999))


@pytest.mark.parametrize("every", ["1s", timedelta(days=36_525), Cron("0 0 29 2 *")])
def test_times_end_before_those_that_cannot_be_represented(every: Any) -> None:
    late = timing(every, jitter=timedelta(days=36_525))
    last = datetime(9699, 12, 31, tzinfo=UTC)
    following = next_time(late, last)
    assert following is not None
    assert planned_start(late, "s", following) >= following
    far = datetime(9999, 12, 30, tzinfo=UTC)
    assert next_time(late, far) is None
    with pytest.raises(InvalidArgument, match=r"^start_at: expected a datetime before .*9700"):
        first_time(timing(every, start_at=far), NOW)


def test_a_cron_expression_as_a_string_is_refused_with_advice() -> None:
    with pytest.raises(InvalidDuration, match=r'written as Cron\("0 9'):
        Schedule(every="0 9 * * *")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "queue"}, r"^overlap: expected one of 'skip', 'buffer_one'"),
        ({"on_failure": "stop"}, r"^on_failure: expected one of 'continue', 'pause'"),
        ({"jitter": "a while"}, r"^jitter: "),
        ({"catch_up": -1}, r"^catch_up: "),
        ({"start_at": datetime(2030, 1, 1)}, r"^start_at: expected a datetime with a time zone"),
        ({"start_at": NOW, "end_at": NOW - HOUR}, r"^end_at: expected a datetime after start_at"),
    ],
)
def test_options_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Schedule(every="1h", **options)


def test_a_schedule_that_never_starts_a_run_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^end_at: .*No run would ever start"):
        first_time(timing("1h", end_at=NOW + timedelta(minutes=59)), NOW)
