"""When the steps of a long run ended, and how that is drawn."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.insights import Insights, StepPeriod
from perdure.insights.charts import STRIP, Bar, density
from perdure.insights.density import PERIODS, periods_of
from perdure.insights.redaction import NOTHING_REDACTED
from perdure.insights.steps import steps_page
from perdure.snapshot import Snapshot, new_snapshot
from perdure.stores import MemoryStore
from tests.unit.insights.long_runs import BEGIN, create_long_run, long_snapshot, record


def snapshot_of(*records: dict[str, Any]) -> Snapshot:
    snapshot: Any = new_snapshot("order", now=BEGIN)
    snapshot["steps"] = {f"s{n}": each for n, each in enumerate(records)}
    result: Snapshot = snapshot
    return result


def bars_of(snapshot: Snapshot, look: str, after: str | None = None, limit: int = 50) -> list[Bar]:
    chart = density(steps_page(snapshot, NOTHING_REDACTED, after, limit))
    return [bar for bar in chart.bars if bar.look == look]


records = st.lists(
    st.builds(
        record,
        st.floats(0, 1e6),
        ok=st.booleans(),
        kind=st.sampled_from(["step", "sleep", "event"]),
        durationMs=st.integers(0, 10**7),
    ),
    min_size=1,
    max_size=80,
)


@given(records)
def test_every_step_is_counted_in_the_period_in_which_it_ended(each: list[dict[str, Any]]) -> None:
    periods = periods_of(snapshot_of(*each))
    assert sum(period.count for period in periods) == len(each)
    assert sum(period.failed for period in periods) == sum(not record["ok"] for record in each)
    assert all(left.end == right.begin for left, right in pairwise(periods))
    assert 1 <= len(periods) <= PERIODS


def test_a_long_pause_does_not_squeeze_the_steps() -> None:
    periods = periods_of(long_snapshot(1000))
    assert len(periods) == PERIODS
    assert sum(period.count > 0 for period in periods) > PERIODS * 0.7
    assert max(period.end - period.begin for period in periods) > timedelta(hours=1)


def test_steps_that_ended_at_the_same_time_are_one_period() -> None:
    periods = periods_of(snapshot_of(record(5), record(5, ok=False)))
    at = BEGIN + timedelta(seconds=5)
    assert periods == (StepPeriod(at, at, 2, 1),)


def test_steps_without_times_have_no_periods() -> None:
    assert periods_of(snapshot_of({"ok": True}, {"ok": True, "at": "soon"})) == ()


async def test_only_a_page_that_is_not_all_has_periods() -> None:
    store = MemoryStore()
    await create_long_run(store, "long", 250)
    insights = Insights(store)
    assert (await insights.steps("long", limit=250)).periods == ()
    assert (await insights.steps("long", limit=100)).periods


def test_bars_are_as_high_as_their_share_and_failures_are_visible() -> None:
    steps = [record(n / 100, ok=n != 3) for n in range(400)] + [record(100)]
    chart = density(steps_page(snapshot_of(*steps), NOTHING_REDACTED, limit=50))
    (failed,) = [bar for bar in chart.bars if bar.look == "failed"]
    assert failed.height == 4
    bars = [bar for bar in chart.bars if bar.look in ("completed", "failed")]
    assert all(0 <= bar.y < bar.y + bar.height <= STRIP for bar in bars)
    assert all(0 <= bar.x < bar.x + bar.width <= 100 for bar in bars)
    assert chart.summary.startswith("401 steps, 1 failed, at most ")
    assert sum(int(texts[0]) for _, texts in chart.rows) == 401


def test_the_line_marks_where_the_listed_steps_ended() -> None:
    snapshot = long_snapshot(1000)
    (first,), (last,) = (bars_of(snapshot, "listed", after) for after in (None, "pack#950"))
    assert (first.x, first.text) == (0, "50 steps listed")
    assert last.x + last.width == pytest.approx(100)
    assert 3 < first.width < 8
    (line,) = bars_of(snapshot, "rest")
    assert (line.x, line.width) == (0, 100)


def test_a_line_that_marks_very_few_steps_is_still_visible() -> None:
    (last,) = bars_of(long_snapshot(5000), "listed", "pack#4999")
    assert (last.x, last.width) == (99, 1)
