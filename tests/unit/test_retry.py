"""Backoff and time-outs, as data."""

import math
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument, StepTimeout
from perdure.result import Err
from perdure.retry import Backoff, Retry, Timeout, as_retry, as_timeout, delay_before

RANDOM = Random(1)
LATE = StepTimeout("charge", 5)


def waits(retry: Retry, failures: int) -> list[float]:
    return [delay_before(retry, n, RANDOM).total_seconds() for n in range(1, failures + 1)]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        ("fixed", [1, 1, 1, 1, 1]),
        ("linear", [1, 2, 3, 4, 5]),
        ("exponential", [1, 2, 4, 8, 10]),
    ],
)
def test_backoff(backoff: Backoff, expected: list[float]) -> None:
    """Waits stay, grow by steps or double, up to the longest allowed."""
    retry = Retry(9, backoff=backoff, delay="1s", max_delay=timedelta(seconds=10), jitter=False)
    assert waits(retry, 5) == expected


@given(
    st.integers(1, 10**6),
    st.sampled_from(["fixed", "linear", "exponential"]),
    st.timedeltas(timedelta(0), timedelta(days=10**6)),
    st.timedeltas(timedelta(0), timedelta(days=10**6)),
    st.booleans() | st.floats(0, 1),
)
def test_a_wait_is_never_longer_than_allowed(
    attempt: int, backoff: Backoff, delay: timedelta, max_delay: timedelta, jitter: float
) -> None:
    """Whatever the numbers, the wait lies between nothing and `max_delay`."""
    retry = Retry(3, backoff=backoff, delay=delay, max_delay=max_delay, jitter=jitter)
    assert timedelta(0) <= delay_before(retry, attempt, RANDOM) <= max_delay


@pytest.mark.parametrize(
    ("jitter", "minimum"), [(True, 5.0), (0.2, 8.0), (1.0, 0.0), (False, 10.0)]
)
def test_jitter_takes_away_a_share(jitter: float, minimum: float) -> None:
    """Jitter shortens a wait by up to its share; True is half."""
    retry = Retry(3, backoff="fixed", delay=10, jitter=jitter)
    drawn = waits(retry, 200)
    assert minimum <= min(drawn) <= max(drawn) <= 10
    assert (max(drawn) - min(drawn) > 0) == (minimum < 10)


def test_chance_is_the_callers() -> None:
    """The same `Random` gives the same waits."""
    retry = Retry()
    assert delay_before(retry, 2, Random(7)) == delay_before(retry, 2, Random(7))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attempts", 0),
        ("attempts", -1),
        ("attempts", 1.5),
        ("attempts", True),
        ("attempts", "3"),
        ("backoff", "quadratic"),
        ("backoff", None),
        ("backoff", []),
        ("delay", -1),
        ("delay", "soon"),
        ("max_delay", math.inf),
        ("jitter", -0.1),
        ("jitter", 1.1),
        ("jitter", math.nan),
        ("jitter", "some"),
        ("retry_if", ValueError("x")),
        ("retry_if", "always"),
    ],
)
def test_bad_retries(option: str, value: object) -> None:
    """A bad option is an error that names it, when the retry is made."""
    with pytest.raises(InvalidArgument, match=rf"^{option}: expected "):
        Retry(**{option: value})  # type: ignore[arg-type]  # what is tested


def test_options_that_stand_for_a_retry() -> None:
    """A number is the number of attempts."""
    retry = Retry(5)
    assert as_retry(None) is None
    assert as_retry(retry) is retry
    assert as_retry(5) == retry
    with pytest.raises(InvalidArgument, match=r"^retry: "):
        as_retry("5")  # type: ignore[arg-type]  # what is tested


def test_a_timeout_raises_its_error() -> None:
    """By default a step that takes too long fails with `StepTimeout`."""
    with pytest.raises(StepTimeout) as raised:
        Timeout(5).outcome(LATE)
    assert raised.value is LATE


def test_a_timeout_can_be_no_failure() -> None:
    """It can give None, or what a function makes of it."""
    assert Timeout(5, on_timeout="none").outcome(LATE) is None
    assert Timeout(5, on_timeout=lambda late: Err(late.step)).outcome(LATE) == Err("charge")


@pytest.mark.parametrize(
    "on_timeout", [KeyError, KeyError("late"), lambda late: KeyError(late.step)]
)
def test_a_timeout_can_raise_another_error(on_timeout: KeyError) -> None:
    """An exception, its class, or a function that gives one: raised from the `StepTimeout`."""
    with pytest.raises(KeyError) as raised:
        Timeout(5, on_timeout=on_timeout).outcome(LATE)
    assert raised.value.__cause__ is LATE


@pytest.mark.parametrize("after", [0, -1, "never", math.nan, None, True])
def test_bad_timeouts(after: float) -> None:
    """A time-out is longer than zero."""
    with pytest.raises(InvalidArgument, match=r"^timeout: expected "):
        Timeout(after)


@pytest.mark.parametrize("on_timeout", ["raise", None, 5, []])
def test_bad_outcomes(on_timeout: BaseException) -> None:
    """What happens on time-out is one of four things."""
    with pytest.raises(InvalidArgument, match=r"^on_timeout: expected "):
        Timeout(5, on_timeout=on_timeout)


def test_options_that_stand_for_a_timeout() -> None:
    """A duration is how long one attempt may take."""
    timeout = Timeout("90s")
    assert as_timeout(None) is None
    assert as_timeout(timeout) is timeout
    assert as_timeout(90) == timeout
    assert timeout.after == timedelta(seconds=90)
