"""How commands reach Redis: one server through a pool, or a cluster through its client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeAlias

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.stores._redis_errors import NotSent, driver_errors, load_driver, load_exceptions

Value: TypeAlias = bytes | str | int
Command: TypeAlias = Sequence[Value]

_CLUSTER = "+cluster"
_SCAN_COUNT = 1000


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

    def subscriber(self) -> Any:
        """Give an async context with a subscriber of the driver's, on a connection of its own."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class _Lodging:
    """What belongs to one event loop: a pool or client, and how many may use it at once."""

    def __init__(self, make: Callable[[], Any], *, where: str, limit: int, is_ours: bool) -> None:
        self.where = where
        self._make = make
        self._limit = limit
        self._is_ours = is_ours
        self._errors = driver_errors()
        self._refusal: type[Exception] = load_exceptions().ResponseError
        self._home: asyncio.AbstractEventLoop | None = None
        self._driver: Any = None
        self._free = asyncio.Semaphore(limit)

    def _settle(self) -> Any:
        # Connections of a loop that has ended are lost with it.
        if self._home is not asyncio.get_running_loop():
            self._home = asyncio.get_running_loop()
            self._driver = self._make()
            self._free = asyncio.Semaphore(self._limit)
        return self._driver

    async def close(self) -> None:
        """Close the connections when they are ours."""
        if self._is_ours and self._driver is not None:
            await self._driver.aclose()


class NodeLink(_Lodging):
    """One server, through a pool of the driver's connections.

    Commands go by a connection and not by the driver's client: that one sends a command again whose
    answer was lost, also one that must not be done twice.
    """

    is_split = False

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands together and give the reply to each."""
        pool = self._settle()
        async with self._free:
            connection = await self._connection(pool)
            is_sound = False
            try:
                await connection.send_packed_command(connection.pack_commands(commands))
                replies = [await self._reply(connection) for _ in commands]
                is_sound = True
                return replies
            finally:
                if not is_sound:
                    # A reply may be on its way, and must not meet the next command.
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

    async def _connection(self, pool: Any) -> Any:
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


class ClusterLink(_Lodging):
    """A cluster, through the driver's client, which knows where each key is."""

    is_split = True

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands side by side and give the reply to each."""
        if len(commands) == 1:
            return [await self._send(commands[0])]
        replies = await asyncio.gather(*map(self._send, commands), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, self._refusal):
                raise reply
        return replies

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Give the reply of each primary."""
        client = await self._settle().initialize()
        return [await self._send(command, target_nodes=node) for node in client.get_primaries()]

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Give the keys of all primaries that match; a key may come twice."""
        async for key in self._settle().scan_iter(match=pattern, count=_SCAN_COUNT):
            yield key if isinstance(key, bytes) else key.encode()

    @asynccontextmanager
    async def subscriber(self) -> AsyncGenerator[Any]:
        """Give a subscriber at one node: what is published at another comes there too."""
        client = await self._settle().initialize()
        node = client.get_random_node()
        driver = load_driver()
        pool = driver.ConnectionPool(node.connection_class, **node.connection_kwargs)
        try:
            async with driver.Redis(connection_pool=pool).pubsub() as subscriber:
                yield subscriber
        finally:
            await pool.aclose()

    async def _send(self, command: Command, **options: Any) -> Any:
        client = self._settle()
        async with self._free:
            try:
                return await client.execute_command(*command, NEVER_DECODE=True, **options)
            except self._refusal as refusal:
                return refusal


def open_link(
    url: str | None, client: Any, *, cluster: bool, max_connections: int, timeout: Duration
) -> Link:
    """Give the link to the server of a URL, or through a client that was passed in."""
    driver = load_driver()
    if isinstance(max_connections, bool) or max_connections < 1:
        raise InvalidArgument("max_connections", max_connections, "a whole number, 1 or more")
    if client is not None:
        return _lent(client, max_connections)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidArgument("url", url, 'a URL such as "redis://localhost:6379/0", or a client=')
    scheme, _, rest = url.partition("://")
    plain = f"{scheme.removesuffix(_CLUSTER)}://{rest}"
    is_cluster = cluster or scheme.endswith(_CLUSTER)
    opener = driver.RedisCluster.from_url if is_cluster else driver.ConnectionPool.from_url
    options = _options(parse_duration(timeout, "timeout").total_seconds(), max_connections)
    kind = ClusterLink if is_cluster else NodeLink
    return kind(
        lambda: opener(plain, **options), where=place(url), limit=max_connections, is_ours=True
    )


def _options(timeout: float, max_connections: int) -> dict[str, Any]:
    driver = load_driver()
    from redis.backoff import NoBackoff

    return {
        # One more than commands may use, for whoever listens for hints.
        "max_connections": max_connections + 1,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": driver.retry.Retry(NoBackoff(), 0),
        "protocol": 2,
    }


def _lent(client: Any, max_connections: int) -> Link:
    driver = load_driver()
    if isinstance(client, driver.RedisCluster):
        kind: type[ClusterLink | NodeLink] = ClusterLink
        lent, allowed = client, client.connection_kwargs["max_connections"]
    elif isinstance(client, driver.Redis):
        kind = NodeLink
        lent, allowed = client.connection_pool, client.connection_pool.max_connections
    else:
        wanted = "a redis.asyncio.Redis or a redis.asyncio.RedisCluster"
        raise InvalidArgument("client", client, wanted)
    limit = max(1, min(max_connections, allowed - 1))
    return kind(lambda: lent, where="the client that was passed in", limit=limit, is_ours=False)


def place(url: str) -> str:
    """Give the host and database of a URL, for people: no user, no password."""
    return url.partition("://")[2].rpartition("@")[2].partition("?")[0] or url
