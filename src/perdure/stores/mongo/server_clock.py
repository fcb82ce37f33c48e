"""An estimate of the server's clock: a new run is inserted with its lease, and an insert cannot
compute the time on the server.

The server's last reply and the time elapsed since give two bounds: one counted from the request,
one from the reply. Unless it was set in the meantime, the server's clock is between them.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from perdure.clock import Clock, SystemClock

# In this time, two good clocks drift apart by less than a millisecond.
_MAX_AGE = timedelta(seconds=10)
_MARGIN = timedelta(milliseconds=10)
# Replies of an unchanged clock differ by no more than the time it takes to ask.
_MAX_STEP_BACK = timedelta(seconds=1)


class ServerClock:
    """The server's time, asked for every few seconds."""

    def __init__(
        self, ask: Callable[[], Awaitable[datetime]], clock: Clock = SystemClock()
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._answer: datetime | None = None
        self._asked_at = self._answered_at = 0.0
        self._answered_on = clock.now()
        self._past = datetime.min.replace(tzinfo=UTC)

    async def now(self) -> datetime:
        """Return a time shortly ahead of the server's clock."""
        # Measured by the wall clock too, because a monotonic clock may stand still while a machine
        # sleeps.
        age = self._clock.now() - self._answered_on
        answer = self._answer if timedelta(0) <= age < _MAX_AGE else None
        if answer is None:
            answer = await self._read()
        return answer + timedelta(seconds=self._clock.monotonic() - self._asked_at)

    async def past(self) -> datetime:
        """Return a time that the server's clock passed a short while ago.

        It is never before an earlier result, whatever the server replies next, so runs that are
        enqueued later become due later (unless the server's clock was set back).
        """
        latest = await self.now()
        past = latest - timedelta(seconds=self._answered_at - self._asked_at) - _MARGIN
        if not past < self._past < past + _MAX_STEP_BACK:
            self._past = past
        return self._past

    async def wait_past(self, time: datetime) -> None:
        """Wait until the server's clock has passed a time that `now` returned.

        Usually it has: what was done since took longer than asking for the time.
        """
        answer = self._answer or await self._read()
        while answer + timedelta(seconds=self._clock.monotonic() - self._answered_at) < time:
            answer = await self._read()

    def forget(self) -> None:
        """Ask again next time, because another server with another clock may answer."""
        self._answer = None

    async def _read(self) -> datetime:
        asked_at = self._clock.monotonic()
        answer = await self._ask()
        self._asked_at, self._answered_at = asked_at, self._clock.monotonic()
        self._answered_on = self._clock.now()
        self._answer = answer
        return answer
