"""An event loop in its own thread, for calls from code without one."""

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from perdure.engine.tasks import Task, cancel_and_wait
from perdure.errors import StoreClosed

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """Runs coroutines for many threads in one event loop, whose thread the first call starts.

    The thread is a daemon, so that a program can end without closing the portal; the portal is then
    closed when the interpreter exits, after all other threads. `on_close` is awaited before the
    loop ends. A process that is forked later does not have the thread: `is_lost` is true there.
    """

    def __init__(self, on_close: Callable[[], Awaitable[object]]) -> None:
        self.is_lost = False
        self._on_close = on_close
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event: asyncio.Event | None = None
        self._calls: set[object] = set()
        self._is_closed = False
        _portals.add(self)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the value of a coroutine; interrupting the caller cancels the coroutine."""
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if _exit.is_set():
                # This is a daemon thread of a program that has ended: all it can do is block.
                threading.Event().wait()
            raise StoreClosed("the client was closed while a call waited for its answer") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine in the loop; raise `StoreClosed` after `close`."""
        # Under the lock, so that `close` cannot end the loop in between.
        with self._lock:
            if self._is_closed:
                work.close()
                raise StoreClosed("this client is closed; open a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop or self._start())
            self._calls.add(work)
        future.add_done_callback(lambda _: self._calls.discard(work))
        return future

    def discard(self, generator: AsyncGenerator[object, None]) -> None:
        """Close an async generator without waiting; otherwise `close` would do it."""
        if not self.is_lost:
            with suppress(StoreClosed):
                self.submit(_close(generator))

    def stop(self) -> None:
        """Reject further calls, cancel those that are waiting, and let the thread end."""
        if self.is_lost:
            return  # another thread of the parent may have held the lock when it forked
        with self._lock:
            if self._loop is not None and self._stop_event is not None and not self._is_closed:
                self._loop.call_soon_threadsafe(self._stop_event.set)
            self._is_closed = True

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread is not None and not self.is_lost:
            self._thread.join()

    def _start(self) -> asyncio.AbstractEventLoop:
        loop, self._stop_event = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(loop, self._stop_event), name="perdure.sync", daemon=True
        )
        self._thread.start()
        self._loop = loop
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop, stop_event: asyncio.Event) -> None:
        try:
            loop.run_until_complete(self._live(stop_event))
        finally:
            loop.close()

    async def _live(self, stop_event: asyncio.Event) -> None:
        await stop_event.wait()
        # The calls end first: they use the store, which may have its own tasks.
        await cancel_and_wait(task for task in _others() if task.get_coro() in self._calls)
        # At the end of a program, no more threads can be started.
        asyncio.get_running_loop().set_default_executor(_InPlace())
        try:
            await self._on_close()
        except Exception:
            logger.exception("the store of a client could not be closed")
        await cancel_and_wait(_others())
        await asyncio.get_running_loop().shutdown_asyncgens()


class _InPlace(concurrent.futures.ThreadPoolExecutor):
    """Calls functions at once, in the thread that submits them."""

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[T]":
        """Call the function, and return a future that is done."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised by the future
            future.set_exception(error)
        return future


async def _close(generator: AsyncGenerator[object, None]) -> None:
    await generator.aclose()


def _others() -> set[Task]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


_portals: WeakSet[Portal] = WeakSet()
_exit = threading.Event()


def _close_all() -> None:
    _exit.set()
    for portal in tuple(_portals):
        portal.close()


def _forget_all() -> None:
    # A fork copies no threads. The loops must not be closed in the child: it shares their
    # connections, and the file descriptor with which the parent waits for them.
    for portal in tuple(_portals):
        portal.is_lost = True


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
