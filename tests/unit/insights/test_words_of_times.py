"""Times, durations, numbers and strings."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.insights import Tally
from perdure.insights.words import age, duration, size, tally_words, time_of_day, visible

NOW = datetime(2026, 11, 3, 14, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (0.0004, "<1 ms"),
        (0.0124, "12 ms"),
        (0.9996, "999 ms"),
        (10.25, "10.2 s"),
        (30, "30 s"),
        (59.96, "60 s"),
        (3.14, "3.1 s"),
        (61, "1 min 1 s"),
        (22_320, "6 h 12 min"),
        (86_400, "1 day"),
        (10**9, "11,574 days"),
        (-5, "0 ms"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, words: str) -> None:
    assert duration(timedelta(seconds=seconds)) == words


@given(st.timedeltas())
def test_no_duration_is_negative(span: timedelta) -> None:
    assert "-" not in duration(span)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-90, "1 min ago"), (7200, "in 2 h"), (0, "0 s ago"), (-86_400 * 2, "2 days ago")],
)
def test_an_age_is_past_or_future(seconds: int, words: str) -> None:
    assert age(NOW + timedelta(seconds=seconds), NOW) == words


def test_a_time_of_another_day_has_a_date() -> None:
    assert time_of_day(NOW, NOW) == "14:00 UTC"
    assert time_of_day(NOW + timedelta(seconds=7), NOW) == "14:00:07 UTC"
    assert time_of_day(NOW - timedelta(days=1), NOW) == "2 Nov 14:00 UTC"


def test_a_time_is_shown_in_the_zone_of_the_reader() -> None:
    assert time_of_day(NOW, NOW, ZoneInfo("Europe/Berlin")) == "15:00 CET"


def test_a_capped_count_says_that_there_are_more() -> None:
    assert tally_words(Tally(10_000, True)) == "10,000+"
    assert tally_words(Tally(12)) == "12"
    assert tally_words(None) == "0"


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (4100, "4.1 KB"), (16_000_000, "16 MB")]
)
def test_a_size_has_one_unit(count: int, words: str) -> None:
    assert size(count) == words


def test_invisible_characters_are_shown() -> None:
    assert visible("a\u202eb\u061c\x1b[31m") == "a\\u202eb\\u061c\\u001b[31m"
    assert visible("line\n\ttab ü 🎉") == "line\n\ttab ü 🎉"
