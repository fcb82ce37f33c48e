"""Connections of a SQLAlchemy engine that was passed in."""

import asyncio
import sys
from typing import Any

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.stores.postgres.errors import driver_errors, translate

_EXPECTED = (
    "an AsyncEngine on postgresql+asyncpg, as from "
    "create_async_engine('postgresql+asyncpg://user@host/database')"
)


class EnginePool:
    """The asyncpg connections of an engine, which is used and never disposed of here."""

    role = "the engine's user"
    user_session_settings = ""

    def __init__(self, engine: Any) -> None:
        url = check_engine(engine).url
        self.location = f"{url.host or 'localhost'}/{url.database or ''}"
        self._engine = engine
        self._checked_out: dict[Any, Any] = {}

    async def acquire(self) -> Any:
        """Return a connection of the engine's pool as soon as it has one."""
        while True:
            checked_out = await self._check_out()
            connection = (await checked_out.get_raw_connection()).driver_connection
            self._checked_out[connection] = checked_out
            if not connection.is_closed():
                return connection
            # SQLAlchemy notices that only when it sends a statement itself.
            await self.release(connection, reusable=False)

    async def release(self, connection: Any, *, reusable: bool) -> None:
        """Return the connection to the engine's pool, which replaces one that is not reusable."""
        checked_out = self._checked_out.pop(connection)
        # Not cancelled halfway: the connection would then be missing in the pool.
        await asyncio.shield(_return(checked_out, reusable and not connection.is_closed()))

    async def connect(self) -> Any:
        """Return a connection of the pool, which has one fewer until it is returned."""
        return await self.acquire()

    async def disconnect(self, connection: Any) -> None:
        """Return the connection to its pool."""
        await self.release(connection, reusable=True)

    def has_process(self, process: int) -> bool:
        """Return `False`: the user's own transactions share the connections."""
        return False

    def forget_loop(self) -> None:
        """Do nothing: an engine's connections cannot move to another event loop."""

    async def close(self) -> None:
        """Do nothing: the engine belongs to the user."""

    async def _check_out(self) -> Any:
        errors = sys.modules["sqlalchemy.exc"]
        try:
            return await self._engine.connect()
        except driver_errors() as error:
            raise translate(error, self.location, "", self.role) from error
        except errors.DBAPIError as error:
            # SQLAlchemy's own error wraps that of its dialect, whose cause is the driver's.
            raise translate(error.orig.__cause__ or error, self.location, "", self.role) from error
        except errors.TimeoutError as error:
            message = f"the engine's pool has no free connection: {error}"
            raise StoreUnavailable(f"PostgreSQL at {self.location}: {message}") from error
        except errors.SQLAlchemyError as error:
            raise StoreError(f"PostgreSQL at {self.location} failed: {error}") from error


async def _return(checked_out: Any, reusable: bool) -> None:
    if not reusable:
        await checked_out.invalidate()
    await checked_out.close()


def check_engine(engine: Any) -> Any:
    """Check for an engine whose connections are those of asyncpg."""
    sqlalchemy = sys.modules.get("sqlalchemy.ext.asyncio")
    is_engine = sqlalchemy is not None and isinstance(engine, sqlalchemy.AsyncEngine)
    if not is_engine or engine.dialect.driver != "asyncpg":
        raise InvalidArgument("engine", engine, _EXPECTED)
    return engine
