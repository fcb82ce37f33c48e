"""Notifications for stores that cannot push them: a thread checks for changes every 20 ms.

Each listener has its own thread: the disk may be slow, and the event loop must not wait for it.
While nothing becomes due, the loop is not woken at all, and the thread checks less and less often:
every 40 ms after two seconds. Half of the runs that become due then are still noticed in 20 ms.

What a check costs is the wake-up of the thread and Python's cold caches, 0.1 ms on two busy cores;
SQLite itself takes 4 µs. A `SimpleQueue` to wait for costs a quarter less than an `Event`, which
is written in Python.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias

Look: TypeAlias = Callable[[], bool]

INTERVAL_SECONDS, IDLE_INTERVAL_SECONDS = 0.02, 0.04
GROWTH = 1.01
"""How much longer the pause is after each check that finds nothing."""


class Notifications:
    """The listeners of a store that must be polled.

    `watch` is entered in the listener's thread. It yields a function that returns whether a run may
    have become due since its previous call, or ever before its first call.
    """

    def __init__(self, watch: Callable[[], AbstractContextManager[Look]]) -> None:
        self._watch = watch
        self._listeners: set[_Listener] = set()
        self._lock = Lock()
        self._is_closed = False

    async def listen(self) -> AsyncGenerator[None]:
        """Yield whenever a check finds a change; end when the store closes."""
        listener = _Listener(self._watch, self._forget)
        with self._lock:
            if self._is_closed:
                return
            self._listeners.add(listener)
            listener.thread.start()
        try:
            while await listener.next():
                yield
        finally:
            listener.stop()

    def stop(self) -> Sequence[Thread]:
        """Ask all threads to end, without waiting for them; return those that were running."""
        with self._lock:
            self._is_closed = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener.stop()
        return [listener.thread for listener in listeners]

    async def close(self) -> None:
        """End all listeners, and return when their threads have ended."""
        threads = self.stop()
        if threads:
            await asyncio.get_running_loop().run_in_executor(None, _join, threads)

    def _forget(self, listener: "_Listener") -> None:
        with self._lock:
            self._listeners.discard(listener)


class _Listener:
    """A thread that checks for changes, and the coroutine that waits for them."""

    def __init__(
        self,
        watch: Callable[[], AbstractContextManager[Look]],
        forget: Callable[["_Listener"], None],
    ) -> None:
        self.thread = Thread(target=self._run, name="perdure notifications", daemon=True)
        self._watch = watch
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._stops: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._error: Exception | None = None

    async def next(self) -> bool:
        """Wait until a check finds a change; return `False` once the listener has stopped."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        return not self._is_over

    def stop(self) -> None:
        """Ask the thread to end; `next` then returns `False`."""
        self._stops.put(None)

    def _run(self) -> None:
        try:
            with self._watch() as look:
                self._check_until_stopped(look)
        except Exception as error:  # noqa: BLE001 - raised where the listener waits
            self._error = error
        finally:
            self._is_over = True
            self._wake()
            self._forget(self)

    def _check_until_stopped(self, look: Look) -> None:
        pause = 0.0
        while not self._is_stopped_within(pause):
            if look():
                self._wake()
                pause = INTERVAL_SECONDS
            else:
                pause = min(max(pause, INTERVAL_SECONDS) * GROWTH, IDLE_INTERVAL_SECONDS)

    def _is_stopped_within(self, seconds: float) -> bool:
        try:
            self._stops.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            # The loop was closed in the meantime, so nothing waits any longer.
            self.stop()


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        thread.join()
