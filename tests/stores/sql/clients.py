"""Clients of a few lines, as users write them, and clients that fail."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from perdure.stores.sql import SqlClient


class AsyncpgClient:
    """A user's client on an asyncpg pool."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Sequence[Any], int]:
        async with self._pool.acquire() as connection:
            statement = await connection.prepare(sql)
            rows = await statement.fetch(*params)
            affected = statement.get_statusmsg().split()[-1]
            return rows, int(affected) if affected.isdigit() else 0


class AsyncmyClient:
    """A user's client on an asyncmy pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Sequence[Any], int]:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(sql, params)
            rows = await cursor.fetchall() if cursor.description else []
            return rows, cursor.rowcount


class AiosqliteClient:
    """A user's client on one aiosqlite connection in autocommit mode.

    Rows are read while they are fetched: the lock prevents other statements from changing them.
    """

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Any, int]:
        async with self._lock, self._connection.execute(sql, params) as cursor:
            return await cursor.fetchall(), cursor.rowcount


class CrashingClient:
    """A client whose process crashes after a number of statements."""

    def __init__(self, client: SqlClient, statements: int) -> None:
        self._client = client
        self._left = statements
        if hasattr(client, "paramstyle"):
            self.paramstyle = client.paramstyle

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        if not self._left:
            raise RuntimeError("crashed")
        self._left -= 1
        return await self._client.query(sql, params)


class PausedClient:
    """A client that calls a function before its n-th statement."""

    def __init__(self, client: SqlClient, n: int, callback: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._left = n
        self._callback = callback

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self._left -= 1
        if not self._left:
            await self._callback()
        return await self._client.query(sql, params)


def engine_on(url: str, scheme: str) -> AsyncEngine:
    return create_async_engine(urlsplit(url)._replace(scheme=scheme).geturl(), pool_size=10)


def mysql_options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    user = unquote(parts.username or "root")
    return {"host": parts.hostname, "port": parts.port, "user": user, "db": parts.path[1:]}
