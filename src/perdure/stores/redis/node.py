"""Connections to one Redis server."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

from perdure.errors import StoreClosed
from perdure.stores._cancellation import count_cancellations, swallowed_cancellation
from perdure.stores._lifecycle import CallsInFlight
from perdure.stores.redis.errors import NotSent, driver_errors, load_driver, load_exceptions
from perdure.stores.redis.timeouts import Timeouts

Value: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Value]

_SCAN_COUNT = 1000


def pack(command: Command) -> bytes:
    """Return a command in the wire format; the driver is much slower for many values."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    body = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    return b"*%d\r\n%b" % (len(words), body)


class Link(Protocol):
    """Sends commands. With `is_sharded`, one command must not have keys of two shards.

    `location` names the server in errors.
    """

    location: str
    is_sharded: bool

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Return the reply to each command, or its error; raise if the connection is lost."""
        ...

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Return the reply of each primary."""
        ...

    def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys that match, some of them more than once."""
        ...

    def subscriber(self) -> AbstractAsyncContextManager[Any]:
        """Return one of the driver's subscribers, on its own connection."""
        ...

    def forget_loop(self) -> None:
        """Drop the connections, which belong to an event loop that has ended."""
        ...

    async def close(self) -> None:
        """Close the connections that this link opened."""
        ...


class NodeLink:
    """One server, through the driver's pool, of which `limit` connections are used at once.

    Commands are sent on a connection and not by the driver's client, which would repeat a command
    whose reply was lost, even one that must not be executed twice. `timeout` is how many seconds a
    reply may take; `None` leaves that to the driver, whose own timeout creates a task for each
    command.

    If the pool is ours, connections are returned to it only when they fail: taking a connection
    from the driver's pool and returning it is half of the driver's work for a command.
    """

    is_sharded = False

    def __init__(
        self,
        make_pool: Callable[[], Any],
        *,
        location: str,
        limit: int,
        is_ours: bool,
        timeout: float | None = None,
    ) -> None:
        self.location = location
        self._make_pool = make_pool
        self._limit = limit
        self._is_ours = is_ours
        self._timeout = timeout
        self._is_closed = False
        self._errors = driver_errors()
        self._refusal: type[Exception] = load_exceptions().ResponseError
        self.forget_loop()

    def forget_loop(self) -> None:
        """Drop the connections, which belong to an event loop that has ended."""
        self._pool: Any = None
        self._keeps_connections = False
        self._idle: list[Any] = []
        self._free = asyncio.Semaphore(self._limit)
        self._calls = CallsInFlight()
        self._timeouts = Timeouts(self._timeout)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands together and return the reply to each."""
        async with self._free:
            self._calls.begin()
            try:
                return await self._send(self._open_pool(), commands)
            except TimeoutError as error:
                raise TimeoutError(f"no reply within {self._timeout}s") from error
            finally:
                self._calls.end()

    async def _send(self, pool: Any, commands: Sequence[Command]) -> list[Any]:
        connection, is_reusable = None, False
        try:
            # One timeout for both: opening a connection also waits for replies.
            async with asyncio.timeout(None) as timeout:  # noqa: TID251 - real time
                self._timeouts.begin(timeout)
                try:
                    connection = await self._connection(pool)
                    replies = await self._replies(connection, commands)
                finally:
                    self._timeouts.end(timeout)
            is_reusable = True
            return replies
        finally:
            if connection is not None:
                await self._release(pool, connection, is_reusable=is_reusable)

    async def _replies(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        cancellations = count_cancellations()
        await connection.send_packed_command([pack(command) for command in commands])
        if count_cancellations() > cancellations:
            # With a timeout, the driver sends under `wait_for`.
            raise swallowed_cancellation()
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except self._refusal as refusal:
                replies.append(refusal)
        return replies

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Return the reply of the server."""
        return await self.send([command])

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys that match, some of them more than once."""
        cursor: Value = 0
        while True:
            [reply] = await self.send([("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)])
            if isinstance(reply, Exception):
                raise reply
            cursor, keys = reply
            for key in keys:
                yield key
            if int(cursor) == 0:
                return

    @asynccontextmanager
    async def subscriber(self) -> AsyncGenerator[Any]:
        """Provide a subscriber on the one connection that commands leave free."""
        client = load_driver().Redis(connection_pool=self._open_pool())
        async with client.pubsub() as subscriber:
            async with asyncio.timeout(self._timeout):  # noqa: TID251 - real time
                await subscriber.connect()
            yield subscriber

    async def close(self) -> None:
        """Close the connections if they are ours, after a short wait for commands in flight."""
        self._is_closed = self._is_ours
        if self._is_ours and self._pool is not None:
            await self._calls.ended()
            await self._pool.aclose()
            self._timeouts.close()

    def _open_pool(self) -> Any:
        if self._pool is None:
            self._pool = self._make_pool()
            self._keeps_connections = self._is_ours and self._may_keep_connections(self._pool)
        return self._pool

    def _may_keep_connections(self, pool: Any) -> bool:
        """Return whether a pool works as usual if connections are not returned to it.

        The parameters of a URL can change both conditions. With protocol 3, the server may announce
        its maintenance, and the driver's pool replaces connections when they are returned. A pool
        that is smaller than it should be would have no connection for notifications.
        """
        size: int = pool.max_connections
        return pool.connection_kwargs.get("protocol") == 2 and size > self._limit

    async def _connection(self, pool: Any) -> Any:
        if self._is_closed:
            raise StoreClosed("this Redis store was closed; open a new one")
        try:
            return await self._acquire(pool)
        except self._errors as error:
            if isinstance(error, load_exceptions().AuthenticationError):
                raise
            raise NotSent(str(error)) from error

    async def _acquire(self, pool: Any) -> Any:
        if not self._idle:
            return await pool.get_connection()
        connection = self._idle.pop()
        try:
            # Reconnects if the server has closed the connection, before anything is sent.
            await pool.ensure_connection(connection)
        except BaseException:
            await pool.release(connection)
            raise
        return connection

    async def _release(self, pool: Any, connection: Any, *, is_reusable: bool) -> None:
        if is_reusable and not self._is_closed:
            if self._keeps_connections:
                self._idle.append(connection)
                return
        else:
            # Otherwise a late reply would be read as the reply to the next command.
            await connection.disconnect(nowait=True)
        await pool.release(connection)
