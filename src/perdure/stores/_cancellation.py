"""Cancellations that a driver swallows: a store raises them itself.

Before Python 3.12, `asyncio.wait_for` returns normally if its task is cancelled when what it awaits
has just ended, and drivers use it. A loop that is cancelled once would then never end.
"""

import asyncio


def count_cancellations() -> int:
    """Return how often the current task was cancelled; if that grows in a call, it must end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def swallowed_cancellation() -> asyncio.CancelledError:
    """Return a cancellation to raise instead of the one that was swallowed.

    The arguments of that are unknown, but a scope of anyio has to recognize its own by them. This
    one has some, so that a write which is cancelled again raises the later one: anyio cancels a
    task in every iteration of the event loop until it has left the scope.
    """
    return asyncio.CancelledError("a driver swallowed the cancellation")
