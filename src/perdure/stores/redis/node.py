"""How commands reach a Redis server: through a pool of connections."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeAlias

from perdure.errors import StoreClosed
from perdure.stores.redis.errors import NotSent, driver_errors, load_driver, load_exceptions

Value: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Value]

_SCAN_COUNT = 1000
_PARTING = 2.0


def packed(command: Command) -> bytes:
    """Give a command as it goes over the wire; the driver takes far longer for many values."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    told = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    return b"*%d\r\n%b" % (len(words), told)


class Link(Protocol):
    """A way to the server. `is_split` says that keys of two shards never go in one command."""

    where: str
    is_split: bool

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Give the reply to each command, its refusal included; raise when the way is cut."""
        ...

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Give the reply of each primary."""
        ...

    def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Give the keys that match; a key may come twice."""
        ...

    def subscriber(self) -> AbstractAsyncContextManager[Any]:
        """Give a subscriber of the driver's, on a connection of its own."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class NodeLink:
    """One server, through a pool of the driver's, of which `limit` connections are used at once.

    Commands go by a connection and not by the driver's client: that one sends a command again whose
    answer was lost, also one that must not be done twice.
    """

    is_split = False

    def __init__(
        self, make_pool: Callable[[], Any], *, where: str, limit: int, is_ours: bool
    ) -> None:
        self.where = where
        self._make_pool = make_pool
        self._limit = limit
        self._is_ours = is_ours
        self._is_closed = False
        self._errors = driver_errors()
        self._refusal: type[Exception] = load_exceptions().ResponseError
        self._home: asyncio.AbstractEventLoop | None = None
        self._pool: Any = None
        self._free = asyncio.Semaphore(limit)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands together and give the reply to each."""
        pool = self._settle()
        task = asyncio.current_task()
        cancellations = 0 if task is None else task.cancelling()
        async with self._free:
            connection = await self._connection(pool)
            is_sound = False
            try:
                await connection.send_packed_command([packed(command) for command in commands])
                if task is not None and task.cancelling() > cancellations:
                    # The driver sends under `wait_for`, which on Python 3.11 swallows a
                    # cancellation that arrives as its work ends.
                    raise asyncio.CancelledError
                replies = [await self._reply(connection) for _ in commands]
                is_sound = True
                return replies
            finally:
                # A reply may be on its way, and must not meet the next command.
                if not is_sound or self._is_closed:
                    await connection.disconnect(nowait=True)
                await pool.release(connection)

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Give the reply of the server."""
        return await self.send([command])

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Give the keys that match; a key may come twice."""
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
        """Give a subscriber on the connection that commands leave free."""
        client = load_driver().Redis(connection_pool=self._settle())
        async with client.pubsub() as subscriber:
            yield subscriber

    async def close(self) -> None:
        """Close the connections when they are ours, as soon as those who use them are done."""
        self._is_closed = self._is_ours
        if self._is_ours and self._home is asyncio.get_running_loop():
            leaving = asyncio.ensure_future(self._left())
            await asyncio.wait([leaving], timeout=_PARTING)
            leaving.cancel()
            await asyncio.wait([leaving])
            await self._pool.aclose()

    async def _left(self) -> None:
        """Wait until nobody uses a connection."""
        async with AsyncExitStack() as places:
            for _ in range(self._limit):
                await places.enter_async_context(self._free)

    def _settle(self) -> Any:
        # Connections of a loop that has ended are lost with it.
        if self._home is not asyncio.get_running_loop():
            self._home = asyncio.get_running_loop()
            self._pool = self._make_pool()
            self._free = asyncio.Semaphore(self._limit)
        return self._pool

    async def _connection(self, pool: Any) -> Any:
        if self._is_closed:
            raise StoreClosed("this Redis store was closed; open a new one")
        try:
            return await pool.get_connection()
        except self._errors as error:
            if isinstance(error, load_exceptions().AuthenticationError):
                raise
            raise NotSent(str(error)) from error

    async def _reply(self, connection: Any) -> Any:
        try:
            return await connection.read_response(disable_decoding=True)
        except self._refusal as refusal:
            return refusal
