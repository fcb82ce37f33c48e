"""`SqlStore` passes the conformance kit on three databases, each through a short client."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiosqlite
import asyncmy
import asyncpg
import pytest
from asyncmy.constants import CLIENT

from perdure.store import Store
from perdure.stores import SqlStore
from perdure.stores.sql import SqlClient, sqlalchemy_client
from perdure.stores.sql.dialects import DialectName
from perdure.testing.conformance import Harness, StoreConformance
from tests.servers import mysql, postgres
from tests.servers.process import Server
from tests.stores.kit_parts import ConnectionConformance
from tests.stores.sql.clients import (
    AiosqliteClient,
    AsyncmyClient,
    AsyncpgClient,
    CrashingClient,
    engine_on,
    mysql_options,
)

TABLES = tuple(f"workflow_runs{suffix}" for suffix in ("", "_journal", "_inbox", "_tags"))


class SqlHarness(Harness):
    """What the three databases have in common."""

    examples = 5
    dialect: DialectName
    client: SqlClient

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return SqlStore(self.client, dialect=self.dialect, prefix=prefix)

    async def crashing(self, store: Store, writes: int) -> Store:
        set_up = 2
        return SqlStore(CrashingClient(self.client, set_up + writes), dialect=self.dialect)


class PostgresHarness(SqlHarness):
    """A database on the server, for all checks of a class."""

    dialect = "postgres"

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, postgres_server: Server) -> Iterator[str]:
        with postgres.fresh_database(postgres_server) as url:
            yield url


class TestOnPostgres(PostgresHarness, StoreConformance):
    """Through asyncpg."""

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        async with asyncpg.create_pool(database, min_size=1, max_size=10) as pool:
            self.client = AsyncpgClient(pool)
            yield SqlStore(self.client, dialect="postgres")
            for table in TABLES:
                await pool.execute(f"DELETE FROM {table}")


class TestOnMysql(SqlHarness, StoreConformance):
    """Through asyncmy."""

    dialect = "mysql"
    flags = 0

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, mysql_server: Server) -> Iterator[str]:
        with mysql.fresh_database(mysql_server) as url:
            yield url

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        pool = await asyncmy.create_pool(
            **mysql_options(database), autocommit=True, maxsize=10, client_flag=self.flags
        )
        self.client = AsyncmyClient(pool)
        yield SqlStore(self.client, dialect="mysql")
        for table in TABLES:
            await self.client.query(f"DELETE FROM {table}", ())
        pool.close()
        await pool.wait_closed()


@pytest.mark.slow
class TestOnMysqlCountingFoundRows(TestOnMysql):
    """With the flag that counts unchanged rows as affected."""

    flags = CLIENT.FOUND_ROWS


class TestOnSqlite(SqlHarness, StoreConformance):
    """Through aiosqlite."""

    dialect = "sqlite"

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
            await connection.execute("PRAGMA synchronous = OFF")
            self.client = AiosqliteClient(connection)
            yield SqlStore(self.client, dialect="sqlite")


@pytest.mark.slow
class TestOnSqlalchemy(PostgresHarness, ConnectionConformance):
    """Through a SQLAlchemy engine, which has its own parameter style and types."""

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        engine = engine_on(database, "postgresql+asyncpg")
        self.client = sqlalchemy_client(engine)
        yield SqlStore(self.client, dialect="postgres")
        for table in TABLES:
            await self.client.query(f"DELETE FROM {table}", ())
        await engine.dispose()
