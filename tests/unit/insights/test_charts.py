"""Where the bars and lines of charts are drawn."""

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.insights import HistoryPoint, HourDurations, Percentiles
from perdure.insights.charts import (
    HEIGHT,
    LogScale,
    depths,
    durations,
    round_top,
    slots,
    throughput,
)

NOON = datetime(2026, 11, 3, 12, tzinfo=UTC)


def point(n: int, **fields: object) -> HistoryPoint:
    return HistoryPoint(NOON + timedelta(minutes=n), **fields)  # type: ignore[arg-type]


def hour(n: int, *seconds: float) -> HourDurations:
    spans = [timedelta(seconds=each) for each in seconds]
    return HourDurations(NOON + timedelta(hours=n), Percentiles(5, *spans) if spans else None)


def test_bars_are_stacked_and_missing_data_is_a_gap() -> None:
    points = [point(0, completed=6, failed=2, cancelled=0, slots=1), point(1)]
    chart = throughput(points)
    shown_bars = [(bar.look, bar.x, bar.y, bar.height, bar.text) for bar in chart.bars]
    assert shown_bars == [
        ("missing", 50, HEIGHT - 3, 3, "no data"),
        ("completed", 5, HEIGHT * 0.25, HEIGHT * 0.75, "6 completed"),
        ("failed", 5, 0, HEIGHT * 0.25, "2 failed"),
    ]
    assert chart.summary == "8 runs ended, at most 8 in one bar."
    assert chart.rows == [(NOON, ("6", "0", "2"))]
    assert [tick.label for tick in chart.ticks] == ["8", "4", "0"]


def test_slots_in_use_are_an_area_under_a_line() -> None:
    chart = slots([point(0, slots=10, running=5), point(1), point(2, slots=10, running=0)])
    lines = [bar for bar in chart.bars if bar.look == "total"]
    assert [(bar.y, bar.x) for bar in lines] == [(0, 0), (0, pytest.approx(200 / 3))]
    assert chart.rows[-1] == (NOON, ("10", "5"))
    assert chart.summary == "At most 5 slots in use."


def test_the_five_deepest_queues_are_shown_and_the_others_summed() -> None:
    counts = {"": 1, **{f"q{n}": 10 * n for n in range(1, 8)}}
    chart = depths([point(0, slots=1, depths=counts), point(1, slots=1, depths={"q1": 90})])
    assert [*chart.legend.values()] == ["q1", "q7", "q6", "q5", "q4", "other queues"]
    assert chart.rows[-1] == (NOON, ("10", "70", "60", "50", "40", "51"))
    assert [*depths([point(0, slots=1, depths={"a": 1})]).legend.values()] == ["a"]


def test_percentiles_are_lines_on_a_log_scale_with_gaps() -> None:
    chart = durations([hour(0, 0.01, 0.1, 1), hour(1, 0.01, 0.1, 1), hour(2), hour(3, 0.1, 1, 1)])
    assert [tick.label for tick in chart.ticks] == ["10 ms", "100 ms", "1 s"]
    assert chart.lines["p95"] == "M6.25 56.0L12.50 56.0L37.50 56.0h6.25M81.25 0.0L87.50 0.0h6.25"
    assert [bar.look for bar in chart.bars] == ["hover", "hover", "missing", "hover"]
    assert chart.bars[0].text == "p50 10 ms, p95 100 ms, p99 1 s"
    assert [texts for _, texts in chart.rows] == [
        ("5", "100 ms", "1 s", "1 s"),
        *[("5", "10 ms", "100 ms", "1 s")] * 2,
    ]
    assert chart.summary == "15 runs ended, the slowest in about 1 s."


def test_a_chart_without_durations_has_no_lines() -> None:
    chart = durations([hour(0), hour(1)])
    assert {*chart.lines.values()} == {""}
    assert chart.summary == "0 runs ended."


spans = st.timedeltas(timedelta(0), timedelta(days=40))


@given(spans, spans)
def test_durations_are_inside_of_a_log_scale_and_in_order(one: timedelta, other: timedelta) -> None:
    short, long = sorted((one, other))
    scale = LogScale(short, long)
    assert 0 <= scale.y(long) <= scale.y(short) <= HEIGHT
    assert (scale.ticks[0].y, scale.ticks[-1].y) == (HEIGHT, 0)
    labels = [tick.y for tick in scale.ticks if tick.label]
    assert all(low - high >= 13 for low, high in pairwise(labels))


@given(st.integers(0, 10**12))
def test_an_axis_ends_with_a_round_number(most: int) -> None:
    top = round_top(most)
    assert top >= most
    assert top <= max(4, 2 * most)
    assert re.fullmatch(r"([1234568]|15)0*", str(top))
