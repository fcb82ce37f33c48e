"""The store on a SQLite file, or in SQLite's memory."""

import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from perdure.clock import Clock
from perdure.snapshot import Snapshot
from perdure.store import NewRun
from perdure.stores._handoff import HandoffShell
from perdure.stores._joining import JoiningShell
from perdure.stores._reading import Granted
from perdure.stores._shell import NotifyShell, TransactionShell
from perdure.stores._timestamps import to_microseconds
from perdure.stores._watching import Notifications
from perdure.stores.sqlite.backend import SqliteSchemaBackend, as_grant, read_run
from perdure.stores.sqlite.connection import translate_error
from perdure.stores.sqlite.joining import Execute, drive_in, join
from perdure.stores.sqlite.leases import LeasedRun
from perdure.stores.sqlite.notify import NEWEST_DUE, watching
from perdure.stores.sqlite.runs import Verb
from perdure.stores.sqlite.session import FileSession
from perdure.stores.sqlite.statements import Statements
from perdure.stores.sqlite.threads import Database
from perdure.stores.sqlite.transaction import Session, check_not_inside

T = TypeVar("T")

# More runs are not claimed on the event loop, however fast the disk is.
_FEW = 4


class FileBackend(SqliteSchemaBackend):
    """Runs operations in the threads of a `Database`, which opens and migrates the file itself."""

    def __init__(
        self, database: Database, statements: Statements, prefix: str, clock: Clock
    ) -> None:
        def now() -> int:
            return to_microseconds(clock.now())

        super().__init__(statements, prefix, now)
        self._database = database
        self._table = statements.table
        newest_due = statements.sql(NEWEST_DUE)
        self._notifications = Notifications(
            lambda: watching(database.path, database.connect, newest_due, prefix, now)
        )

    async def open(self) -> None:
        """Do nothing: several event loops may use the store first at the same time."""

    def forget_loop(self) -> None:
        """Do nothing: the threads belong to no event loop."""

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], *, in_transaction: bool
    ) -> Sequence[bool]:
        execute = await self._join(connection, in_transaction=in_transaction)
        await self._database.ready()
        return await drive_in(execute, self._leases.enqueue(runs), self._database.path)

    async def load_in(self, connection: Any, id: str) -> Snapshot | None:
        execute = await self._join(connection, in_transaction=True)
        run = await drive_in(execute, self._runs.load(id), self._database.path)
        return None if run is None else read_run(id, *run)

    async def _join(self, connection: Any, *, in_transaction: bool) -> Execute:
        try:
            return await join(
                connection, self._database, self._table, in_transaction=in_transaction
            )
        except sqlite3.Error as error:
            raise translate_error(error, self._database.path) from error

    async def notifications(self) -> AsyncGenerator[None]:
        check_not_inside(self._database)
        await self._database.ready()
        async with aclosing(self._notifications.listen()) as notifications:
            async for notification in notifications:
                yield notification

    async def close(self) -> None:
        await self._notifications.close()
        await self._database.close()

    def stop(self) -> None:
        """Ask all threads to end, without waiting for them."""
        self._notifications.stop()
        self._database.stop()

    async def _write(
        self,
        verb: Callable[[], Verb[T]],
        *,
        repeatable: bool = False,
        inline: bool = False,
    ) -> T:
        check_not_inside(self._database)
        return await self._database.write(verb, inline=inline)

    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        check_not_inside(self._database)
        return await self._database.read(verb)

    async def _claim(self, verb: Callable[..., Verb[Sequence[LeasedRun]]]) -> Sequence[Granted]:
        check_not_inside(self._database)
        claimed = self._database.claim_inline(partial(verb, at_most=_FEW))
        if claimed is None:
            return await super()._claim(verb)
        return [as_grant(one) for one in claimed[0]]

    async def _session(self) -> Session:
        check_not_inside(self._database)
        return FileSession(self._database)


class SqliteStore(HandoffShell[FileBackend], TransactionShell[FileBackend]):
    """Stores runs in SQLite; see `sqlite`."""


class SqliteFileStore(NotifyShell[FileBackend], JoiningShell[FileBackend], SqliteStore):
    """Stores runs in a SQLite file, and notices changes by other processes; see `sqlite`."""
