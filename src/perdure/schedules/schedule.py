"""A schedule as users write it."""

from datetime import datetime, timedelta
from typing import Literal, TypeAlias, get_args

import msgspec

from perdure.clock import Cron, Duration, as_utc, parse_duration
from perdure.errors import InvalidArgument, InvalidDuration
from perdure.validation import check_user_id

Overlap: TypeAlias = Literal["skip", "buffer_one", "buffer_all", "cancel", "allow"]
OnFailure: TypeAlias = Literal["continue", "pause"]

MAX_NAME = 200
SHORTEST_INTERVAL = timedelta(seconds=1)
LONGEST_INTERVAL = timedelta(days=36525)
CATCH_UP = timedelta(hours=1)
_MILLISECOND = timedelta(milliseconds=1)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """When runs of a workflow start: `@workflow("report", schedule=Schedule(every="1h"))`.

    `every` is a `Cron`, or an interval counted from `start_at` or from when the schedule was
    created. No run starts before `start_at` or after `end_at`. A run starts up to `jitter` after
    its time, by a delay that is always the same for that time.

    A time that was missed by more than `catch_up`, because no worker was running, is skipped. A
    time that is late by less than a minute does not count as missed, unless the next one has come.

    `overlap` says what happens if the previous run is not over: `"skip"` skips the time,
    `"buffer_one"` starts one run afterwards, `"buffer_all"` up to 1,000, `"cancel"` cancels the
    previous run, `"allow"` starts another run beside it. With `on_failure="pause"`, the schedule is
    paused at the next time after a run has failed.
    """

    every: Cron | Duration
    jitter: Duration = timedelta(0)
    overlap: Overlap = "skip"
    catch_up: Duration = CATCH_UP
    start_at: datetime | None = None
    end_at: datetime | None = None
    on_failure: OnFailure = "continue"

    def __post_init__(self) -> None:
        check_every(self.every)
        parse_duration(self.jitter, "jitter")
        parse_duration(self.catch_up, "catch_up")
        _check_choice(self.overlap, "overlap", get_args(Overlap))
        _check_choice(self.on_failure, "on_failure", get_args(OnFailure))
        start_at = None if self.start_at is None else as_utc(self.start_at, "start_at")
        end_at = None if self.end_at is None else as_utc(self.end_at, "end_at")
        if start_at is not None and end_at is not None and end_at < start_at:
            raise InvalidArgument("end_at", self.end_at, f"a datetime after start_at, {start_at}")


def check_name(name: object) -> str:
    """Check the name of a schedule, which is part of the ids and the tag of its runs."""
    name = check_user_id(name, "name")
    if len(name) > MAX_NAME:
        raise InvalidArgument("name", name, f"a schedule's name of at most {MAX_NAME} characters")
    return name


def check_every(every: object) -> Cron | timedelta:
    """Check for a `Cron` or an interval; return an interval as a `timedelta`."""
    if isinstance(every, Cron):
        return every
    hint = 'A cron expression is written as Cron("0 9 * * *", tz="Europe/Berlin")'
    expected = f"a Cron, or a duration of whole milliseconds, {SHORTEST_INTERVAL} or more"
    try:
        interval = parse_duration(every, "every")  # type: ignore[arg-type]  # it checks
    except InvalidDuration:
        raise InvalidDuration("every", every, expected, hint) from None
    # Nominal times are stored, and part of run ids, in milliseconds.
    if interval < SHORTEST_INTERVAL or interval % _MILLISECOND:
        raise InvalidDuration("every", every, expected)
    if interval > LONGEST_INTERVAL:
        raise InvalidDuration("every", every, "a duration of at most 100 years")
    return interval


def _check_choice(value: object, parameter: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(parameter, value, f"one of {', '.join(map(repr, choices))}")
