"""Connections to PostgreSQL: our own, a few and kept, or those of a pool that was passed in."""

import asyncio
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from perdure.clock import Clock, Duration, parse_duration
from perdure.errors import InvalidArgument, StoreClosed, StoreUnavailable
from perdure.stores.postgres.errors import (
    driver_errors,
    in_words,
    is_away,
    load_driver,
    translated,
)
from perdure.validation import check_flag, check_int

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Connections(Protocol):
    """Where a statement gets its connection from."""

    where: str
    role: str
    for_guests: str
    """What to run in a transaction before somebody else's statements, if anything."""

    async def take(self) -> Any:
        """Give a connection that nobody else uses until it is given back."""
        ...

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Take a connection back; one that is not sound may have an answer on its way."""
        ...

    async def dedicate(self) -> Any:
        """Give a connection to be kept for long, beside those that statements use."""
        ...

    async def dismiss(self, connection: Any) -> None:
        """Take back a connection that was kept for long."""
        ...

    def forget(self) -> None:
        """Drop what belongs to an event loop that has ended."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


_AS_USUAL = "SET LOCAL enable_seqscan = on; SET LOCAL plan_cache_mode = auto"


class OwnConnections:
    """At most `limit` connections, opened when needed and kept.

    The driver's own pool spends a fifth of a commit's time on handing a connection out and back:
    it resets the session, which perdure leaves as it is, and makes a task for it.
    """

    def __init__(
        self, url: str, *, limit: int, prepared: bool, connect_timeout: float, clock: Clock
    ) -> None:
        self.where = place(url)
        self.role = f'"{unquote(urlsplit(url).username or "")}"'
        self.for_guests = _AS_USUAL if prepared else ""
        self._url = url
        self._limit = limit
        self._prepared = prepared
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._idle: list[Any] = []
        self._free = asyncio.Semaphore(limit)
        self._closed = False

    async def take(self) -> Any:
        """Give an idle connection or a new one; waits when all are in use."""
        await self._free.acquire()
        try:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    return connection
            return await self.dedicate()
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Keep a sound connection for the next one who needs it."""
        if sound and not self._closed and not connection.is_closed():
            self._idle.append(connection)
        else:
            connection.terminate()
        self._free.release()

    async def dedicate(self) -> Any:
        """Give a new connection, trying for as long as patience lasts."""
        driver = load_driver()
        began = self._clock.monotonic()
        pause = _FIRST_PAUSE
        while not self._closed:
            try:
                return await self._connect_once(driver)
            except driver_errors() as error:
                tried = self._clock.monotonic() - began
                if not is_away(error):
                    raise translated(error, self.where, "", self.role) from error
                if tried + pause > self._connect_timeout:
                    raise StoreUnavailable(
                        f"PostgreSQL at {self.where} cannot be reached, tried for {tried:.1f}s: "
                        f"{in_words(error)}"
                    ) from error
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise StoreClosed("this PostgreSQL store was closed; open a new one")

    def forget(self) -> None:
        """Drop the connections of an event loop that has ended: they are lost with it."""
        self._idle.clear()
        self._free = asyncio.Semaphore(self._limit)

    async def dismiss(self, connection: Any) -> None:
        """Say goodbye to the server, or hang up when it does not answer."""
        try:
            await connection.close(timeout=2)
        except driver_errors():
            connection.terminate()

    async def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self._closed = True
        while self._idle:
            await self.dismiss(self._idle.pop())

    async def _connect_once(self, driver: Any) -> Any:
        return await driver.connect(
            self._url,
            timeout=max(self._connect_timeout, 1),
            statement_cache_size=100 if self._prepared else 0,
            max_cached_statement_lifetime=0,
            server_settings=self._settings(),
        )

    def _settings(self) -> dict[str, str]:
        settings = {"application_name": "perdure"}
        if self._prepared:
            # A plan that is kept from when a table was empty would scan it when it has grown.
            # Every statement here has its index, and is done before it could be compiled; and
            # planning it anew the first five times takes longer than doing it.
            settings |= {
                "enable_seqscan": "off",
                "jit": "off",
                "plan_cache_mode": "force_generic_plan",
            }
        return settings


class LentConnections:
    """The connections of an asyncpg pool that is somebody else's: never closed here."""

    where = "the pool that was passed in"
    role = "the pool's user"
    for_guests = ""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def take(self) -> Any:
        """Give a connection of the pool, as soon as it has one."""
        try:
            return await self._pool.acquire()
        except driver_errors() as error:
            raise translated(error, self.where, "", self.role) from error

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Let the pool have it back; it knows itself what to do with an unsound one."""
        await self._pool.release(connection)

    async def dedicate(self) -> Any:
        """Give a connection of the pool, which then has one less."""
        return await self.take()

    async def dismiss(self, connection: Any) -> None:
        """Let the pool have it back."""
        await self._pool.release(connection)

    def forget(self) -> None:
        """Do nothing: a pool of an event loop that has ended is of no more use."""

    async def close(self) -> None:
        """Do nothing: whoever opened the pool closes it."""


def open_connections(
    url: str | None, pool: Any, limit: int, prepared: bool, connect_timeout: Duration, clock: Clock
) -> Connections:
    """Give the connections that a store's options ask for; none is opened yet."""
    span = parse_duration(connect_timeout, "connect_timeout").total_seconds()
    check_flag(prepared, "prepared_statements")
    if pool is not None:
        if not isinstance(pool, load_driver().Pool):
            raise InvalidArgument("pool", pool, "an asyncpg pool, as asyncpg.create_pool gives it")
        return LentConnections(pool)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidArgument("url", url, "a URL such as postgresql://user@host/database")
    check_int(limit, "max_connections")
    return OwnConnections(url, limit=limit, prepared=prepared, connect_timeout=span, clock=clock)


def place(url: str) -> str:
    """Give the host and database of a URL, for people: no user, no password."""
    return url.partition("://")[2].rpartition("@")[2].partition("?")[0] or url.partition(":")[0]
