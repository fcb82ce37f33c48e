"""Durations, cron expressions, timestamps and clocks."""

import asyncio
import math
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.clock import Clock, Cron, SystemClock, isoformat, parse_duration, parse_iso
from perdure.errors import InvalidArgument, InvalidCron, InvalidDuration, PerdureError
from perdure.testing import NotFinished, TestClock

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (timedelta(minutes=2), 120),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        ("90s", 90),
        ("90 sec", 90),
        ("1 second", 1),
        ("2 seconds", 2),
        ("1h30m", 5400),
        ("1h 30min", 5400),
        ("  1h  ", 3600),
        ("1.5h", 5400),
        ("3 minutes", 180),
        ("1 minute", 60),
        ("1 hour", 3600),
        ("2 hours", 7200),
        ("1 day", 86_400),
        ("2 days", 172_800),
        ("500ms", 0.5),
        ("1w2d", 777_600),
        ("1 week", 604_800),
        ("2 WEEKS", 1_209_600),
        ("0s", 0),
    ],
)
def test_valid_durations(duration: timedelta | float | str, seconds: float) -> None:
    """A duration is a timedelta, a number of seconds, or a string with units."""
    assert parse_duration(duration) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "nonsense",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -0.5,
        timedelta(seconds=-1),
        True,
        None,
        [],
        b"5s",
        "",
        "  ",
        "5",
        "s",
        "-5s",
        "5 parsecs",
        "1h 30",
        "1..5s",
        "1e5s",
        "٣s",
        "nan s",
        1e300,
        10**400,
        pytest.param(10**5000, id="too long for text"),
        "9" * 500 + "s",
        "999999999999 weeks",
    ],
)
def test_invalid_durations(nonsense: object) -> None:
    """The error names the parameter and has the value."""
    with pytest.raises(InvalidDuration, match=r"^connect_timeout: expected .*, got ") as raised:
        parse_duration(nonsense, "connect_timeout")  # type: ignore[arg-type]  # what is tested
    assert raised.value.parameter == "connect_timeout"
    assert raised.value.got is nonsense


def test_an_unknown_unit_is_named() -> None:
    """The error names the unknown unit and lists the known ones."""
    with pytest.raises(InvalidDuration, match=r"'fortnights' is not one of: ms, s, "):
        parse_duration("2fortnights")


@given(st.text() | st.floats() | st.integers() | st.timedeltas())
def test_parsing_a_duration_raises_only_invalid_duration(value: str | float | timedelta) -> None:
    """Otherwise the result is not negative."""
    with suppress(InvalidDuration):
        assert parse_duration(value) >= timedelta(0)


def berlin(*when: int, fold: int = 0) -> datetime:
    return datetime(*when, tzinfo=BERLIN, fold=fold).astimezone(UTC)  # type: ignore[arg-type,misc]


def test_cron_with_five_and_six_fields() -> None:
    """Nine in the morning in New York, and every second."""
    after = datetime.fromtimestamp(1_700_000_000, UTC)
    assert Cron("0 9 * * *", tz="America/New_York").next(after).timestamp() == 1_700_056_800
    assert Cron("* * * * * *").next(after).timestamp() == 1_700_000_001


def test_cron_is_strictly_after_and_in_utc() -> None:
    """A matching time is not its own successor, but that of the microsecond before it."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    cron = Cron("0 12 * * *")
    assert cron.next(noon) == noon + timedelta(days=1)
    assert cron.next(noon - timedelta(microseconds=1)) == noon
    assert cron.next(noon.astimezone(BERLIN)).tzinfo is UTC


@pytest.mark.parametrize("expr", ["30 2 * * *", "0 30 2 * * *"])
def test_cron_for_a_local_time_that_is_skipped(expr: str) -> None:
    """Clocks change from 2:00 to 3:00: half past two matches at the change, once."""
    cron = Cron(expr, tz="Europe/Berlin")
    jump = cron.next(berlin(2026, 3, 28, 12))
    assert jump == berlin(2026, 3, 29, 3, 0)
    assert cron.next(jump) == berlin(2026, 3, 30, 2, 30)


@pytest.mark.parametrize("expr", ["30 2 * * *", "0 30 2 * * *"])
def test_cron_for_a_local_time_that_is_repeated(expr: str) -> None:
    """Clocks change from 3:00 to 2:00: half past two matches only the first time."""
    cron = Cron(expr, tz="Europe/Berlin")
    first = cron.next(berlin(2026, 10, 24, 12))
    assert first == berlin(2026, 10, 25, 2, 30, fold=0)
    assert cron.next(first) == berlin(2026, 10, 26, 2, 30)
    assert cron.next(berlin(2026, 10, 25, 2, 10, fold=1)) == berlin(2026, 10, 26, 2, 30)


@pytest.mark.parametrize("day", [(2026, 3, 29), (2026, 10, 25)])
def test_cron_with_wildcards_keeps_its_interval(day: tuple[int, int, int]) -> None:
    """It matches every half hour, even when clocks are set forward or back."""
    cron = Cron("*/30 * * * *", tz="Europe/Berlin")
    previous = berlin(*day)
    for _ in range(12):
        following = cron.next(previous)
        assert following - previous == timedelta(minutes=30)
        previous = following


@given(
    st.sampled_from(["30 2 * * *", "15,45 1-3 * * *", "*/7 * * * *", "0 */2 * * *", "5 0 2 * * *"]),
    st.sampled_from(["Europe/Berlin", "America/Havana", "Australia/Lord_Howe", "Asia/Kolkata"]),
    st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC)),
)
def test_cron_always_advances(expr: str, tz: str, after: datetime) -> None:
    """The next match is later than the start, in any zone."""
    assert Cron(expr, tz).next(after) > after


@pytest.mark.parametrize(
    "expr",
    [
        "0 0 31 2 *",
        "0 0 30 2 *",
        "0 0 31 4,6 *",
        "0 0 */31 * 1#5",
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "a b c d e",
        "9" * 5000 + " * * * *",
        None,
        5,
        b"* * * * *",
    ],
)
def test_invalid_cron_expressions(expr: str) -> None:
    """An expression that is malformed or never matches is refused when it is created."""
    with pytest.raises(InvalidCron, match=r"^expr: expected "):
        Cron(expr)


@pytest.mark.parametrize(
    "tz",
    ["", "Nowhere/Land", "../UTC", "America", "a" * 300, "\0", "\ud800", None, 5],
    ids=repr,
)
def test_unknown_time_zones(tz: str) -> None:
    """They are refused when the cron expression is created."""
    with pytest.raises(InvalidCron, match=r"^tz: expected "):
        Cron("* * * * *", tz)


@given(st.text("0123456789*/,-#LW MONJAN", max_size=30))
def test_creating_a_cron_raises_only_invalid_cron(expr: str) -> None:
    """For any string."""
    with suppress(InvalidCron):
        Cron(expr)


def test_cron_at_the_end_of_the_calendar() -> None:
    """A start with no datetime after it raises `InvalidArgument`."""
    with pytest.raises(PerdureError):
        Cron("0 0 * * *").next(datetime.max.replace(tzinfo=UTC))
    with pytest.raises(InvalidArgument, match=r"^after: "):
        Cron("0 0 * * *").next(datetime(2030, 1, 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2030, 1, 2, 3, 4, 5, 678_999, tzinfo=UTC), "2030-01-02T03:04:05.678Z"),
        (datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC), "2030-01-02T03:04:05.000Z"),
        (datetime(2030, 7, 1, 2, tzinfo=BERLIN), "2030-07-01T00:00:00.000Z"),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00.000Z"),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "9999-12-31T23:59:59.999Z"),
    ],
)
def test_isoformat_is_in_utc_with_milliseconds(value: datetime, text: str) -> None:
    assert isoformat(value) == text
    assert isoformat(value) == text


@given(st.lists(st.datetimes(timezones=st.just(UTC)), min_size=1))
def test_timestamps_round_trip(values: list[datetime]) -> None:
    """To the millisecond, whichever second was formatted before."""
    for value in values:
        truncated = value.replace(microsecond=value.microsecond // 1000 * 1000)
        assert parse_iso(isoformat(value)) == truncated


@pytest.mark.parametrize("value", [datetime(2030, 1, 1), None, "2030-01-01"])
def test_isoformat_refuses_naive_datetimes(value: datetime) -> None:
    """And everything that is not a datetime."""
    with pytest.raises(InvalidArgument, match="expected a datetime with a time zone"):
        isoformat(value)


def test_isoformat_of_a_datetime_outside_the_range_of_utc() -> None:
    """It raises `InvalidArgument`, not `OverflowError`."""
    with pytest.raises(InvalidArgument):
        isoformat(datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))))


@pytest.mark.parametrize("text", ["", "now", "2030-01-01", "2030-01-01T00:00:00", None, 5])
def test_parse_iso_requires_an_offset(text: str) -> None:
    """And refuses everything that is not an ISO 8601 string."""
    with pytest.raises(InvalidArgument, match=r"^lastUpdated: "):
        parse_iso(text, "lastUpdated")


async def test_the_system_clock_reads_utc_and_sleeps() -> None:
    """For numbers of seconds and timedeltas."""
    clock: Clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(timedelta(milliseconds=2))
    await clock.sleep(0.001)
    await clock.sleep(-5)
    assert clock.monotonic() - before >= 0.003
    assert clock.now().tzinfo is UTC
    assert clock == SystemClock()


@pytest.mark.parametrize("clock", [SystemClock(), TestClock()])
@pytest.mark.parametrize("forever", [math.nan, math.inf, 10**400, "5s", None])
async def test_clocks_refuse_to_sleep_forever(clock: Clock, forever: float) -> None:
    """NaN, infinity or an invalid type is an error and does not hang."""
    with pytest.raises(InvalidDuration):
        await clock.sleep(forever)


async def test_a_test_clock_moves_only_when_advanced() -> None:
    """`now` and `monotonic` move together, by exactly the given time."""
    clock = TestClock()
    assert clock.now() == datetime(2030, 1, 1, tzinfo=UTC)
    await clock.advance("7 days")
    await clock.advance(0.5)
    assert clock.now() == datetime(2030, 1, 8, 0, 0, 0, 500_000, tzinfo=UTC)
    assert clock.monotonic() == 7 * 86_400 + 0.5


async def test_sleepers_wake_in_order_of_their_deadlines() -> None:
    """Each sees its own deadline as the current time; equal deadlines wake in order of creation."""
    clock = TestClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        for name, seconds in [("c", 3), ("a", 1), ("b", 2), ("b2", 2), ("d", 9)]:
            tasks.create_task(sleeper(name, seconds))
        await clock.advance(5)
        assert woken == [("a", 1.0), ("b", 2.0), ("b2", 2.0), ("c", 3.0)]
        assert clock.sleepers == 1
        await clock.advance(4)
    assert woken[-1] == ("d", 9.0)


async def test_a_sleeper_that_sleeps_again_is_woken_again() -> None:
    """Advancing an hour wakes a task that sleeps a minute at a time sixty times."""
    clock = TestClock()
    ticks: list[datetime] = []

    async def ticking() -> None:
        while True:
            await clock.sleep(timedelta(minutes=1))
            await asyncio.create_task(asyncio.sleep(0))
            ticks.append(clock.now())

    task = asyncio.create_task(ticking())
    await clock.advance("1h")
    assert len(ticks) == 60
    assert ticks[-1] == clock.now()
    task.cancel()


async def test_a_woken_task_runs_until_it_waits_before_the_clock_moves() -> None:
    """However many iterations of the event loop that takes."""
    clock = TestClock()
    times: list[float] = []

    async def work() -> None:
        await clock.sleep(1)
        for _ in range(500):
            await asyncio.sleep(0)
        times.append(clock.monotonic())

    task = asyncio.create_task(work())
    await clock.advance(100)
    assert times == [1.0]
    await task


async def test_cancelled_sleepers_are_not_woken() -> None:
    """Nor counted."""
    clock = TestClock()
    task = asyncio.create_task(clock.sleep(10))
    await asyncio.sleep(0)
    assert clock.sleepers == 1
    task.cancel()
    await asyncio.sleep(0)
    assert clock.sleepers == 0
    await clock.advance(20)
    assert task.cancelled()


async def test_a_busy_task_does_not_stop_the_clock() -> None:
    """`advance` returns although a task never waits."""
    clock = TestClock()

    async def busy() -> None:
        while True:
            await asyncio.sleep(0)

    task = asyncio.create_task(busy())
    await clock.advance(1)
    assert clock.monotonic() == 1.0
    task.cancel()


async def test_the_clock_can_be_advanced_to_the_next_deadline() -> None:
    """All tasks run first, so that a task which was just created is sleeping by then."""
    clock = TestClock()
    sleeping = asyncio.create_task(clock.sleep(90))
    assert await clock.advance_to_next()
    assert (clock.monotonic(), sleeping.done()) == (90.0, True)
    assert not await clock.advance_to_next()


async def test_concurrent_advances_add_up() -> None:
    """One is made after the other."""
    clock = TestClock()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clock.advance(1))
        tasks.create_task(clock.advance(2))
    assert clock.monotonic() == 3.0


async def test_sleeping_for_zero_yields_once() -> None:
    """Without waiting for the clock to advance."""
    clock = TestClock()
    await clock.sleep(0)
    await clock.sleep(timedelta(seconds=-1))
    assert clock.monotonic() == 0.0


async def test_a_test_clock_refuses_invalid_times() -> None:
    """It does not move backwards, nor beyond the end of the calendar."""
    clock = TestClock()
    for nonsense in (-1, "soon", timedelta(days=9_000_000)):
        with pytest.raises(InvalidDuration):
            await clock.advance(nonsense)
    with pytest.raises(InvalidArgument, match=r"^start: "):
        TestClock(datetime(2030, 1, 1))


async def test_run_advances_until_the_coroutine_is_done() -> None:
    clock = TestClock()

    async def work() -> str:
        await clock.sleep(timedelta(days=7))
        await clock.sleep(0.5)
        return "done"

    assert await clock.run(work()) == "done"
    assert clock.monotonic() == 7 * 86_400 + 0.5


async def test_run_awaits_work_in_threads() -> None:
    clock = TestClock()
    await clock.run(asyncio.to_thread(time.sleep, 0.02))
    assert clock.monotonic() == 0


async def test_run_gives_slow_threads_the_time_that_its_caller_knows_they_need() -> None:
    clock = TestClock()
    busy = False

    async def work() -> float:
        nonlocal busy
        busy = True
        await asyncio.to_thread(time.sleep, 0.1)
        busy = False
        return clock.monotonic()

    sleeper = asyncio.create_task(clock.sleep(10))
    assert await clock.run(work(), is_busy=lambda: busy) == 0
    assert await clock.run(work()) == 10
    await sleeper


async def test_run_advances_in_the_end_for_busy_work_that_sleeps_on_the_clock() -> None:
    clock = TestClock()
    await clock.run(clock.sleep(10), is_busy=lambda: True)
    assert clock.monotonic() == 10


async def test_run_raises_what_the_coroutine_raises() -> None:
    async def work() -> None:
        await clock.sleep(1)
        raise LookupError("gone")

    clock = TestClock()
    with pytest.raises(LookupError, match="gone"):
        await clock.run(work())


async def test_run_names_the_place_of_a_coroutine_that_waits_for_something_else() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    clock = TestClock()
    expected = r"(?s)not finished after 0.02s of real time.*No task sleeps on this clock"
    with pytest.raises(NotFinished, match=expected):
        await clock.run(stuck(), limit=0.02)


async def test_run_ends_when_the_clock_is_polled_forever() -> None:
    clock = TestClock()

    async def poll() -> None:
        while True:
            await clock.sleep(1)

    with pytest.raises(NotFinished, match="Tasks still sleep on this clock"):
        await clock.run(poll(), limit=0.05)


async def test_cancelling_run_cancels_the_coroutine() -> None:
    clock = TestClock()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(clock.run(work()))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert ended.is_set()


async def test_run_takes_a_coroutine() -> None:
    with pytest.raises(InvalidArgument, match="work: expected a coroutine"):
        await TestClock().run(7)  # type: ignore[arg-type]
