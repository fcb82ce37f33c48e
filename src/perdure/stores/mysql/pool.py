"""asyncmy connections: the store's own pool, or the user's."""

import asyncio
from typing import Any, Protocol

from perdure.clock import Clock, Duration, check_clock, parse_duration
from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.stores._pool import BorrowedPool, ConnectionPool, Pool
from perdure.stores.mysql.errors import driver_errors, load_driver, translate
from perdure.stores.mysql.url import connect_options, host_and_database
from perdure.validation import check_int

# A connection that was idle for longer may have been dropped by a firewall or proxy.
_MAX_UNCHECKED_IDLE_SECONDS = 30.0
_LOCK_WAIT_SECONDS = 10

_SESSION_SETTINGS = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'; "
    f"SET SESSION innodb_lock_wait_timeout = {_LOCK_WAIT_SECONDS}"
)


class MysqlPool(Pool, Protocol):
    """A pool of asyncmy connections.

    `begin` opens a transaction with the isolation level that the statements are written for. Unless
    `autocommit` is set, a session may or may not commit a single statement.
    """

    begin: bytes
    autocommit: bool


class OwnMysqlPool(ConnectionPool):
    """Connections that the store opens itself, with settings for its own statements."""

    begin = b"START TRANSACTION"
    autocommit = True

    def __init__(
        self, options: dict[str, Any], *, limit: int, connect_timeout: float, clock: Clock
    ) -> None:
        super().__init__(
            "MySQL",
            host_and_database(options),
            limit=limit,
            connect_timeout=connect_timeout,
            clock=clock,
        )
        self._options = options

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        return driver_errors()

    async def _connect_once(self) -> Any:
        # The driver's own timeout covers only the TCP connection, not the server's greeting.
        try:
            async with asyncio.timeout(max(self._connect_timeout, 1)):  # noqa: TID251 - real time
                return await load_driver().connect(
                    **self._options,
                    charset="utf8mb4",
                    autocommit=True,
                    init_command=_SESSION_SETTINGS,
                    program_name="perdure",
                )
        except driver_errors() as error:
            raise translate(error, self.location) from error
        except RuntimeError as error:
            # Without TLS, the driver needs another package for MySQL's default authentication.
            hint = "add ?ssl=true to the URL, or install the package cryptography"
            raise StoreError(f"MySQL at {self.location}: {error}; {hint}") from error

    def _is_open(self, connection: Any) -> bool:
        return bool(connection.connected)

    async def _is_alive(self, connection: Any, idle_seconds: float) -> bool:
        if idle_seconds < _MAX_UNCHECKED_IDLE_SECONDS:
            return self._is_open(connection)
        try:
            await connection.ping(reconnect=False)
        except BaseException as error:
            self._abort(connection)
            if isinstance(error, self._errors):
                return False
            raise
        return True

    async def _close(self, connection: Any) -> None:
        await connection.ensure_closed()

    def _abort(self, connection: Any) -> None:
        connection.close()


class BorrowedMysqlPool(BorrowedPool):
    """Connections from a user's asyncmy pool, whose session settings are left as they are."""

    begin = b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED;START TRANSACTION"
    autocommit = False

    async def acquire(self) -> Any:
        """Return a connection of the pool as soon as it has one."""
        try:
            connection = await super().acquire()
        except RuntimeError as error:
            raise StoreUnavailable(f"{self.location} is unavailable: {error}") from error
        except driver_errors() as error:
            raise translate(error, self.location) from error
        charset = connection.character_set_name()
        if charset != "utf8mb4":
            await self._pool.release(connection)
            hint = "A connection with another character set would change strings in transit"
            raise InvalidArgument("pool", charset, "a pool with charset='utf8mb4'", hint)
        return connection

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Return the connection to its pool, or close it if it is not reusable."""
        if not reusable:
            connection.close()
        await super().release(connection, reusable=reusable)


def open_pool(
    url: str | None, pool: Any, limit: int, ssl: Any, connect_timeout: Duration, clock: Clock
) -> MysqlPool:
    """Return the pool that a store's options describe; no connection is opened yet."""
    seconds = parse_duration(connect_timeout, "connect_timeout").total_seconds()
    if pool is not None:
        if not isinstance(pool, load_driver().Pool):
            raise InvalidArgument("pool", pool, "an asyncmy pool, as from asyncmy.create_pool")
        return BorrowedMysqlPool(pool)
    load_driver()
    return OwnMysqlPool(
        connect_options(url, ssl),
        limit=check_int(limit, "max_connections"),
        connect_timeout=seconds,
        clock=check_clock(clock),
    )
