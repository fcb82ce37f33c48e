"""Notifications about due runs, by LISTEN and NOTIFY.

A message or a new run is announced to the listeners of the store itself as soon as it is committed.
The server's notification of it would come later, and make a worker look for the same run twice, so
it is ignored.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from perdure.clock import Clock
from perdure.errors import StoreClosed, StoreUnavailable
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.errors import driver_errors
from perdure.stores.postgres.statements import ANNOUNCED

logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = 1
_UNLISTEN_SECONDS = 2


class Notifications:
    """Listens on a channel, with a separate connection for each listener."""

    def __init__(self, database: Database, channel: str, clock: Clock) -> None:
        self._database = database
        self._channel = channel
        self._clock = clock
        self._listeners: dict[_Listener, Any] = {}
        self._is_closed = False

    async def listen(self) -> AsyncGenerator[None]:
        """Yield once at first, then for each notification; end when `close` is called.

        A lost connection is replaced, followed by a yield for notifications that may have been
        missed.
        """
        while not self._is_closed:
            try:
                async with self._listening() as listener:
                    yield
                    while await listener.next():
                        yield
            except StoreClosed:
                return  # the store was closed while this connected
            except StoreUnavailable as error:
                logger.warning("notifications interrupted: %s", error)
                await self._clock.sleep(_RECONNECT_SECONDS)

    @contextmanager
    def announcing(self) -> Generator[None]:
        """Wake the listeners of this store after a write that may make a run due."""
        with self.announcing_failure():
            yield
        self.announce()

    @contextmanager
    def announcing_failure(self) -> Generator[None]:
        """Wake the listeners after a write only if its outcome is unknown."""
        try:
            yield
        except BaseException:
            # The write may still be committed, after the listeners have looked for due runs.
            for listener in self._listeners:
                listener.heeds_own = True
            self.announce()
            raise

    def announce(self) -> None:
        """Wake the listeners of this store."""
        for listener in self._listeners:
            listener.wake()

    def forget_loop(self) -> None:
        """Drop the listeners of an event loop that has ended."""
        self._listeners.clear()

    async def close(self) -> None:
        """End all listeners and close their connections."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.stop()
            await self._disconnect(listener)

    @asynccontextmanager
    async def _listening(self) -> AsyncGenerator["_Listener"]:
        connection = await self._database.pool.connect()
        listener = _Listener(self._database.pool.has_process)
        self._listeners[listener] = connection
        if self._is_closed:
            listener.stop()  # the store was closed while this connected
        try:
            connection.add_termination_listener(listener.stop)
            with self._database.translate_errors():
                await connection.add_listener(self._channel, listener.notified)
            yield listener
        finally:
            await self._disconnect(listener)

    async def _disconnect(self, listener: "_Listener") -> None:
        # Both the listener's own task and `close` get here; the second one waits for the first.
        async with listener.disconnecting:
            connection = self._listeners.get(listener)
            if connection is None:
                return
            connection.remove_termination_listener(listener.stop)
            try:
                await self._unlisten(connection, listener)
            finally:
                await self._database.pool.disconnect(connection)
                del self._listeners[listener]

    async def _unlisten(self, connection: Any, listener: "_Listener") -> None:
        """Execute UNLISTEN, or abort the connection if that fails or takes too long."""
        try:
            async with asyncio.timeout(_UNLISTEN_SECONDS):  # noqa: TID251 - real time
                await connection.remove_listener(self._channel, listener.notified)
        except driver_errors():
            # Not raised: the error would replace the cancellation that ends the listener, which
            # would then reconnect. A pool that takes the connection back would wait for the server
            # again, or lend a connection that still expects a reply.
            connection.terminate()


class _Listener:
    """Remembers whether a connection has received a notification since the last call of `next`.

    `is_own` returns whether a process of the server belongs to a connection of this store, whose
    notifications are ignored unless the listener `heeds_own`.
    """

    def __init__(self, is_own: Callable[[int], bool]) -> None:
        self.disconnecting = asyncio.Lock()
        self.heeds_own = False
        self._is_own = is_own
        self._changed = asyncio.Event()
        self._is_stopped = False

    def notified(self, _connection: Any, process: int, _channel: str, payload: str) -> None:
        if self.heeds_own or payload != ANNOUNCED or not self._is_own(process):
            self.wake()

    def wake(self) -> None:
        self._changed.set()

    def stop(self, *_: Any) -> None:
        self._is_stopped = True
        self._changed.set()

    async def next(self) -> bool:
        """Wait for a notification; return `False` once the listener has stopped."""
        await self._changed.wait()
        self._changed.clear()
        return not self._is_stopped
