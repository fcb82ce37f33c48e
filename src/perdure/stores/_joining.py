"""Create runs in the caller's transaction."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from perdure.errors import InvalidArgument, StoreError
from perdure.snapshot import Snapshot
from perdure.store import NewRun
from perdure.stores._backend import Backend
from perdure.stores._checks import check_new_run
from perdure.stores._queueing import in_order
from perdure.stores._shell import StoreShell

_NO_TRANSACTION = (
    "Begin one first, for example by `async with session.begin()`: without it, the run would "
    "exist even if your own writes are rolled back. To start a run on its own, call trigger "
    "without connection"
)


class JoiningBackend(Backend, Protocol):
    """A backend that can write in the caller's transaction.

    `connection` is the caller's connection, or the driver's connection behind it if the caller
    passed one of SQLAlchemy. `in_transaction` is set if SQLAlchemy has begun a transaction, which
    the driver may not know about yet. The backend rejects an unsuitable connection.
    """

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], *, in_transaction: bool
    ) -> Sequence[bool]: ...

    async def load_in(self, connection: Any, id: str) -> Snapshot | None:
        """Return a run as the transaction sees it; the connection was already checked."""
        ...


JB = TypeVar("JB", bound=JoiningBackend)


class JoiningShell(StoreShell[JB]):
    """A store that can create runs in the caller's transaction."""

    async def enqueue_in(
        self, connection: Any, runs: Sequence[NewRun], /
    ) -> Sequence[Snapshot | None]:
        """Create runs in the transaction that is open on the caller's connection.

        Return `None` for each run that was created, and the snapshot of each that already existed.
        """
        await self._life.ready()
        for run in runs:
            check_new_run(run, self._max_value_size)
        driver, in_transaction = await driver_connection(connection)
        created = (
            await self._backend.enqueue_in(driver, in_order(runs), in_transaction=in_transaction)
            if runs
            else ()
        )
        return [
            None if is_new else await self._existing_in(driver, run.id)
            for run, is_new in zip(runs, created, strict=True)
        ]

    async def _existing_in(self, connection: Any, id: str) -> Snapshot:
        """Return an existing run, even if the transaction began before it was created."""
        snapshot = await self._backend.load_in(connection, id) or await self._backend.load(id)
        if snapshot is None:
            raise StoreError(f"run {id!r} existed and was deleted in the meantime; try again")
        return snapshot


async def driver_connection(connection: Any) -> tuple[Any, bool]:
    """Return the driver's connection, and whether it was wrapped by SQLAlchemy."""
    sqlalchemy = sys.modules.get("sqlalchemy.ext.asyncio")
    if sqlalchemy is None:
        # SQLAlchemy was not imported, so this cannot be one of its objects.
        return connection, False
    if isinstance(connection, sqlalchemy.AsyncSession | sqlalchemy.async_scoped_session):
        connection = await connection.connection()
    if not isinstance(connection, sqlalchemy.AsyncConnection):
        return connection, False
    # SQLAlchemy begins the driver's transaction only with the first statement that it sends.
    await connection.exec_driver_sql("SELECT 1")
    raw = await connection.get_raw_connection()
    return raw.driver_connection, True


def unsuitable_connection(connection: object, expected: str) -> InvalidArgument:
    """Return the error for a connection of the wrong kind."""
    return InvalidArgument("connection", connection, expected)


def no_transaction(connection: object) -> InvalidArgument:
    """Return the error for a connection without an open transaction."""
    expected = "a connection with an open transaction"
    return InvalidArgument("connection", connection, expected, _NO_TRANSACTION)
