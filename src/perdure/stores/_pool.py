"""Connections to a database server: a small pool of the store's own, or the user's pool.

Backends subclass these pools for their driver. `stores._lifecycle` decides when the connections of
an event loop that has ended are dropped.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Protocol

from perdure.clock import Clock
from perdure.errors import StoreClosed, StoreUnavailable
from perdure.stores._cancellation import count_cancellations, swallowed_cancellation
from perdure.stores._lifecycle import CallsInFlight

_FIRST_PAUSE, _MAX_PAUSE = 0.05, 1.0

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """A source of connections; `location` names the server in errors."""

    location: str

    async def acquire(self) -> Any:
        """Return a connection for the caller's exclusive use until it is released."""
        ...

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Take a connection back; it is not `reusable` if a reply may still be on its way."""
        ...

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended."""
        ...

    async def close(self) -> None:
        """Close the connections that this pool opened."""
        ...


class ConnectionPool(ABC):
    """At most `limit` connections, opened on demand and kept open.

    The drivers' own pools create a task whenever a connection is returned, and asyncpg's also
    resets the session; together this takes a fifth of the time of a commit.
    """

    def __init__(
        self, name: str, location: str, *, limit: int, connect_timeout: float, clock: Clock
    ) -> None:
        self.name = name
        self.location = location
        self._limit = limit
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._idle: list[tuple[Any, float]] = []
        self._free = asyncio.Semaphore(limit)
        self._calls = CallsInFlight()
        self._is_closed = False
        self._is_unavailable = False

    async def acquire(self) -> Any:
        """Return an idle connection or a new one; wait while all are in use."""
        await self._free.acquire()
        self._calls.begin()
        try:
            while self._idle:
                connection, since = self._idle.pop()
                if await self._is_alive(connection, self._clock.monotonic() - since):
                    return connection
            return await self.connect()
        except BaseException:
            self._give_back()
            raise

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Keep the connection for the next caller if it is reusable; otherwise abort it."""
        if reusable and not self._is_closed and self._is_open(connection):
            self._idle.append((connection, self._clock.monotonic()))
        else:
            self._abort(connection)
        self._give_back()

    def _give_back(self) -> None:
        self._free.release()
        self._calls.end()

    async def connect(self) -> Any:
        """Open a connection outside the pool's limit, retrying for up to `connect_timeout`."""
        started_at = self._clock.monotonic()
        pause = _FIRST_PAUSE
        while not self._is_closed:
            try:
                return await self._try_to_connect()
            except StoreUnavailable as error:
                total = self._clock.monotonic() - started_at
                if total + pause > self._connect_timeout:
                    raise StoreUnavailable(f"{error} (tried for {total:.1f}s)") from error.__cause__
            await self._clock.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        raise StoreClosed(f"this {self.name} store is closed; open a new one")

    async def _try_to_connect(self) -> Any:
        """Connect, or log that an outage begins: if the URL is wrong, callers wait in silence."""
        cancellations = count_cancellations()
        try:
            connection = await self._connect_once()
        except StoreUnavailable as error:
            if not self._is_unavailable:
                logger.warning("%s; retrying for up to %gs", error, self._connect_timeout)
            self._is_unavailable = True
            raise
        self._is_unavailable = False
        if count_cancellations() > cancellations:
            self._abort(connection)
            raise swallowed_cancellation()
        return connection

    async def disconnect(self, connection: Any) -> None:
        """Close a connection; abort it if the server does not answer."""
        try:
            await self._close(connection)
        except self._errors:
            self._abort(connection)

    def forget_loop(self) -> None:
        """Drop the connections of an event loop that has ended: they cannot even be closed."""
        self._idle.clear()
        self._free = asyncio.Semaphore(self._limit)
        self._calls = CallsInFlight()

    async def close(self) -> None:
        """Close the connections; one that a call keeps for long is aborted when it is released."""
        self._is_closed = True
        await self._calls.ended()
        while self._idle:
            connection, _ = self._idle.pop()
            await self.disconnect(connection)

    @property
    @abstractmethod
    def _errors(self) -> tuple[type[BaseException], ...]:
        """The exceptions that the driver and the network raise."""

    @abstractmethod
    async def _connect_once(self) -> Any:
        """Open a connection; raise `StoreUnavailable` if trying again may help."""

    @abstractmethod
    def _is_open(self, connection: Any) -> bool:
        """Return whether the driver considers the connection open."""

    async def _is_alive(self, connection: Any, idle_seconds: float) -> bool:
        """Return whether a connection that was idle for this long can be used."""
        return self._is_open(connection)

    @abstractmethod
    async def _close(self, connection: Any) -> None:
        """Close a connection in the way the server expects."""

    @abstractmethod
    def _abort(self, connection: Any) -> None:
        """Close the socket at once, without notifying the server."""


class BorrowedPool:
    """A driver's pool that the user passed in, and that is never closed here."""

    location = "the pool that was passed in"

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def acquire(self) -> Any:
        """Return a connection of the pool as soon as it has one."""
        return await self._pool.acquire()

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Return the connection to its pool."""
        await self._pool.release(connection)

    def forget_loop(self) -> None:
        """Do nothing: a pool cannot move to another event loop."""

    async def close(self) -> None:
        """Do nothing: the pool belongs to the user."""
