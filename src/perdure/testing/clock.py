"""A clock that tests advance."""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count

from perdure.clock import Duration, SystemClock, as_utc, finite_seconds, parse_duration
from perdure.engine.tasks import has_ready_callbacks
from perdure.errors import InvalidDuration

_MAX_YIELDS = 10_000
_YIELDS_WITHOUT_READY = 100


@dataclass(order=True, slots=True)
class _Sleeper:
    deadline: timedelta
    number: int
    woken: asyncio.Future[None] = field(compare=False)


class TestClock:
    """A `Clock` whose time passes only in `advance`: `await clock.advance("7 days")`."""

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
        """Return by how many seconds the clock was advanced since it was created."""
        return self._elapsed.total_seconds()

    @property
    def sleepers(self) -> int:
        """The number of tasks that are sleeping on this clock."""
        return sum(not sleeper.woken.done() for sleeper in self._sleepers)

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait until the clock has advanced this far; zero or less yields to the loop once."""
        deadline = self._elapsed + _span(seconds)
        if deadline <= self._elapsed:
            await _yield_once()
            return
        woken = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, _Sleeper(deadline, next(self._numbers), woken))
        await woken

    async def advance(self, duration: Duration) -> None:
        """Advance the clock, waking sleeping tasks in the order of their deadlines.

        At each deadline all tasks run until they wait for something, so a task that sleeps again is
        woken again if its new deadline is reached. Work in threads and on sockets is not awaited.
        """
        span = parse_duration(duration)
        async with self._lock:
            await _idle()
            target = self._reachable(span)
            while self._sleepers and self._sleepers[0].deadline <= target:
                sleeper = heappop(self._sleepers)
                if not sleeper.woken.done():
                    self._elapsed = sleeper.deadline
                    sleeper.woken.set_result(None)
                    await _idle()
            self._elapsed = target

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


async def _idle() -> None:
    """Let tasks run until all of them wait for something."""
    # The limit is for tasks that yield forever, and for loops that do not tell.
    for _ in range(_YIELDS_WITHOUT_READY if has_ready_callbacks() is None else _MAX_YIELDS):
        await _yield_once()
        if has_ready_callbacks() is False:
            return


async def _yield_once() -> None:
    await SystemClock().sleep(0)
