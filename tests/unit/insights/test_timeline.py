"""Where the bars of a timeline are drawn."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.insights import InFlight, RunFacts, RunRow, StepRow, WaitFacts, Why
from perdure.insights.timeline import Scale, draw, merge_spans

START = datetime(2026, 11, 3, 14, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def step(key: str, begin: float, end: float, kind: str = "step", **fields: Any) -> StepRow:
    return StepRow(
        key=key,
        name=key,
        kind=kind,
        ok=fields.pop("ok", True),
        branch=fields.pop("branch", ""),
        started_at=at(begin),
        ended_at=at(end),
        duration=timedelta(seconds=end - begin),
        attempts=fields.pop("attempts", 1),
        **fields,
    )


def facts(**fields: Any) -> RunFacts:
    run = RunRow(
        "r", "order", 1, "running", "", {}, START, START, None, None, None, None, (), 0, 0, 0, "",
        "", "", 0,
    )  # fmt: skip
    return RunFacts(run, Why("running", "…"), **fields)


spans = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)).map(lambda s: (at(s[0]), at(s[0] + s[1]))),
    min_size=1,
)


@given(spans)
def test_a_scale_keeps_the_order_of_times(busy: list[tuple[datetime, datetime]]) -> None:
    begin, end = min(first for first, _ in busy), max(last for _, last in busy)
    scale = Scale(begin, end, busy)
    times = sorted(time for span in busy for time in span)
    places = [scale.x(time) for time in times]
    assert all(left <= right + 1e-6 for left, right in pairwise(places))
    assert places[0] >= 0
    assert places[-1] <= 100


def test_overlapping_spans_are_one() -> None:
    merged = merge_spans([(at(5), at(6)), (at(0), at(2)), (at(1), at(3))])
    assert merged == [(at(0), at(3)), (at(5), at(6))]


def test_a_long_wait_does_not_squeeze_the_steps() -> None:
    steps = [
        step("charge", 0, 1),
        step("settle", 1, 86_400, "sleep"),
        step("ship", 86_400, 86_401),
    ]
    picture = draw(facts(), steps, is_last=True, now=at(90_000))
    charge, settle, ship = picture.branches[0][1]
    assert charge.width > 25
    assert ship.width > 25
    assert 25 < settle.width < 40
    assert [gap.length for gap in picture.gaps] == [timedelta(seconds=86_399)]


def test_a_call_of_seconds_is_drawn_wider_than_a_step_of_less_than_a_millisecond() -> None:
    steps = [step("charge", 0, 0.0002), step("ship", 0.0002, 10.3, "call")]
    charge, ship = draw(facts(), steps, is_last=True, now=at(11)).bars
    assert charge.width < 5
    assert ship.width > 90


def test_a_wait_is_not_drawn_shorter_than_a_step_that_takes_less_time() -> None:
    steps = [step("charge", 0, 1), step("label", 1, 11, "call"), step("ship", 11, 11.5)]
    charge, label, ship = draw(facts(), steps, is_last=True, now=at(12)).bars
    assert ship.width < charge.width <= label.width + 1e-6
    assert ship.width > 10


def test_a_wait_stays_visible_next_to_a_much_longer_one() -> None:
    wait = WaitFacts("delivery", "event", event="delivered", since=at(1230))
    steps = [
        step("charge", 0, 1),
        step("approval", 1, 1200, "event"),
        step("label", 1200, 1230, "call"),
    ]
    bars = draw(facts(waits=(wait,)), steps, is_last=True, now=at(90_000)).bars
    charge, approval, label, delivery = (bar.width for bar in bars)
    assert charge <= min(approval, label, delivery) + 1e-6
    assert charge > 20


@given(spans)
def test_a_longer_pause_is_never_drawn_shorter(busy: list[tuple[datetime, datetime]]) -> None:
    begin, end = min(first for first, _ in busy), max(last for _, last in busy)
    scale = Scale(begin, end, busy)
    pauses = [(left, right) for (_, left), (right, _) in pairwise(merge_spans(busy))]
    pauses.sort(key=lambda pause: pause[1] - pause[0])
    widths = [scale.x(right) - scale.x(left) for left, right in pauses]
    assert all(shorter <= longer + 1e-6 for shorter, longer in pairwise(widths))


def test_a_pending_wait_begins_when_it_began() -> None:
    """Another branch recorded a step in the meantime."""
    wait = WaitFacts("approval", "event", event="approved", since=at(1))
    steps = [step("charge", 0, 1), step("ship", 5, 9)]
    charge, _, approval = draw(facts(waits=(wait,)), steps, is_last=True, now=at(10)).branches[0][1]
    assert approval.x == charge.x + charge.width
    assert round(approval.x + approval.width) == 100


def test_attempts_are_ticks() -> None:
    picture = draw(facts(), [step("ship", 0, 5, attempts=5, ok=False)], is_last=True, now=at(9))
    assert len(picture.branches[0][1][0].ticks) == 4


def test_a_step_in_flight_is_open_until_now() -> None:
    flying = InFlight("r", "order", "ship", at(2), worker="w-1")
    picture = draw(facts(in_flight=(flying,)), [step("charge", 0, 1)], is_last=True, now=at(4))
    ship = picture.branches[0][1][1]
    assert (ship.look, round(ship.x + ship.width)) == ("open", 100)


def test_what_is_pending_belongs_to_the_last_page() -> None:
    wait = WaitFacts("approval", "event", event="approved")
    run = facts(waits=(wait,))
    keys = [
        [bar.key for _, bars in draw(run, [], is_last=last, now=at(1)).branches for bar in bars]
        for last in (False, True)
    ]
    assert keys == [[], ["approval"]]


def test_branches_are_ordered_by_their_beginning() -> None:
    steps = [step("b", 5, 6), step("a[0]", 0, 1, branch="a"), step("a[1]", 0, 2, branch="a")]
    picture = draw(facts(), steps, is_last=True, now=at(9))
    assert [branch for branch, _ in picture.branches] == ["a", ""]
