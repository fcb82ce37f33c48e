"""Timeouts of concurrent calls: the event loop has one timer for all of them."""

import asyncio


class Timeouts:
    """Timeouts of `seconds` each, or none if that is `None`.

    All have the same length, so they expire in the order in which they begin, and a timer for the
    first of them is sufficient.

        async with asyncio.timeout(None) as timeout:
            timeouts.begin(timeout)
            try:
                ...
            finally:
                timeouts.end(timeout)
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._deadlines: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Let a timeout that has no deadline expire after the given time."""
        if self._seconds is None:
            return
        loop = asyncio.get_running_loop()
        deadline = self._deadlines[timeout] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._expire, loop)

    def end(self, timeout: asyncio.Timeout) -> None:
        """Forget a timeout. The timer stays, because most likely the next call needs it."""
        self._deadlines.pop(timeout, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for timeout, deadline in [*self._deadlines.items()]:
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._expire, loop)
                break
            del self._deadlines[timeout]
            # Asyncio then cancels the task and turns the cancellation into a `TimeoutError`.
            timeout.reschedule(deadline)
