"""The nominal times of a schedule, and when the run for each of them starts."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import msgspec

from perdure.clock import Cron, as_utc, isoformat, parse_duration
from perdure.errors import InvalidArgument
from perdure.schedules.schedule import OnFailure, Overlap, Schedule, check_every

_ZERO = timedelta(0)
_MICROSECOND = timedelta(microseconds=1)
_MILLISECOND = timedelta(milliseconds=1)
# Longer durations have the same effect, and could not be subtracted from a datetime.
_CENTURY = timedelta(days=36525)
# No interval is longer than a century, and cron expressions are searched for 50 years ahead, so
# times computed from before this horizon can be represented.
_HORIZON = datetime(9700, 1, 1, tzinfo=UTC)


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as it is stored: a cron expression, or an interval counted from `origin`."""

    origin: datetime
    cron: str = ""
    tz: str = ""
    interval: timedelta = _ZERO
    jitter: timedelta = _ZERO
    overlap: Overlap = "skip"
    catch_up: timedelta = _ZERO
    start_at: datetime | None = None
    end_at: datetime | None = None
    on_failure: OnFailure = "continue"


def timing_of(schedule: Schedule, now: datetime) -> Timing:
    """Return the timing of a schedule that is created now."""
    every = check_every(schedule.every)
    start_at = None if schedule.start_at is None else _milliseconds(schedule.start_at)
    return Timing(
        origin=_milliseconds(now) if start_at is None else start_at,
        cron=every.expr if isinstance(every, Cron) else "",
        tz=every.tz if isinstance(every, Cron) else "",
        interval=_ZERO if isinstance(every, Cron) else every,
        jitter=min(parse_duration(schedule.jitter, "jitter"), _CENTURY),
        overlap=schedule.overlap,
        catch_up=min(parse_duration(schedule.catch_up, "catch_up"), _CENTURY),
        start_at=start_at,
        end_at=None if schedule.end_at is None else as_utc(schedule.end_at, "end_at"),
        on_failure=schedule.on_failure,
    )


def first_time(timing: Timing, after: datetime) -> datetime:
    """Return the first nominal time after `after`; raise `InvalidArgument` if there is none."""
    time = next_time(timing, after)
    if time is not None:
        return time
    hint = "No run would ever start"
    if timing.start_at is not None and timing.start_at >= _HORIZON:
        raise InvalidArgument("start_at", timing.start_at, "a datetime before the year 9700", hint)
    expected = "a datetime after the schedule's next time"
    raise InvalidArgument("end_at", timing.end_at, expected, hint)


def next_time(timing: Timing, after: datetime) -> datetime | None:
    """Return the first nominal time after `after`, or `None` if there is none."""
    if timing.start_at is not None:
        after = max(after, timing.start_at - _MICROSECOND)
    time = _next(timing, after)
    is_over = time is None or (timing.end_at is not None and time > timing.end_at)
    return None if is_over else time


def _next(timing: Timing, after: datetime) -> datetime | None:
    if after >= _HORIZON:
        return None
    if timing.cron:
        return _cron(timing.cron, timing.tz).next(after)
    periods = (after - timing.origin) // timing.interval
    return timing.origin + timing.interval * (periods + 1)


# Cached, because the constructor searches for a match, which takes as long as `next`.
_cron = lru_cache(maxsize=1024)(Cron)


def skip_periods(timing: Timing, after: datetime, until: datetime) -> tuple[int, datetime]:
    """Return how many times of an interval are after `after`, up to `until`, and the last one.

    They are computed, because a schedule with an interval of seconds can miss millions of times.
    """
    first = next_time(timing, after)
    if timing.cron or first is None or first > until:
        return 0, after
    if timing.end_at is not None:
        until = min(until, timing.end_at)
    periods = (until - first) // timing.interval
    return periods + 1, first + timing.interval * periods


def times_between(timing: Timing, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the times from `start` to `end`, both included.

    Times outside the schedule's `start_at` and `end_at` are included.
    """
    time = _next(timing, start - _MICROSECOND)
    while time is not None and time <= end:
        yield time
        time = _next(timing, time)


def planned_start(timing: Timing, name: str, time: datetime) -> datetime:
    """Return when the run for a nominal time starts: with jitter, but before the next time."""
    if not timing.jitter:
        return time
    delay = min(timing.jitter, gap_after(timing, time)) * _fraction(name, time)
    return time + delay // _MILLISECOND * _MILLISECOND


def gap_after(timing: Timing, time: datetime) -> timedelta:
    """Return the time between a nominal time and the next, whether or not a run starts then."""
    next_nominal = _next(timing, time)
    return _CENTURY if next_nominal is None else next_nominal - time


def _fraction(name: str, time: datetime) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    digest = hashlib.sha256(f"{name}\0{isoformat(time)}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def run_id_at(name: str, time: datetime) -> str:
    """Return the id of the run that a schedule starts for a nominal time."""
    text = isoformat(time)
    return f"{name}@{text[:-5]}Z" if text.endswith(".000Z") else f"{name}@{text}"


def _milliseconds(value: datetime) -> datetime:
    """Return a time in UTC, with the precision with which it is stored."""
    value = as_utc(value, "start_at")
    return value.replace(microsecond=value.microsecond // 1000 * 1000)
