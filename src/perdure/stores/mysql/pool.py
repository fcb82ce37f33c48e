"""Connections to MySQL: our own, a few and kept, or those of a pool that was passed in."""

import asyncio
from typing import Any, Protocol

from perdure.clock import Clock, Duration, check_clock, parse_duration
from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.stores.mysql.errors import errors_of, failure_of, load_driver, translated
from perdure.stores.mysql.url import connect_options, place
from perdure.validation import check_int

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
# A connection that was idle for longer may have been cut by something on the way.
_TRUSTED_SECONDS = 30.0
_LONGEST_WAIT_FOR_LOCK = 10

_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'; "
    f"SET SESSION innodb_lock_wait_timeout = {_LONGEST_WAIT_FOR_LOCK}"
)
_BEGIN = b"START TRANSACTION"
_BEGIN_APART = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED;START TRANSACTION"


class Connections(Protocol):
    """Where a transaction gets its connection from.

    `begin` opens a transaction of the isolation that the statements are written for. Without
    `autocommit` nobody knows whether a statement that stands alone is committed by itself.
    """

    where: str
    begin: bytes
    autocommit: bool

    async def take(self) -> Any:
        """Give a connection that nobody else uses until it is given back."""
        ...

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Take a connection back; one that is not sound may have an answer on its way."""
        ...

    async def close(self) -> None:
        """Close what was opened here."""
        ...


class OwnConnections:
    """At most `limit` connections, opened when needed and kept.

    The driver's own pool makes a task whenever a connection is handed back.
    """

    begin = _BEGIN
    autocommit = True

    def __init__(
        self, options: dict[str, Any], *, limit: int, connect_timeout: float, clock: Clock
    ) -> None:
        self.where = place(options)
        self._options = options
        self._limit = limit
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._idle: list[tuple[Any, float]] = []
        self._free = asyncio.Semaphore(limit)
        self._home: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def take(self) -> Any:
        """Give an idle connection or a new one; waits when all are in use."""
        if self._home is not asyncio.get_running_loop():
            self._move_in()
        await self._free.acquire()
        try:
            while self._idle:
                connection, since = self._idle.pop()
                if await self._is_alive(connection, since):
                    return connection
            return await self._connect()
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Keep a sound connection for the next one who needs it."""
        if sound and not self._closed and connection.connected:
            self._idle.append((connection, self._clock.monotonic()))
        else:
            connection.close()
        self._free.release()

    async def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self._closed = True
        while self._idle:
            connection, _ = self._idle.pop()
            try:
                await connection.ensure_closed()
            except errors_of(load_driver()):
                connection.close()

    async def _connect(self) -> Any:
        driver = load_driver()
        began = self._clock.monotonic()
        pause = _FIRST_PAUSE
        while not self._closed:
            try:
                return await self._connect_once(driver)
            except errors_of(driver) as error:
                tried = self._clock.monotonic() - began
                if failure_of(error) != "away":
                    raise translated(error, self.where) from error
                if tried + pause > self._connect_timeout:
                    raise StoreUnavailable(
                        f"MySQL at {self.where} cannot be reached, tried for {tried:.1f}s: "
                        f"{error.args[-1] if error.args else type(error).__name__}"
                    ) from error
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise StoreClosed("this MySQL store was closed; open a new one")

    async def _connect_once(self, driver: Any) -> Any:
        # The driver's own time-out ends with the TCP connection, before the server says a word.
        async with asyncio.timeout(max(self._connect_timeout, 1)):  # noqa: TID251 - real time
            try:
                return await driver.connect(
                    **self._options,
                    charset="utf8mb4",
                    autocommit=True,
                    init_command=_SESSION,
                    program_name="perdure",
                )
            except RuntimeError as error:
                # Without TLS, MySQL's default way of logging in wants another package.
                hint = "add ?ssl=true to the URL, or install the package cryptography"
                raise StoreError(f"MySQL at {self.where}: {error}; {hint}") from error

    async def _is_alive(self, connection: Any, since: float) -> bool:
        if self._clock.monotonic() - since < _TRUSTED_SECONDS:
            return bool(connection.connected)
        try:
            await connection.ping(reconnect=False)
        except errors_of(load_driver()):
            connection.close()
            return False
        return True

    def _move_in(self) -> None:
        # Connections of a loop that has ended are lost with it.
        self._home = asyncio.get_running_loop()
        self._idle.clear()
        self._free = asyncio.Semaphore(self._limit)


class LentConnections:
    """The connections of an asyncmy pool that is somebody else's: never closed here.

    Nothing of their sessions is changed.
    """

    where = "the server of the pool that was passed in"
    begin = _BEGIN_APART
    autocommit = False

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def take(self) -> Any:
        """Give a connection of the pool, as soon as it has one."""
        try:
            connection = await self._pool.acquire()
        except RuntimeError as error:
            raise StoreUnavailable(f"the pool that was passed in: {error}") from error
        except errors_of(load_driver()) as error:
            raise translated(error, self.where) from error
        charset = connection.character_set_name()
        if charset != "utf8mb4":
            await self._pool.release(connection)
            hint = "A connection of another character set would change texts on their way"
            raise InvalidArgument("pool", charset, "a pool with charset='utf8mb4'", hint)
        return connection

    async def give_back(self, connection: Any, *, sound: bool) -> None:
        """Let the pool have it back, closed when it is not sound."""
        if not sound:
            connection.close()
        await self._pool.release(connection)

    async def close(self) -> None:
        """Do nothing: whoever opened the pool closes it."""


def open_connections(
    url: str | None, pool: Any, limit: int, ssl: Any, connect_timeout: Duration, clock: Clock
) -> Connections:
    """Give the connections that a store's options ask for; none is opened yet."""
    span = parse_duration(connect_timeout, "connect_timeout").total_seconds()
    if pool is not None:
        if not isinstance(pool, load_driver().Pool):
            raise InvalidArgument("pool", pool, "an asyncmy pool, as asyncmy.create_pool gives it")
        return LentConnections(pool)
    load_driver()
    return OwnConnections(
        connect_options(url, ssl),
        limit=check_int(limit, "max_connections"),
        connect_timeout=span,
        clock=check_clock(clock),
    )
