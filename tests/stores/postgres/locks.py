"""Hold a row's lock while the statements of a store wait for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg

T = TypeVar("T")


@asynccontextmanager
async def locked_row(connection: asyncpg.Connection) -> AsyncGenerator[None]:
    """Lock the run's row like a statement that is not committed yet, then commit."""
    async with connection.transaction():
        await connection.execute("SELECT FROM perdure_runs WHERE id = 'run' FOR NO KEY UPDATE")
        yield


async def blocked(connection: asyncpg.Connection, work: Awaitable[T]) -> "asyncio.Future[T]":
    """Start the work and return its task once it waits for a lock."""
    task = asyncio.ensure_future(work)
    waiting_locks = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    while not task.done() and not await connection.fetchval(waiting_locks):
        await asyncio.sleep(0.01)
    assert not task.done(), "the work did not wait for the row"
    return task
