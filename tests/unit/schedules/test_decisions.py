"""What a schedule does when it is woken, for each overlap policy."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.clock import Cron
from perdure.schedules import (
    Decision,
    RunEnd,
    Schedule,
    ScheduleState,
    Timing,
    decide,
    timing_of,
)
from perdure.schedules.decisions import MAX_BUFFER, MAX_STARTS

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
NEW = ScheduleState(BEGIN)


def timing(every: Any = "1h", **options: Any) -> Timing:
    return timing_of(Schedule(every=every, **options), BEGIN)


def wake(
    timing: Timing,
    state: ScheduleState,
    now: datetime,
    over: Iterable[datetime] = (),
    end: RunEnd = "completed",
) -> Decision:
    return decide("s", timing, state, now, dict.fromkeys(over, end))


def hour(number: int) -> datetime:
    return BEGIN + HOUR * number


def hours(*numbers: int) -> tuple[datetime, ...]:
    return tuple(map(hour, numbers))


def test_a_due_time_starts_and_the_next_one_is_computed_from_it() -> None:
    late = BEGIN + HOUR + MINUTE * 7
    decision = wake(timing(), NEW, late)
    assert (decision.starts, decision.wake_at) == (hours(1), BEGIN + HOUR * 2)
    assert decision.state == ScheduleState(hour(1), hour(1), open=hours(1), started=1)


def test_nothing_is_due_before_the_time() -> None:
    decision = wake(timing(), NEW, BEGIN + HOUR - SECOND)
    assert (decision.starts, decision.state) == ((), NEW)


def test_times_missed_by_more_than_catch_up_are_skipped_and_counted() -> None:
    decision = wake(timing(overlap="allow", catch_up="2h"), NEW, BEGIN + HOUR * 10)
    assert (decision.starts, decision.state.missed) == (hours(8, 9, 10), 7)


def test_a_missed_time_is_not_caught_up_although_it_was_the_last() -> None:
    """No worker runs from before nine until eight in the evening: nine is skipped."""
    daily = timing(Cron("0 9 * * *"), catch_up="1h")
    decision = wake(daily, NEW, BEGIN.replace(hour=20))
    assert (decision.starts, decision.state.missed) == ((), 1)
    assert decision.wake_at == BEGIN + timedelta(days=1, hours=9)


@pytest.mark.parametrize("every", [1, Cron("* * * * * *")])
def test_without_catch_up_only_the_current_time_starts(every: Any) -> None:
    """After a stop of ten periods there is one start, in whatever part of a period it ends."""
    for milliseconds in (0, 1, 500, 999):
        now = BEGIN + SECOND * 10 + timedelta(milliseconds=milliseconds)
        decision = wake(timing(every, catch_up=0, overlap="allow"), NEW, now)
        assert (decision.starts, decision.state.missed) == ((BEGIN + SECOND * 10,), 9)


def test_a_worker_that_is_seconds_late_misses_nothing() -> None:
    decision = wake(timing(catch_up=0), NEW, BEGIN + HOUR + SECOND * 59)
    assert decision.starts == hours(1)
    decision = wake(timing(catch_up=0), NEW, BEGIN + HOUR + SECOND * 60)
    assert (decision.starts, decision.state.missed) == ((), 1)


def test_a_year_of_missed_seconds_is_counted_at_once() -> None:
    year = timedelta(days=365)
    decision = wake(timing(1, catch_up=0), NEW, BEGIN + year)
    assert decision.state.missed + len(decision.starts) == year // SECOND


def test_a_year_of_missed_minutes_of_a_cron_expression_is_counted_in_parts() -> None:
    state, now, parts = NEW, BEGIN + timedelta(days=7), 0
    while (decision := wake(timing(Cron("* * * * *")), state, now)).wake_at == now:
        state, parts = decision.state, parts + 1
    assert parts > 1
    total = decision.state.missed + decision.state.started + decision.state.skipped
    assert total == 7 * 24 * 60


def test_skip_leaves_out_times_while_a_run_is_open() -> None:
    state = wake(timing(), NEW, hour(1)).state
    second = wake(timing(), state, hour(2))
    assert (second.starts, second.state.skipped) == ((), 1)
    third = wake(timing(), second.state, hour(3), over=hours(1))
    assert (third.starts, third.state.open) == (hours(3), hours(3))


def test_buffer_one_starts_one_run_after_the_open_one() -> None:
    one = timing(overlap="buffer_one")
    state = wake(one, NEW, hour(1)).state
    state = wake(one, state, hour(2)).state
    state = wake(one, state, hour(3)).state
    assert (state.buffer, state.skipped) == (hours(2), 1)
    decision = wake(one, state, BEGIN + HOUR * 3.5, over=hours(1))
    assert (decision.starts, decision.state.buffer) == (hours(2), ())


def test_buffer_all_starts_runs_in_order_and_skips_beyond_its_limit() -> None:
    buffering = timing(overlap="buffer_all", catch_up="10000h")
    decision = wake(buffering, NEW, BEGIN + HOUR * (MAX_BUFFER + 20))
    while decision.wake_at == BEGIN + HOUR * (MAX_BUFFER + 20):
        decision = wake(buffering, decision.state, BEGIN + HOUR * (MAX_BUFFER + 20))
    state = decision.state
    assert (len(state.buffer), state.skipped, state.started) == (MAX_BUFFER, 19, 1)
    order: list[datetime] = []
    while state.open:
        state = wake(buffering, state, BEGIN + HOUR * (MAX_BUFFER + 20), over=state.open).state
        order += state.open
    assert order == [BEGIN + HOUR * n for n in range(2, MAX_BUFFER + 2)]


def test_cancel_replaces_the_open_run() -> None:
    cancelling = timing(overlap="cancel")
    state = wake(cancelling, NEW, hour(1)).state
    decision = wake(cancelling, state, hour(2))
    assert (decision.cancels, decision.starts) == (hours(1), hours(2))
    assert decision.state.open == hours(2)


def test_cancel_starts_only_the_last_of_several_times() -> None:
    cancelling = timing(overlap="cancel", catch_up="1d")
    decision = wake(cancelling, NEW, hour(3))
    assert (decision.cancels, decision.starts) == ((), hours(3))
    assert (decision.state.skipped, decision.state.open) == (2, hours(3))


def test_allow_starts_all_of_them_a_hundred_at_once() -> None:
    allowing = timing(overlap="allow", catch_up="10d")
    now = BEGIN + HOUR * 150
    first = wake(allowing, NEW, now)
    assert (len(first.starts), first.wake_at) == (MAX_STARTS, now)
    second = wake(allowing, first.state, now)
    assert (len(second.starts), second.wake_at) == (50, now + HOUR)


def test_a_failed_run_pauses_the_schedule_at_the_next_time() -> None:
    pausing = timing(on_failure="pause")
    state = wake(pausing, NEW, hour(1)).state
    decision = wake(pausing, state, hour(2), over=hours(1), end="failed")
    assert decision.pause == "the run of 2030-01-01 01:00:00+00:00 failed"
    assert (decision.starts, decision.state.last) == ((), hour(1))


def test_after_its_end_a_schedule_never_wakes() -> None:
    ending = timing(end_at=BEGIN + HOUR)
    assert wake(ending, NEW, hour(1)).wake_at is None


policies = st.sampled_from(["skip", "buffer_one", "buffer_all", "cancel", "allow"])


@given(policies, st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=30))
def test_each_time_is_decided_on_once(overlap: str, wakes: list[tuple[int, bool]]) -> None:
    """However often and late the schedule is woken, and whichever runs are over: each time was
    started, skipped or missed, or is in the buffer, and none of them twice.
    """
    policy = timing(overlap=overlap, catch_up="3h")
    state, now = NEW, BEGIN
    started: list[datetime] = []
    cancelled = 0
    for minutes, is_over in wakes:
        now += MINUTE * minutes
        decision = wake(policy, state, now, over=state.open if is_over else ())
        state = decision.state
        started += decision.starts
        cancelled += len(decision.cancels)
        if overlap in ("skip", "buffer_one", "buffer_all"):
            assert len(state.open) <= 1
    assert len(set(started)) == len(started) == state.started
    assert started == sorted(started)
    decided = state.started + state.missed + state.skipped + len(state.buffer)
    assert decided == (state.last - BEGIN) // HOUR == (now - BEGIN) // HOUR
