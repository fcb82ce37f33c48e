"""Wait for an event, but not for longer than a time on a clock."""

import asyncio

from perdure.clock import Clock, SystemClock
from perdure.engine.tasks import Task, detached, outside_runs


async def wait_until_set(event: asyncio.Event, clock: Clock, seconds: float) -> None:
    """Wait until the event is set; set it after this many seconds."""
    timer = _set_after(event, clock, seconds)
    try:
        # Not in a separate task, so that the waiter runs in the next iteration of the event loop.
        await event.wait()
    finally:
        timer.cancel()


def _set_after(event: asyncio.Event, clock: Clock, seconds: float) -> "asyncio.TimerHandle | Task":
    if type(clock) is not SystemClock:
        return detached(_sleep_and_set(event, clock, seconds))
    with outside_runs():
        # Without a task: a busy worker waits after each claim.
        return asyncio.get_running_loop().call_later(seconds, event.set)


async def _sleep_and_set(event: asyncio.Event, clock: Clock, seconds: float) -> None:
    await clock.sleep(seconds)
    event.set()
