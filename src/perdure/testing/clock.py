"""A clock that tests advance."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from inspect import isawaitable
from itertools import count
from typing import TypeVar

from perdure.clock import Duration, SystemClock, as_utc, finite_seconds, parse_duration
from perdure.engine.asyncio_internals import has_ready_callbacks, place
from perdure.engine.tasks import Task, cancel_and_wait
from perdure.errors import InvalidArgument, InvalidDuration

T = TypeVar("T")

_real = SystemClock()
_SHORT = timedelta(seconds=1)
# How long threads and sockets get in real time, in seconds, before the clock is advanced. They get
# longer before a long wait ends, because a lease may expire with it.
_PAUSE_BEFORE_SHORT, _PAUSE_BEFORE_LONG = 0.005, 0.025
# The same while the caller knows of work in progress. Limited, because the work may itself sleep on
# the clock.
_PAUSE_WHILE_BUSY = 1.0
_MAX_YIELDS = 10_000
_YIELDS_WITHOUT_READY = 100


@dataclass(order=True, slots=True)
class _Sleeper:
    deadline: timedelta
    number: int
    wake_up: asyncio.Future[None] = field(compare=False)


class NotFinished(AssertionError):
    """A coroutine did not finish, even though the clock was advanced for it."""


class TestClock:
    """A `Clock` whose time passes only in `advance` and `run`: `await clock.advance("7 days")`."""

    __test__ = False

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._start = as_utc(start, "start")
        self._elapsed = timedelta(0)
        self._sleepers: list[_Sleeper] = []
        self._numbers = count()
        self._lock = asyncio.Lock()

    def now(self) -> datetime:
        """Return the current time of the clock, in UTC."""
        return self._start + self._elapsed

    def monotonic(self) -> float:
        """Return how many seconds the clock has been advanced since it was created."""
        return self._elapsed.total_seconds()

    @property
    def sleepers(self) -> int:
        """The number of tasks that are sleeping on this clock."""
        return sum(not sleeper.wake_up.done() for sleeper in self._sleepers)

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait until the clock has advanced this far; zero or less yields to the loop once."""
        deadline = self._elapsed + _span(seconds)
        if deadline <= self._elapsed:
            await _yield_once()
            return
        wake_up = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, _Sleeper(deadline, next(self._numbers), wake_up))
        await wake_up

    async def advance(self, duration: Duration) -> None:
        """Advance the clock, waking sleeping tasks in the order of their deadlines.

        At each deadline all tasks run until they wait for something, so a task that sleeps again is
        woken again if its new deadline is reached. Work in threads and on sockets is not awaited.
        """
        span = parse_duration(duration)
        async with self._lock:
            await _idle()
            await self._wake_until(self._reachable(span))

    async def advance_to_next(self) -> bool:
        """Advance the clock to the next deadline of a sleeping task; return whether there is one.

        At first all tasks run until they wait for something. Work in threads and on sockets is not
        awaited.
        """
        async with self._lock:
            await _idle()
            deadline = self._next_deadline()
            if deadline is not None:
                await self._wake_until(deadline)
            return deadline is not None

    async def run(
        self,
        work: Awaitable[T],
        *,
        limit: Duration = 30,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a coroutine, advancing the clock to the next deadline whenever it waits.

        Before each advance, work in threads and on sockets gets some real time: a few milliseconds,
        or up to a second while `is_busy` returns true. If the coroutine takes longer than `limit`
        in real time, it is cancelled and `NotFinished` is raised.
        """
        span = parse_duration(limit, "limit")
        if not isawaitable(work):
            raise InvalidArgument("work", work, "a coroutine: clock.run(runtime.trigger(order))")
        task = asyncio.ensure_future(work)
        try:
            await self._advance_until_done(task, span, is_busy)
            return task.result()
        finally:
            await cancel_and_wait([task])

    async def _advance_until_done(
        self, task: Task, limit: timedelta, is_busy: Callable[[], bool]
    ) -> None:
        end = _real.monotonic() + limit.total_seconds()
        while not task.done():
            patience = _real.monotonic() + _PAUSE_WHILE_BUSY
            await asyncio.wait([task], timeout=self._pause())
            await _idle(self._lock.locked)
            while is_busy() and not task.done() and _real.monotonic() < patience:
                await asyncio.wait([task], timeout=self._pause())
                await _idle(self._lock.locked)
            if not task.done():
                await self.advance_to_next()
            if not task.done() and _real.monotonic() > end:
                raise NotFinished(self._why_not_finished(task, limit))

    def _pause(self) -> float:
        deadline = self._next_deadline()
        is_long = deadline is not None and deadline - self._elapsed > _SHORT
        return _PAUSE_BEFORE_LONG if is_long else _PAUSE_BEFORE_SHORT

    def _next_deadline(self) -> timedelta | None:
        while self._sleepers and self._sleepers[0].wake_up.done():
            heappop(self._sleepers)
        return self._sleepers[0].deadline if self._sleepers else None

    async def _wake_until(self, target: timedelta) -> None:
        while self._sleepers and self._sleepers[0].deadline <= target:
            sleeper = heappop(self._sleepers)
            if not sleeper.wake_up.done():
                self._elapsed = sleeper.deadline
                sleeper.wake_up.set_result(None)
                await _idle()
        self._elapsed = target

    def _why_not_finished(self, task: Task, limit: timedelta) -> str:
        seconds = limit.total_seconds()
        text = f"not finished after {seconds:g}s of real time: {place(task)}."
        if self.sleepers:
            return (
                f"{text} Tasks still sleep on this clock, which is now at {self.now()}. If they "
                "poll, as a Worker does, let long times pass with `await clock.advance(…)`"
            )
        return f"{text} No task sleeps on this clock; was it passed to the store and the runtime?"

    def _reachable(self, span: timedelta) -> timedelta:
        try:
            return self.now() + span - self._start
        except OverflowError:
            raise InvalidDuration("duration", span, "a duration that ends before 9999") from None


def _span(seconds: float | timedelta) -> timedelta:
    try:
        return timedelta(seconds=finite_seconds(seconds))
    except OverflowError:
        raise InvalidDuration("seconds", seconds, "at most 999,999,999 days") from None


async def _idle(is_advanced: Callable[[], bool] = lambda: False) -> None:
    """Let tasks run until all of them wait for something, or one advances the clock itself."""
    # The limit is for tasks that yield forever, and for event loops that do not show what is ready.
    for _ in range(_YIELDS_WITHOUT_READY if has_ready_callbacks() is None else _MAX_YIELDS):
        await _yield_once()
        # Otherwise two tasks that each wait until the other is idle would run into the limit.
        if has_ready_callbacks() is False or is_advanced():
            return


async def _yield_once() -> None:
    await _real.sleep(0)
