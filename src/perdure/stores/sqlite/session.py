"""A transaction on a SQLite file: the writer's thread serves one coroutine until it is done."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.sqlite.connection import begin, drive, execute, translated
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.statements import Outcome, Statement
from perdure.stores.sqlite.threads import Database, Solo
from perdure.stores.sqlite.transaction import Session, Values

T = TypeVar("T")


class _Request(Generic[T]):
    """Something to be done with the connection, and who waits for it."""

    def __init__(self, act: Callable[[sqlite3.Connection], T]) -> None:
        self._act = act
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def serve(self, connection: sqlite3.Connection) -> None:
        try:
            answer = self._act(connection)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            self.fail(error)
        else:
            self._settle(self.answer.set_result, answer)

    def fail(self, error: BaseException) -> None:
        self._settle(self.answer.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        def unless_cancelled() -> None:
            if not self.answer.done():
                settle(outcome)

        # A loop that was closed in the meantime has nobody left who waits.
        with suppress(RuntimeError):
            self.answer.get_loop().call_soon_threadsafe(unless_cancelled)


class FileSession(Session, Solo):
    """The writer's connection in the hands of one coroutine."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._database = database
        self._requests: SimpleQueue[_Request[Any] | None] = SimpleQueue()

    async def begin(self, verb: Callable[[], Verb[T]]) -> T:
        """Open the transaction with the right to write, and give what the verb gives in it."""
        answer = self._ask(partial(self._begin, verb))
        self._database.put(self)
        self.open = True
        return await answer

    async def execute(self, sql: str, values: Values) -> Outcome:
        """Give what one statement of the user's gives; their errors come as SQLite raises them."""
        if not self.open:
            raise StoreError("the transaction is over; its connection cannot be used any more")
        try:
            return await self._ask(partial(_execute, Statement(sql, values)))
        except sqlite3.Error as error:
            ours = translated(error, self._database.path)
            if isinstance(ours, StoreUnavailable):
                self.lost = ours
            raise

    async def finish(self, verb: Callable[[], Verb[bool]]) -> bool:
        """Drive the verb and commit if it says so; roll back if not, or if it fails."""
        return await self._ask(partial(self._finish, verb))

    async def end(self) -> None:
        """Roll back what was not committed; whoever writes next comes after that."""
        self.open = False
        self._requests.put(None)

    def serve(self, connection: sqlite3.Connection) -> None:
        """Serve the coroutine, in the writer's thread, until it ends the session.

        A transaction that is still open then is rolled back by the thread.
        """
        while (request := self._requests.get()) is not None:
            request.serve(connection)

    def refuse(self, error: BaseException) -> None:
        """Learn that there is no connection, in the writer's thread."""
        while (request := self._requests.get()) is not None:
            request.fail(error)

    def _ask(self, act: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        request = _Request(act)
        self._requests.put(request)
        return request.answer

    def _begin(self, verb: Callable[[], Verb[T]], connection: sqlite3.Connection) -> T:
        try:
            begin(connection, self._database.path, self._database.connect_timeout)
            return drive(connection, verb())
        except sqlite3.Error as error:
            raise translated(error, self._database.path) from error

    def _finish(self, verb: Callable[[], Verb[bool]], connection: sqlite3.Connection) -> bool:
        try:
            _check_open(connection)
            written = drive(connection, verb())
            connection.execute("COMMIT" if written else "ROLLBACK")
        except sqlite3.Error as error:
            raise translated(error, self._database.path) from error
        return written


def _execute(statement: Statement, connection: sqlite3.Connection) -> Outcome:
    _check_open(connection)
    return execute(connection, statement)


def _check_open(connection: sqlite3.Connection) -> None:
    # A full disk or an OR ROLLBACK clause ends a transaction from inside.
    if not connection.in_transaction:
        raise StoreError("SQLite rolled the transaction back after an error in it")
