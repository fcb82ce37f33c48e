"""How often a step is tried, how long to wait in between, and how long one try may take."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any, Literal, TypeAlias, cast, get_args

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument, InvalidDuration, StepTimeout

Backoff: TypeAlias = Literal["exponential", "linear", "fixed"]
OnTimeout: TypeAlias = (
    Literal["error", "none"] | BaseException | type[BaseException] | Callable[[StepTimeout], object]
)

_USUAL_JITTER = 0.5
# Doubling so often makes even a microsecond longer than any limit, and stays a finite number.
_MAX_DOUBLINGS = 64


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """How a failed step is tried again.

    `attempts` counts the first one. The wait after the n-th failure is `delay` ("fixed"), n times
    that ("linear") or 2ⁿ⁻¹ times that ("exponential"), at most `max_delay`. `jitter` is the share
    of the wait which chance may take away, so that those who failed together do not come back
    together; True is half. `retry_if` tells from the error whether to try again; without it, any
    is retried.
    """

    attempts: int
    backoff: Backoff
    delay: timedelta
    max_delay: timedelta
    jitter: float
    retry_if: Callable[[Exception], bool] | None

    def __init__(
        self,
        attempts: int = 3,
        *,
        backoff: Backoff = "exponential",
        delay: Duration = 0.1,
        max_delay: Duration = 30,
        jitter: bool | float = True,
        retry_if: Callable[[Exception], bool] | None = None,
    ) -> None:
        if retry_if is not None and not callable(retry_if):
            raise InvalidArgument("retry_if", retry_if, "a function of the error, or None")
        fill = object.__setattr__
        fill(self, "attempts", _checked_attempts(attempts))
        fill(self, "backoff", _checked_backoff(backoff))
        fill(self, "delay", parse_duration(delay, "delay"))
        fill(self, "max_delay", parse_duration(max_delay, "max_delay"))
        fill(self, "jitter", _checked_jitter(jitter))
        fill(self, "retry_if", retry_if)


@dataclass(frozen=True, slots=True, init=False)
class Timeout:
    """How long one attempt of a step may take, and what it comes to when it takes longer.

    `on_timeout` is "error" (raise `StepTimeout`), "none" (the step gives None), an exception to
    raise, or a function of the `StepTimeout` that gives the step's value, or an exception to raise.
    """

    after: timedelta
    on_timeout: OnTimeout

    def __init__(self, after: Duration, *, on_timeout: OnTimeout = "error") -> None:
        object.__setattr__(self, "after", _checked_after(after))
        object.__setattr__(self, "on_timeout", _checked_on_timeout(on_timeout))

    def outcome(self, error: StepTimeout) -> Any:
        """Give the value of a step that took too long, or raise its error."""
        match self.on_timeout:
            case "error":
                raise error
            case "none":
                return None
            case BaseException() | type() as failure:
                raise failure from error
            case function:
                value = function(error)
        if isinstance(value, BaseException):
            raise value from error
        return value


def as_retry(value: Retry | int | None) -> Retry | None:
    """Give the retry that a step option stands for; a number is the number of attempts."""
    if value is None or isinstance(value, Retry):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument("retry", value, "a Retry, or a number of attempts, 1 or more")
    return Retry(value)


def as_timeout(value: Timeout | Duration | None) -> Timeout | None:
    """Give the time-out that a step option stands for; a duration is that of one attempt."""
    return value if value is None or isinstance(value, Timeout) else Timeout(value)


def delay_before(retry: Retry, attempt: int, random: Random) -> timedelta:
    """Give how long to wait after attempt number `attempt` (from 1) has failed, before the next."""
    seconds = retry.delay.total_seconds() * _growth(retry.backoff, attempt)
    seconds = min(seconds, retry.max_delay.total_seconds())
    wait = timedelta(seconds=seconds * (1 - retry.jitter * random.random()))
    return min(wait, retry.max_delay)


def _growth(backoff: Backoff, attempt: int) -> int:
    match backoff:
        case "fixed":
            return 1
        case "linear":
            return attempt
        case "exponential":
            return 1 << min(attempt - 1, _MAX_DOUBLINGS)


def _checked_attempts(attempts: object) -> int:
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidArgument("attempts", attempts, "a whole number, 1 or more")
    return attempts


def _checked_backoff(backoff: object) -> Backoff:
    if not isinstance(backoff, str) or backoff not in get_args(Backoff):
        raise InvalidArgument("backoff", backoff, '"exponential", "linear" or "fixed"')
    return cast(Backoff, backoff)


def _checked_jitter(jitter: object) -> float:
    if isinstance(jitter, bool):
        return _USUAL_JITTER if jitter else 0.0
    if not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise InvalidArgument("jitter", jitter, "True, False, or a share between 0 and 1")
    return float(jitter)


def _checked_after(after: Duration) -> timedelta:
    duration = parse_duration(after, "timeout")
    if not duration:
        raise InvalidDuration("timeout", after, "a duration longer than zero")
    return duration


def _checked_on_timeout(on_timeout: object) -> OnTimeout:
    is_error = isinstance(on_timeout, BaseException) or callable(on_timeout)
    if not is_error and not (isinstance(on_timeout, str) and on_timeout in ("error", "none")):
        expected = '"error", "none", an exception, or a function of the StepTimeout'
        raise InvalidArgument("on_timeout", on_timeout, expected)
    return cast(OnTimeout, on_timeout)
