"""The server's clock, told from here: a new run is inserted with its lease, and no insert computes.

What the server said last and the time since then give two bounds. Its clock shows a moment between
them, unless it was set meanwhile: since it was asked, and since it was heard.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from perdure.clock import Clock, SystemClock

# A good clock goes wrong by less than a millisecond in that time.
_TRUST = timedelta(seconds=10)
_SLACK = timedelta(milliseconds=10)


class ServerClock:
    """Tells the server's time, which it asks for every few seconds."""

    def __init__(
        self, ask: Callable[[], Awaitable[datetime]], clock: Clock = SystemClock()
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._told: datetime | None = None
        self._asked_at = self._heard_at = 0.0
        self._heard_on = clock.now()

    async def now(self) -> datetime:
        """Give a moment that the server's clock has not passed yet, and is very near to."""
        # By the calendar, too: this machine may have slept.
        age = self._clock.now() - self._heard_on
        told = self._told if timedelta(0) <= age < _TRUST else None
        if told is None:
            told = await self._read()
        return told + timedelta(seconds=self._clock.monotonic() - self._asked_at)

    async def past(self) -> datetime:
        """Give a moment that the server's clock has passed already, and not long ago."""
        since_asked = await self.now()
        return since_asked - timedelta(seconds=self._heard_at - self._asked_at) - _SLACK

    async def pass_by(self, moment: datetime) -> None:
        """Wait until the server's clock has passed a moment that `now` gave.

        It has, when all since then took longer than the question for the time did.
        """
        told = self._told or await self._read()
        while told + timedelta(seconds=self._clock.monotonic() - self._heard_at) < moment:
            told = await self._read()

    def forget(self) -> None:
        """Know nothing: another server may answer from now on, with a clock of its own."""
        self._told = None

    async def _read(self) -> datetime:
        asked_at = self._clock.monotonic()
        told = await self._ask()
        self._asked_at, self._heard_at = asked_at, self._clock.monotonic()
        self._heard_on = self._clock.now()
        self._told = told
        return told
