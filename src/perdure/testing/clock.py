"""A clock that moves only when told."""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count

from perdure.clock import Duration, SystemClock, as_utc, finite_seconds, parse_duration
from perdure.errors import InvalidDuration

_MAX_TURNS = 10_000
_BLIND_TURNS = 100


@dataclass(order=True, slots=True)
class _Sleeper:
    deadline: timedelta
    number: int
    woken: asyncio.Future[None] = field(compare=False)


class TestClock:
    """A `Clock` that stands still until `advance` moves it: `await clock.advance("7 days")`."""

    __test__ = False

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._start = as_utc(start, "start")
        self._elapsed = timedelta(0)
        self._sleepers: list[_Sleeper] = []
        self._numbers = count()
        self._moving = asyncio.Lock()

    def now(self) -> datetime:
        """Give the moment the clock stands at, in UTC."""
        return self._start + self._elapsed

    def monotonic(self) -> float:
        """Give the seconds the clock was moved since it was made."""
        return self._elapsed.total_seconds()

    @property
    def sleepers(self) -> int:
        """How many tasks sleep on this clock."""
        return sum(not sleeper.woken.done() for sleeper in self._sleepers)

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Wait until the clock was moved so far; zero or less lets other tasks run once."""
        deadline = self._elapsed + _span(seconds)
        if deadline <= self._elapsed:
            await _one_turn()
            return
        woken = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, _Sleeper(deadline, next(self._numbers), woken))
        await woken

    async def advance(self, duration: Duration) -> None:
        """Move the clock, waking sleepers in the order of their deadlines.

        At each deadline all tasks run until they wait for something, so one that wakes and sleeps
        again is woken again when its time comes. Work in threads and on sockets is not waited for.
        """
        span = parse_duration(duration)
        async with self._moving:
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
    # No public call tells whether a loop has anything left to run now; asyncio's own keeps it in
    # `_ready`. A task that never stops yielding must not keep the clock from moving.
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    for _ in range(_BLIND_TURNS if ready is None else _MAX_TURNS):
        await _one_turn()
        if ready is not None and not ready:
            return


async def _one_turn() -> None:
    await SystemClock().sleep(0)
