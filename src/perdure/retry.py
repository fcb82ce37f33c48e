"""Retry and timeout policies of steps."""

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

_DEFAULT_JITTER = 0.5
# Doubled this often, even a microsecond exceeds any timedelta, but the float stays finite.
_MAX_DOUBLINGS = 64
# So that the time of the next attempt can be represented.
_LONGEST_DELAY = timedelta(days=36_500)


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """How often and when a failed step is retried.

    ```python
    receipt = await step("charge", charge, 4200, retry=Retry(5, delay="1s", max_delay="1m"))
    ```

    `attempts` includes the first one. The delay after the n-th failure is `delay` ("fixed"), n
    times `delay` ("linear") or 2ⁿ⁻¹ times `delay` ("exponential"), at most `max_delay`. `jitter` is
    the fraction of the delay that is randomized, so that steps that failed together are not retried
    together; `True` means 0.5. `retry_if` returns whether to retry after an error; without it, all
    errors are retried.
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
            raise InvalidArgument("retry_if", retry_if, "a function that takes the error, or None")
        set_field = object.__setattr__
        set_field(self, "attempts", _check_attempts(attempts))
        set_field(self, "backoff", _check_backoff(backoff))
        set_field(self, "delay", parse_duration(delay, "delay"))
        set_field(self, "max_delay", _check_max_delay(max_delay))
        set_field(self, "jitter", _check_jitter(jitter))
        set_field(self, "retry_if", retry_if)


@dataclass(frozen=True, slots=True, init=False)
class Timeout:
    """How long one attempt of a step may take, and what happens if it takes longer.

    `on_timeout` is "error" (raise `StepTimeout`), "none" (return `None`), an exception to raise, or
    a function that takes the `StepTimeout` and returns the step's value or an exception to raise.
    """

    after: timedelta
    on_timeout: OnTimeout

    def __init__(self, after: Duration, *, on_timeout: OnTimeout = "error") -> None:
        object.__setattr__(self, "after", _check_after(after))
        object.__setattr__(self, "on_timeout", _check_on_timeout(on_timeout))

    def outcome(self, error: StepTimeout) -> Any:
        """Return the value of an attempt that timed out, or raise its error."""
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
    """Return the policy for a step's `retry` option; an int is the number of attempts."""
    if value is None or isinstance(value, Retry):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument("retry", value, "a Retry, or an int >= 1")
    return Retry(value)


def as_timeout(value: Timeout | Duration | None) -> Timeout | None:
    """Return the policy for a step's `timeout` option; a duration applies to each attempt."""
    return value if value is None or isinstance(value, Timeout) else Timeout(value)


def delay_before(retry: Retry, attempt: int, random: Random) -> timedelta:
    """Return the delay between the failure of attempt number `attempt` (from 1) and the next."""
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


def _check_attempts(attempts: object) -> int:
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidArgument("attempts", attempts, "an int >= 1")
    return attempts


def _check_backoff(backoff: object) -> Backoff:
    if not isinstance(backoff, str) or backoff not in get_args(Backoff):
        raise InvalidArgument("backoff", backoff, '"exponential", "linear" or "fixed"')
    return cast(Backoff, backoff)


def _check_max_delay(max_delay: Duration) -> timedelta:
    duration = parse_duration(max_delay, "max_delay")
    if duration > _LONGEST_DELAY:
        raise InvalidDuration("max_delay", max_delay, "a duration of at most 36,500 days")
    return duration


def _check_jitter(jitter: object) -> float:
    if isinstance(jitter, bool):
        return _DEFAULT_JITTER if jitter else 0.0
    if not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise InvalidArgument("jitter", jitter, "True, False, or a number between 0 and 1")
    return float(jitter)


def _check_after(after: Duration) -> timedelta:
    duration = parse_duration(after, "timeout")
    if not duration:
        raise InvalidDuration("timeout", after, "a positive duration")
    return duration


def _check_on_timeout(on_timeout: object) -> OnTimeout:
    is_error = isinstance(on_timeout, BaseException) or callable(on_timeout)
    if not is_error and not (isinstance(on_timeout, str) and on_timeout in ("error", "none")):
        expected = '"error", "none", an exception, or a function that takes the StepTimeout'
        raise InvalidArgument("on_timeout", on_timeout, expected)
    return cast(OnTimeout, on_timeout)
