"""Run single statements or transactions, translating the driver's errors."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, cast

from perdure.clock import Clock, Duration, parse_duration
from perdure.errors import StoreUnavailable
from perdure.stores.postgres.errors import (
    describe,
    driver_errors,
    is_conflict,
    is_unavailable,
    translate,
)
from perdure.stores.postgres.pool import PostgresPool, open_pool

_MAX_CONFLICTS = 10
_MAX_LOSSES = 2
_ROLLBACK_SECONDS = 2


class Database:
    """Runs statements, each in its own transaction.

    After a conflict with another statement (a deadlock), a statement is sent again. If the
    connection is lost, it is sent again on a new connection if it is `repeatable`: running it twice
    has the same effect as running it once.
    """

    def __init__(self, pool: PostgresPool, *, table: str, prepared: bool, timeout: float) -> None:
        self.pool = pool
        self._table = table
        self._timeout = timeout
        self._errors = driver_errors()
        self._run = self._run_prepared if prepared else self._run_in_transaction

    async def fetch(
        self, statement: str, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        """Commit one statement and return its rows."""
        conflicts = losses = 0
        while True:
            try:
                return await self._attempt(statement, values)
            except self._errors as error:
                conflicts += is_conflict(error)
                losses += is_unavailable(error)
                can_retry = is_conflict(error) or (is_unavailable(error) and repeatable)
                if not can_retry or conflicts > _MAX_CONFLICTS or losses >= _MAX_LOSSES:
                    raise self._translate(error) from error

    async def _attempt(self, statement: str, values: Sequence[object]) -> Sequence[Any]:
        connection = await self.pool.acquire()
        reusable = False
        try:
            rows = await self._run(connection, statement, values)
            reusable = True
        except self._errors as error:
            reusable = not is_unavailable(error)
            raise
        finally:
            await self.pool.release(connection, reusable=reusable)
        return rows

    async def _run_prepared(
        self, connection: Any, statement: str, values: Sequence[object]
    ) -> Sequence[Any]:
        rows = await connection.fetch(statement, *values, timeout=self._timeout)
        return cast("Sequence[Any]", rows)

    async def _run_in_transaction(
        self, connection: Any, statement: str, values: Sequence[object]
    ) -> Sequence[Any]:
        # asyncpg sends a statement and its values separately. A pooler may send them to two
        # different servers unless a transaction holds them together.
        transaction = Transaction(connection, nullcontext, self._timeout)
        try:
            await transaction.begin()
            rows = await transaction.fetch(statement, *values)
            await transaction.commit()
        except BaseException:
            with suppress(*self._errors):
                await transaction.roll_back()
            raise
        return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator["Transaction"]:
        """Open a transaction: committed at the end of the block, rolled back by an exception."""
        connection = await self.pool.acquire()
        transaction = Transaction(connection, self.translate_errors, self._timeout)
        try:
            await transaction.begin()
            yield transaction
            await transaction.commit()
        except BaseException as error:
            with suppress(*self._errors):
                await transaction.roll_back()
            if _is_loss(connection, error):
                message = f"connection lost in a transaction: {describe(error)}"
                raise StoreUnavailable(
                    f"PostgreSQL at {self.pool.location} is unavailable: {message}"
                ) from error
            raise
        finally:
            await self.pool.release(connection, reusable=not transaction.is_open)

    def adopt(self, connection: Any) -> "Transaction":
        """Return a transaction that the caller has begun on a connection, and will end."""
        return Transaction(connection, self.translate_errors, self._timeout)

    @contextmanager
    def translate_errors(self) -> Generator[None]:
        """Translate the driver's errors raised in this block."""
        try:
            yield
        except self._errors as error:
            raise self._translate(error) from error

    def _translate(self, error: BaseException) -> Exception:
        return translate(error, self.pool.location, self._table, self.pool.role)


def _is_loss(connection: Any, error: BaseException) -> bool:
    # After a lost connection, the user's code may raise anything.
    is_new = isinstance(error, Exception) and not isinstance(error, StoreUnavailable)
    return is_new and _is_closed(connection)


def _is_closed(connection: Any) -> bool:
    try:
        return bool(connection.is_closed())
    except driver_errors():
        return True  # asyncpg's pool has taken back a connection that was closed


class Transaction:
    """Several statements on one connection that are committed together.

    The user's code may run between them: only the errors of the methods here are translated.
    """

    def __init__(
        self,
        connection: Any,
        translate_errors: Callable[[], AbstractContextManager[None]],
        timeout: float,
    ) -> None:
        self.connection = connection
        self.is_open = False
        self._transaction = connection.transaction()
        self._translate_errors = translate_errors
        self._timeout = timeout

    async def begin(self) -> None:
        """Begin the transaction."""
        with self._translate_errors():
            self.is_open = True
            await self._reply(self._transaction.start(), self._timeout)

    async def fetch(self, statement: str, *values: object) -> Sequence[Any]:
        """Return the rows of one statement."""
        with self._translate_errors():
            rows = await self.connection.fetch(statement, *values, timeout=self._timeout)
        return cast("Sequence[Any]", rows)

    async def execute(self, script: str) -> None:
        """Execute statements without parameters."""
        with self._translate_errors():
            await self.connection.execute(script, timeout=self._timeout)

    async def migrate(self, script: str) -> None:
        """Execute statements without parameters that may take long, as on large tables."""
        with self._translate_errors():
            await self.connection.execute(script)

    async def commit(self) -> None:
        """Commit the transaction unless it was rolled back.

        Without a reply, as after a lost connection, it may or may not have been committed.
        """
        if self.is_open:
            with self._translate_errors():
                await self._reply(self._transaction.commit(), self._timeout)
            self.is_open = False

    async def roll_back(self) -> None:
        """Roll the transaction back if it is open.

        If the server does not reply soon, the connection is aborted, which has the same effect.
        """
        if self.is_open and not self.connection.is_closed():
            await self._reply(self._transaction.rollback(), _ROLLBACK_SECONDS)
            self.is_open = False

    async def _reply(self, request: Awaitable[None], timeout: float) -> None:
        try:
            # asyncpg has no timeout for these statements. And if an earlier statement has timed
            # out or was cancelled, it first waits for the server to confirm that.
            async with asyncio.timeout(timeout):  # noqa: TID251 - real time
                await request
        except TimeoutError:
            # A pool that takes the connection back would wait for the server again.
            self.connection.terminate()
            raise


def open_database(
    url: str | None,
    table: str,
    *,
    pool: Any,
    engine: Any,
    prepared_statements: bool,
    max_connections: int,
    connect_timeout: Duration,
    timeout: Duration,
    clock: Clock,
) -> Database:
    """Return the database that the options of a store describe; nothing is connected yet."""
    return Database(
        open_pool(
            url,
            pool=pool,
            engine=engine,
            limit=max_connections,
            prepared=prepared_statements,
            connect_timeout=connect_timeout,
            clock=clock,
        ),
        table=table,
        prepared=prepared_statements,
        timeout=parse_duration(timeout, "timeout").total_seconds(),
    )
