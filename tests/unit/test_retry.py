"""Retry and timeout policies."""

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


def delays(retry: Retry, failures: int) -> list[float]:
    return [delay_before(retry, n, RANDOM).total_seconds() for n in range(1, failures + 1)]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        ("fixed", [1, 1, 1, 1, 1]),
        ("linear", [1, 2, 3, 4, 5]),
        ("exponential", [1, 2, 4, 8, 10]),
    ],
)
def test_delays_follow_the_backoff(backoff: Backoff, expected: list[float]) -> None:
    """They stay the same, grow linearly or double, up to `max_delay`."""
    retry = Retry(9, backoff=backoff, delay="1s", max_delay=timedelta(seconds=10), jitter=False)
    assert delays(retry, 5) == expected


@given(
    st.integers(1, 10**6),
    st.sampled_from(["fixed", "linear", "exponential"]),
    st.timedeltas(timedelta(0), timedelta(days=10**6)),
    st.timedeltas(timedelta(0), timedelta(days=36_500)),
    st.booleans() | st.floats(0, 1),
)
def test_a_delay_is_never_longer_than_max_delay(
    attempt: int, backoff: Backoff, delay: timedelta, max_delay: timedelta, jitter: float
) -> None:
    """Nor negative, whatever the options are."""
    retry = Retry(3, backoff=backoff, delay=delay, max_delay=max_delay, jitter=jitter)
    assert timedelta(0) <= delay_before(retry, attempt, RANDOM) <= max_delay


@pytest.mark.parametrize(
    ("jitter", "minimum"), [(True, 5.0), (0.2, 8.0), (1.0, 0.0), (False, 10.0)]
)
def test_jitter_shortens_the_delay(jitter: float, minimum: float) -> None:
    """By up to the given fraction; True is 0.5."""
    retry = Retry(3, backoff="fixed", delay=10, jitter=jitter)
    sample = delays(retry, 200)
    assert minimum <= min(sample) <= max(sample) <= 10
    assert (max(sample) - min(sample) > 0) == (minimum < 10)


def test_delays_are_reproducible() -> None:
    """Equal `Random` objects produce equal delays."""
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
        ("max_delay", "36501d"),
        ("jitter", -0.1),
        ("jitter", 1.1),
        ("jitter", math.nan),
        ("jitter", "some"),
        ("retry_if", ValueError("x")),
        ("retry_if", "always"),
    ],
)
def test_invalid_retry_options_are_refused(option: str, value: object) -> None:
    """When the policy is created, with the name of the option."""
    with pytest.raises(InvalidArgument, match=rf"^{option}: expected "):
        Retry(**{option: value})  # type: ignore[arg-type]  # what is tested


def test_the_retry_option_of_a_step() -> None:
    """An int is the number of attempts."""
    retry = Retry(5)
    assert as_retry(None) is None
    assert as_retry(retry) is retry
    assert as_retry(5) == retry
    with pytest.raises(InvalidArgument, match=r"^retry: "):
        as_retry("5")  # type: ignore[arg-type]  # what is tested


def test_a_timeout_raises_step_timeout_by_default() -> None:
    with pytest.raises(StepTimeout) as raised:
        Timeout(5).outcome(LATE)
    assert raised.value is LATE


def test_a_timeout_can_return_a_value() -> None:
    """None, or the return value of a function."""
    assert Timeout(5, on_timeout="none").outcome(LATE) is None
    assert Timeout(5, on_timeout=lambda late: Err(late.step)).outcome(LATE) == Err("charge")


@pytest.mark.parametrize(
    "on_timeout", [KeyError, KeyError("late"), lambda late: KeyError(late.step)]
)
def test_a_timeout_can_raise_another_error(on_timeout: KeyError) -> None:
    """An exception, a class, or a function that returns one: raised from the `StepTimeout`."""
    with pytest.raises(KeyError) as raised:
        Timeout(5, on_timeout=on_timeout).outcome(LATE)
    assert raised.value.__cause__ is LATE


@pytest.mark.parametrize("after", [0, -1, "never", math.nan, None, True])
def test_a_timeout_must_be_positive(after: float) -> None:
    with pytest.raises(InvalidArgument, match=r"^timeout: expected "):
        Timeout(after)


@pytest.mark.parametrize("on_timeout", ["raise", None, 5, []])
def test_invalid_on_timeout_is_refused(on_timeout: BaseException) -> None:
    with pytest.raises(InvalidArgument, match=r"^on_timeout: expected "):
        Timeout(5, on_timeout=on_timeout)


def test_the_timeout_option_of_a_step() -> None:
    """A duration limits one attempt."""
    timeout = Timeout("90s")
    assert as_timeout(None) is None
    assert as_timeout(timeout) is timeout
    assert as_timeout(90) == timeout
    assert timeout.after == timedelta(seconds=90)
