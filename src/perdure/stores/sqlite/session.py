"""A transaction on a SQLite file: the writer thread serves one coroutine until it is done."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.sqlite.connection import begin, drive, execute, translate_error
from perdure.stores.sqlite.jobs import ExclusiveJob
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.threads import Database
from perdure.stores.sqlite.transaction import Session, Values

T = TypeVar("T")


class _Request(Generic[T]):
    """A call with the writer's connection, and the future of its result."""

    def __init__(self, call: Callable[[sqlite3.Connection], T]) -> None:
        self._call = call
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def serve(self, connection: sqlite3.Connection) -> None:
        try:
            result = self._call(connection)
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            self.fail(error)
        else:
            self._resolve(self.future.set_result, result)

    def fail(self, error: BaseException) -> None:
        self._resolve(self.future.set_exception, error)

    def _resolve(self, resolve: Callable[[Any], None], outcome: object) -> None:
        def unless_cancelled() -> None:
            if not self.future.done():
                resolve(outcome)

        # If the loop was closed in the meantime, nothing awaits the future.
        with suppress(RuntimeError):
            self.future.get_loop().call_soon_threadsafe(unless_cancelled)


class FileSession(Session, ExclusiveJob):
    """A transaction on the writer's connection, controlled by one coroutine."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._database = database
        self._requests: SimpleQueue[_Request[Any] | None] = SimpleQueue()

    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Begin a transaction that may write, and return the result of the operation in it."""
        result = self._request(partial(self._begin, verb))
        self._database.put(self)
        self.open = True
        return await result

    async def execute(self, sql: str, values: Values) -> Outcome:
        """Run one statement of the user; SQLite's own errors are raised unchanged."""
        if not self.open:
            raise StoreError("the transaction is over; its connection can no longer be used")
        try:
            return await self._request(partial(_execute, Statement(sql, values)))
        except sqlite3.Error as error:
            store_error = translate_error(error, self._database.path)
            if isinstance(store_error, StoreUnavailable):
                self.failure = store_error
            raise

    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Run the operation and commit if it returns `True`; otherwise roll back."""
        return await self._request(partial(self._finish, verb))

    async def end(self) -> None:
        """Roll back unless committed; the next write comes after that."""
        self.open = False
        self._requests.put(None)

    def serve(self, connection: sqlite3.Connection) -> None:
        """Serve the coroutine, in the writer thread, until it ends the session.

        The thread then rolls back a transaction that is still open.
        """
        while (request := self._requests.get()) is not None:
            request.serve(connection)

    def refuse(self, error: BaseException) -> None:
        """Fail all requests: the writer thread has no connection."""
        while (request := self._requests.get()) is not None:
            request.fail(error)

    def _request(self, call: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        request = _Request(call)
        self._requests.put(request)
        return request.future

    def _begin(self, verb: Callable[[], Verb[T]], connection: sqlite3.Connection) -> T:
        try:
            begin(connection, self._database.path, self._database.busy_timeout)
            return drive(connection, verb())
        except sqlite3.Error as error:
            raise translate_error(error, self._database.path) from error

    def _finish(self, verb: Callable[[], Verb[bool]], connection: sqlite3.Connection) -> bool:
        try:
            _check_open(connection)
            is_written = drive(connection, verb())
            connection.execute("COMMIT" if is_written else "ROLLBACK")
        except sqlite3.Error as error:
            raise translate_error(error, self._database.path) from error
        return is_written


def _execute(statement: Statement, connection: sqlite3.Connection) -> Outcome:
    _check_open(connection)
    return execute(connection, statement)


def _check_open(connection: sqlite3.Connection) -> None:
    # A full disk or an OR ROLLBACK clause ends a transaction from inside.
    if not connection.in_transaction:
        raise StoreError("SQLite rolled the transaction back after an error in it")
