"""asyncpg connections: the store's own pool, or the user's."""

from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from perdure.clock import Clock, Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.stores._pool import BorrowedPool, ConnectionPool, Pool
from perdure.stores.postgres.engine import EnginePool
from perdure.stores.postgres.errors import driver_errors, load_driver, translate
from perdure.validation import check_flag, check_int

_CLOSE_SECONDS = 2
_DEFAULT_PLANNING = "SET LOCAL enable_seqscan = on; SET LOCAL plan_cache_mode = auto"


class PostgresPool(Pool, Protocol):
    """A pool of asyncpg connections.

    `user_session_settings` is executed in a transaction before the user's own statements, unless it
    is empty.
    """

    role: str
    user_session_settings: str

    async def connect(self) -> Any:
        """Return a connection for long-term use, besides those that statements use."""
        ...

    async def disconnect(self, connection: Any) -> None:
        """Take back a connection that `connect` returned."""
        ...

    def has_process(self, process: int) -> bool:
        """Return whether this process of the server works for the store alone."""
        ...


class OwnPostgresPool(ConnectionPool):
    """Connections that the store opens itself, with settings for its own statements."""

    def __init__(
        self, url: str, *, limit: int, prepared: bool, connect_timeout: float, clock: Clock
    ) -> None:
        super().__init__(
            "PostgreSQL",
            host_and_database(url),
            limit=limit,
            connect_timeout=connect_timeout,
            clock=clock,
        )
        self.role = f'"{unquote(urlsplit(url).username or "")}"'
        self.user_session_settings = _DEFAULT_PLANNING if prepared else ""
        self._url = url
        self._prepared = prepared
        self._connections: WeakSet[Any] = WeakSet()

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        return driver_errors()

    async def _connect_once(self) -> Any:
        try:
            connection = await load_driver().connect(
                self._url,
                timeout=max(self._connect_timeout, 1),
                statement_cache_size=100 if self._prepared else 0,
                max_cached_statement_lifetime=0,
                server_settings=self._settings(),
            )
        except driver_errors() as error:
            raise translate(error, self.location, "", self.role) from error
        except ValueError as error:
            raise InvalidArgument("url", self.location, "a PostgreSQL URL", str(error)) from error
        self._connections.add(connection)
        return connection

    def has_process(self, process: int) -> bool:
        """Return whether one of the connections belongs to this process of the server."""
        # A pooler hides the server's processes.
        return self._prepared and any(
            connection.get_server_pid() == process
            for connection in self._connections
            if not connection.is_closed()
        )

    def _settings(self) -> dict[str, str]:
        settings = {"application_name": "perdure"}
        if self._prepared:
            # A plan cached while a table was empty would scan the table after it has grown. Every
            # statement of the store uses an index and finishes before JIT compilation would pay
            # off, and planning it for each of its first five executions takes longer than running
            # it.
            settings |= {
                "enable_seqscan": "off",
                "jit": "off",
                "plan_cache_mode": "force_generic_plan",
            }
        return settings

    def _is_open(self, connection: Any) -> bool:
        return not connection.is_closed()

    async def _close(self, connection: Any) -> None:
        await connection.close(timeout=_CLOSE_SECONDS)

    def _abort(self, connection: Any) -> None:
        connection.terminate()


class BorrowedPostgresPool(BorrowedPool):
    """Connections from a user's asyncpg pool, which replaces unusable connections itself."""

    role = "the pool's user"
    user_session_settings = ""

    async def acquire(self) -> Any:
        """Return a connection of the pool as soon as it has one."""
        try:
            return await super().acquire()
        except driver_errors() as error:
            raise translate(error, self.location, "", self.role) from error

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Return the connection to its pool, which replaces one that it cannot reset."""
        # The pool resets the session, and first waits for the server to confirm a cancelled
        # statement. Without a timeout, a server that hangs would block the caller.
        with suppress(*driver_errors()):
            await self._pool.release(connection, timeout=_CLOSE_SECONDS)

    async def connect(self) -> Any:
        """Return a connection of the pool, which has one fewer until it is returned."""
        return await self.acquire()

    async def disconnect(self, connection: Any) -> None:
        """Return the connection to its pool."""
        await self.release(connection, reusable=True)

    def has_process(self, process: int) -> bool:
        """Return `False`: the user's own transactions share the connections."""
        return False


def open_pool(
    url: str | None,
    *,
    pool: Any,
    engine: Any,
    limit: int,
    prepared: bool,
    connect_timeout: Duration,
    clock: Clock,
) -> PostgresPool:
    """Return the pool that a store's options describe; no connection is opened yet."""
    seconds = parse_duration(connect_timeout, "connect_timeout").total_seconds()
    check_flag(prepared, "prepared_statements")
    if sum(each is not None for each in (url, pool, engine)) > 1:
        raise InvalidArgument("url", url, "one of url, pool and engine, not several of them")
    if engine is not None:
        return EnginePool(engine)
    if pool is not None:
        if not isinstance(pool, load_driver().Pool):
            raise InvalidArgument("pool", pool, "an asyncpg pool, as from asyncpg.create_pool")
        return BorrowedPostgresPool(pool)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidArgument("url", url, "a URL such as postgresql://user@host/database")
    check_int(limit, "max_connections")
    return OwnPostgresPool(
        url, limit=limit, prepared=prepared, connect_timeout=seconds, clock=clock
    )


def host_and_database(url: str) -> str:
    """Return the host and database of a URL for use in messages, without user and password."""
    return url.partition("://")[2].rpartition("@")[2].partition("?")[0] or url.partition(":")[0]
