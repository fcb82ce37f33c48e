"""How often a worker polls, and whether it gets to it."""

import logging
from random import Random

from perdure.clock import Clock
from perdure.store import ScheduleStore, can_notify

SHORTEST_POLL, POLL_GROWTH = 0.02, 0.1
"""The pause without notifications, relative to the time since there was work, and its minimum."""

SECOND_LOOK = 0.005
"""Seconds until a worker claims again if it was woken during a claim that found runs."""

BLOCKED_AFTER, WARNING_INTERVAL = 2.0, 60.0
"""How late a pause may end, in seconds, before it is logged, and how often that is logged."""

logger = logging.getLogger(__name__)


class Pace:
    """The pauses between the claims of a worker that polls every `poll` seconds when idle."""

    def __init__(self, store: ScheduleStore, clock: Clock, random: Random, poll: float) -> None:
        self._store = store
        self._clock = clock
        self._random = random
        self._poll = poll
        self._last_work: float | None = None
        self._last_warning: float | None = None

    def note_work(self) -> None:
        """Poll more often from now on, because there was work."""
        self._last_work = self._clock.monotonic()

    def note_pause(self, seconds: float, started_at: float) -> None:
        """Warn if a pause of these seconds has ended late: no other task could run either."""
        now = self._clock.monotonic()
        late = now - started_at - seconds
        last = self._last_warning
        if late < BLOCKED_AFTER or (last is not None and now - last < WARNING_INTERVAL):
            return
        self._last_warning = now
        logger.warning(
            "the event loop was blocked for %.1f s, and no run could continue; after some time, "
            "leases are lost. A function that computes or blocks must be a plain one, passed with "
            "its arguments, step('id', function, argument): it is called in a thread. Async "
            "functions and lambdas are called in the event loop",
            late,
        )

    def pause(self) -> float:
        """Return the seconds until the next claim, with jitter, so that workers spread out."""
        return self._seconds() * (0.75 + self._random.random() / 2)

    def _seconds(self) -> float:
        if self._last_work is None or can_notify(self._store):
            return self._poll
        idle = self._clock.monotonic() - self._last_work
        return min(max(SHORTEST_POLL, idle * POLL_GROWTH), self._poll)
