"""Statements, one at a time or several in a transaction, with the driver's errors translated."""

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, cast

from perdure.errors import StoreUnavailable
from perdure.stores.postgres.errors import (
    driver_errors,
    in_words,
    is_away,
    is_conflict,
    translated,
)
from perdure.stores.postgres.pool import Connections

_CONFLICTS = 10
_LOSSES = 2


class Database:
    """Runs statements, each in a transaction of its own.

    One that met another (a deadlock) is sent again. One whose connection was lost is sent again on
    a new connection when it is `repeatable`: when doing it twice is as good as once.
    """

    def __init__(
        self, connections: Connections, *, table: str, prepared: bool, timeout: float
    ) -> None:
        self.connections = connections
        self._table = table
        self._timeout = timeout
        self._errors = driver_errors()
        self._run = self._run_prepared if prepared else self._run_in_transaction

    async def fetch(
        self, statement: str, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        """Give the rows of one statement, which is committed."""
        conflicts = losses = 0
        while True:
            try:
                return await self._attempt(statement, values)
            except self._errors as error:
                conflicts += is_conflict(error)
                losses += is_away(error)
                hopeless = not (is_conflict(error) or (is_away(error) and repeatable))
                if hopeless or conflicts > _CONFLICTS or losses >= _LOSSES:
                    raise self._translated(error) from error

    async def _attempt(self, statement: str, values: Sequence[object]) -> Sequence[Any]:
        connection = await self.connections.take()
        sound = False
        try:
            rows = await self._run(connection, statement, values)
            sound = True
        except self._errors as error:
            sound = not is_away(error)
            raise
        finally:
            await self.connections.give_back(connection, sound=sound)
        return rows

    async def _run_prepared(
        self, connection: Any, statement: str, values: Sequence[object]
    ) -> Sequence[Any]:
        rows = await connection.fetch(statement, *values, timeout=self._timeout)
        return cast("Sequence[Any]", rows)

    async def _run_in_transaction(
        self, connection: Any, statement: str, values: Sequence[object]
    ) -> Sequence[Any]:
        # asyncpg sends a statement and its values apart. A pooler may send them to two servers,
        # unless a transaction holds them together.
        async with connection.transaction():
            return await self._run_prepared(connection, statement, values)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator["Transaction"]:
        """Give a transaction: committed at the end of the block, rolled back by an exception."""
        connection = await self.connections.take()
        transaction = Transaction(connection, self.speaking, self._timeout)
        try:
            await transaction.begin()
            yield transaction
            await transaction.commit()
        except BaseException as error:
            with suppress(*self._errors):
                await transaction.roll_back()
            if _is_loss(connection, error):
                words = f"went away in a transaction: {in_words(error)}"
                where = f"PostgreSQL at {self.connections.where}"
                raise StoreUnavailable(f"{where} {words}") from error
            raise
        finally:
            await self.connections.give_back(connection, sound=not transaction.is_open)

    @contextmanager
    def speaking(self) -> Generator[None]:
        """Translate the driver's errors in this block."""
        try:
            yield
        except self._errors as error:
            raise self._translated(error) from error

    def _translated(self, error: BaseException) -> Exception:
        return translated(error, self.connections.where, self._table, self.connections.role)


def _is_loss(connection: Any, error: BaseException) -> bool:
    # The user's code may have raised, and it may raise anything over a lost connection.
    is_news = isinstance(error, Exception) and not isinstance(error, StoreUnavailable)
    return is_news and bool(connection.is_closed())


class Transaction:
    """Several statements of one connection that are committed together.

    The block that holds it may run the user's code: only what is done here is translated.
    """

    def __init__(
        self, connection: Any, speaking: Callable[[], AbstractContextManager[None]], timeout: float
    ) -> None:
        self.connection = connection
        self.is_open = False
        self._transaction = connection.transaction()
        self._speaking = speaking
        self._timeout = timeout

    async def begin(self) -> None:
        """Open it."""
        with self._speaking():
            self.is_open = True
            await self._transaction.start()

    async def fetch(self, statement: str, *values: object) -> Sequence[Any]:
        """Give the rows of one statement."""
        with self._speaking():
            rows = await self.connection.fetch(statement, *values, timeout=self._timeout)
        return cast("Sequence[Any]", rows)

    async def execute(self, script: str) -> None:
        """Run statements that take no values."""
        with self._speaking():
            await self.connection.execute(script)

    async def commit(self) -> None:
        """Make it last, if it was not rolled back."""
        if self.is_open:
            with self._speaking():
                await self._transaction.commit()
            self.is_open = False

    async def roll_back(self) -> None:
        """Undo it, if it is open."""
        if self.is_open and not self.connection.is_closed():
            await self._transaction.rollback()
            self.is_open = False
