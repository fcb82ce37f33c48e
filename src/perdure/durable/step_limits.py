"""The limits of steps: each attempt waits in memory until there are permits for it.

For each limit, the attempts of this process wait in line. One call claims the permits for all of
them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from perdure.durable.permits import Hold, Permits, Pool
from perdure.durable.timers import wait_until_set
from perdure.engine.tasks import detached
from perdure.limits import Cost, PermitLimit, step_limit


@dataclass(eq=False, slots=True)
class _Waiter:
    units: int
    hold: Hold
    answer: "asyncio.Future[None]"


class _Line:
    """The attempts that wait for one limit, and the task that claims permits for them."""

    def __init__(self, permits: Permits, limit: PermitLimit) -> None:
        self.limit = limit
        self.pool = pool = permits.pool(limit)
        self._permits = permits
        self._clock = permits.clock
        self._waiters: deque[_Waiter] = deque()
        self._freed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        pool.on_free = self._on_free

    async def wait(self, units: int, on_lost: Callable[[], object]) -> Hold:
        """Wait until the units are claimed, and return them."""
        hold = Hold()
        hold.on_lost = on_lost
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(units, hold, answer)
        self._waiters.append(waiter)
        self._work()
        try:
            await answer
        except asyncio.CancelledError:
            # The units may have been assigned to it in the same iteration of the event loop.
            hold.end()
            raise
        return hold

    def _on_free(self, _: Pool) -> None:
        self._freed.set()
        self._work()

    def _work(self) -> None:
        if self.task is None or self.task.done():
            self.task = detached(self._claim_until_done())

    async def _claim_until_done(self) -> None:
        """Claim permits for the waiting attempts; return permits that none of them needs."""
        while True:
            self._freed.clear()
            try:
                await self._claim()
            except Exception as error:  # noqa: BLE001  # raised to the callers
                self._fail(error)
            # What is left is too little for the first in line, and another process may need it.
            await self._permits.return_idle([self.pool])
            if self._waiters:
                await self._pause()
            elif not self._freed.is_set():
                return

    async def _claim(self) -> None:
        self._drop_cancelled()
        # An operator may have changed the limit.
        self._permits.pool(self.limit)
        if self._waiters:
            units = sum(waiter.units for waiter in self._waiters)
            await self._permits.claim({self.pool: min(units, self.pool.limit.n)})
        self._drop_cancelled()
        while self._waiters and self._cost(self._waiters[0]) <= self.pool.free:
            waiter = self._waiters.popleft()
            self.pool.take(self._cost(waiter), waiter.hold)
            waiter.answer.set_result(None)
            self._drop_cancelled()

    def _cost(self, waiter: _Waiter) -> int:
        # Waiting for more than a lowered limit has would take forever.
        return min(waiter.units, self.pool.limit.n)

    def _drop_cancelled(self) -> None:
        while self._waiters and self._waiters[0].answer.done():
            self._waiters.popleft()

    def _fail(self, error: Exception) -> None:
        for waiter in self._waiters:
            if not waiter.answer.done():
                waiter.answer.set_exception(error)
        self._waiters.clear()

    async def _pause(self) -> None:
        """Wait until a permit may be free, or an attempt in this process has ended."""
        pause = max(self.pool.look_at - self._clock.monotonic(), 0.001)
        await wait_until_set(self._freed, self._clock, pause)


class StepLimits:
    """The limits of all steps of a store that are in flight in this process."""

    def __init__(self, permits: Permits) -> None:
        self.permits = permits
        self._lines: dict[str, _Line] = {}

    async def wait(self, cost: Cost, on_lost: Callable[[], object]) -> Hold:
        """Wait until the units that an attempt costs are claimed, and return them."""
        limit = step_limit(cost.limit)
        line = self._lines.get(limit.name)
        if line is None:
            line = self._lines[limit.name] = _Line(self.permits, limit)
        line.limit = limit
        return await line.wait(cost.units, on_lost)

    @property
    def used_limits(self) -> list[PermitLimit]:
        """The declared limits that steps have used so far."""
        return [line.limit for line in self._lines.values()]

    async def close(self) -> None:
        """Return all permits, because no step is in flight."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            await asyncio.wait([task])
