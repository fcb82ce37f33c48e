"""Hold the locks of a transaction that is not committed yet, while other statements wait."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncmy

from perdure.stores import mysql
from perdure.stores.mysql import MysqlStore
from perdure.stores.mysql.database import Result, Transaction
from perdure.stores.mysql.joining import JoinedTransaction
from perdure.stores.mysql.literals import Statement
from tests.servers.mysql import connect_arguments, query

WAITING = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"

T = TypeVar("T")


async def blocked(url: str, work: Awaitable[T]) -> "asyncio.Future[T]":
    """Start the work and return its task once it waits for a row."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.01)
    while not task.done() and query(url, WAITING) == ((0,),):
        # MariaDB refreshes this table only if it was not read for a tenth of a second.
        await asyncio.sleep(0.11)
    assert not task.done(), "the work did not wait for the row"
    return task


class _Uncommitted(JoinedTransaction):
    async def run_alone(self, statement: Statement) -> Result:
        (result,) = await self.run(statement)
        return result


@asynccontextmanager
async def uncommitted(url: str, *, rolls_back: bool = False) -> AsyncGenerator[MysqlStore]:
    """Yield a store whose writes are committed, or rolled back, at the end of the block."""
    async with mysql(url) as store, asyncmy.connect(**connect_arguments(url)) as connection:
        await store.load("none")
        async with connection.cursor() as cursor:
            await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.begin()
        database = store._backend._database
        transaction = database.adopt(connection, _Uncommitted)

        async def transact(
            work: Callable[[Transaction], Awaitable[T]], *, repeatable: bool = True
        ) -> T:
            return await work(transaction)

        database.transact = transact  # type: ignore[method-assign]  # in the transaction above
        yield store
        await (connection.rollback() if rolls_back else connection.commit())
