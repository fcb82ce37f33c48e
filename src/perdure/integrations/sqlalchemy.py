"""A SQLAlchemy session on the connection of `step.transaction`.

async def reserve(connection, order_id):    # await step.transaction("reserve", reserve, order_id)
    async with session(connection) as db:
        db.add(Reservation(order_id=order_id))
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from perdure.errors import InvalidArgument, MissingDependency

try:
    # Imported early: without it, SQLAlchemy fails only when the first statement is sent.
    import greenlet  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from sqlalchemy import types
    from sqlalchemy.dialects.postgresql import JSON, JSONB
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
    from sqlalchemy.pool import NullPool
except ImportError as error:
    raise MissingDependency("sqlalchemy[asyncio]", "sqlalchemy") from error

__all__ = ["session"]

_EXPECTED = (
    "the connection that step.transaction passes on a PostgreSQL or MySQL store; "
    "on SQLite and MongoDB it is not one that SQLAlchemy can use"
)
_MAX_SERVERS = 64


@asynccontextmanager
async def session(connection: Any, **options: Any) -> AsyncGenerator[AsyncSession]:
    """Open a session in the transaction of a step: its writes are committed with the step's record.

    `connection` is what `step.transaction` passes to the function; `options` are passed to
    `AsyncSession`. At the end of the block the session is flushed; an exception undoes its writes.
    Inside the block, `commit` and `rollback` of the session apply to a savepoint.
    """
    url, version, proxy = _lend(connection)
    token = _CONNECTION.set(proxy)
    try:
        async with (
            # Begun here, so that the session joins it with a savepoint.
            _engine(url, version).begin() as outer,
            AsyncSession(outer, join_transaction_mode="create_savepoint", **options) as db,
        ):
            yield db
            await db.commit()
    finally:
        _CONNECTION.reset(token)


class _BorrowedConnection:
    """A connection that SQLAlchemy can neither close nor take out of its transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""


class _BorrowedAsyncpg(_BorrowedConnection):
    """Ignores the JSON codecs that SQLAlchemy sets, since that could not be undone."""

    close = set_type_codec = _BorrowedConnection._nothing

    def terminate(self) -> None:
        """Do nothing: the store closes its connections."""


class _BorrowedAsyncmy(_BorrowedConnection):
    """SQLAlchemy would commit or roll back the transaction, which it believes to be its own."""

    ensure_closed = commit = rollback = _BorrowedConnection._nothing

    def close(self) -> None:
        """Do nothing: the store closes its connections."""


def _lend(connection: Any) -> tuple[str, str, _BorrowedConnection]:
    """Return the dialect's URL, the server's version, and a proxy for a connection."""
    module = type(connection).__module__.partition(".")[0]
    if module == "asyncpg":
        version = str(connection.get_server_version())
        return "postgresql+asyncpg://", version, _BorrowedAsyncpg(connection)
    if module == "asyncmy":
        return "mysql+asyncmy://", str(connection.get_server_info()), _BorrowedAsyncmy(connection)
    raise InvalidArgument("connection", connection, _EXPECTED)


_CONNECTION: ContextVar[_BorrowedConnection] = ContextVar("perdure_sqlalchemy_connection")


async def _connect(*_: object, **__: object) -> Any:
    return _CONNECTION.get()


@lru_cache(maxsize=_MAX_SERVERS)
def _engine(url: str, version: str) -> AsyncEngine:
    """Return an engine without its own connections, for all servers of one version.

    Cached, because an engine asks the server for its settings on its first connection.
    """
    engine = create_async_engine(url, async_creator=_connect, poolclass=NullPool)
    if engine.dialect.name == "postgresql":
        text: dict[Any, Any] = {types.JSON: _TextJson, JSON: _TextJson, JSONB: _TextJsonb}
        engine.dialect.colspecs = {**engine.dialect.colspecs, **text}
    return engine


def _read_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value


class _TextJson(JSON):
    """A value of type json, which asyncpg returns as a string."""

    def result_processor(self, dialect: Any, coltype: object) -> Any:
        return _read_json


class _TextJsonb(JSONB):
    """A value of type jsonb, which asyncpg returns as a string."""

    def result_processor(self, dialect: Any, coltype: object) -> Any:
        return _read_json
