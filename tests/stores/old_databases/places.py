"""Where an old database is, how it is filled, and how it is opened with the current code."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiosqlite
import asyncmy
import asyncpg

from perdure.stores import FileStore, SqlStore, keyvalue, libsql, mongo, mysql, postgres, redis
from perdure.stores import sqlite as sqlite_store
from perdure.stores.sql import SqlClient
from perdure.stores.sqlite import SqliteKeyValue
from tests.stores.old_databases import COPIED, COPIES, Run, copy_ids, expected_runs
from tests.stores.old_databases.documents import (
    fill_mongo,
    restore_files,
    restore_keyvalue,
    restore_redis,
)
from tests.stores.old_databases.sql import fill_sql
from tests.stores.sql.clients import AiosqliteClient, AsyncmyClient, AsyncpgClient, mysql_options

SQL_KINDS = (
    "postgres",
    "postgres_jsonb",
    "mysql",
    "sqlite",
    "libsql",
    "sql_postgres",
    "sql_mysql",
    "sql_sqlite",
)
KINDS = (*SQL_KINDS, "mongo", "redis", "file", "keyvalue")

_WITH_AWAITLY = ("postgres_jsonb", "sqlite", "libsql", "mongo")


@dataclass(frozen=True)
class Place:
    """A database of one kind of store, at a URL or path; on Redis, in a namespace."""

    kind: str
    address: str
    namespace: str = ""

    @property
    def has_awaitly(self) -> bool:
        """Whether awaitly wrote a run, too: where it has such a store."""
        return self.kind in _WITH_AWAITLY

    @property
    def copied(self) -> tuple[str, ...]:
        """The runs of which copies exist."""
        return (*COPIED, "awaitly") if self.has_awaitly else COPIED

    async def fill(self, copies: int) -> dict[str, Run]:
        """Create the old database, and return its runs by id."""
        match self.kind:
            case "mongo":
                fill_mongo(self.address, copies)
            case "redis":
                restore_redis(self.address, self.namespace)
            case "file":
                restore_files(Path(self.address))
            case "keyvalue":
                await restore_keyvalue(Path(self.address))
            case _:
                fill_sql(self.kind, self.address, copies)
        fixed = self.kind in ("redis", "file", "keyvalue")
        return self._runs(COPIES if fixed else copies)

    def _runs(self, copies: int) -> dict[str, Run]:
        runs = expected_runs(awaitly=self.has_awaitly)
        return runs | {id: runs[shape] for id, shape in copy_ids(self.copied, copies)}

    @property
    def table(self) -> str:
        """The table of the runs, in a SQL database."""
        return "workflow_runs" if self.kind.startswith("sql_") else "perdure_runs"

    def open(self, table: str = "") -> AbstractAsyncContextManager[Any]:
        """Return the store, to be entered; in a SQL database, perhaps with another table."""
        table = table or self.table
        match self.kind:
            case "postgres" | "postgres_jsonb":
                return postgres(self.address, table=table)
            case "mysql":
                return mysql(self.address, table=table)
            case "sqlite":
                return sqlite_store(self.address, table=table)
            case "libsql":
                return libsql(self.address, table=table)
            case "mongo":
                return mongo(self.address)
            case "redis":
                return redis(self.address, namespace=self.namespace)
            case "file":
                return FileStore(self.address)
            case "keyvalue":
                return _on_keyvalue(self.address)
            case _:
                return _on_client(self.kind, self.address, table)


@asynccontextmanager
async def _on_keyvalue(path: str) -> AsyncIterator[Any]:
    async with SqliteKeyValue(path) as kv, keyvalue(kv) as store:
        yield store


@asynccontextmanager
async def _on_client(kind: str, address: str, table: str) -> AsyncIterator[Any]:
    async with client_of(kind, address) as client:
        dialect: Any = kind.removeprefix("sql_")
        async with SqlStore(client, dialect=dialect, table=table) as store:
            yield store


@asynccontextmanager
async def client_of(kind: str, address: str) -> AsyncIterator[SqlClient]:
    """Yield a client for `SqlStore`."""
    if kind == "sql_postgres":
        async with asyncpg.create_pool(address, min_size=1, max_size=4) as pool:
            yield AsyncpgClient(pool)
    elif kind == "sql_mysql":
        pool = await asyncmy.create_pool(**mysql_options(address), autocommit=True, maxsize=4)
        yield AsyncmyClient(pool)
        pool.close()
        await pool.wait_closed()
    else:
        async with aiosqlite.connect(address, isolation_level=None) as connection:
            yield AiosqliteClient(connection)
