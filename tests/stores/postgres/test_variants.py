"""The PostgreSQL store fulfills the contract, however it is opened."""

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from perdure.store import Store
from perdure.stores import postgres
from perdure.testing.conformance import StoreConformance
from tests.servers.pgbouncer import PgBouncer
from tests.stores.kit_parts import ConnectionConformance
from tests.stores.postgres.kit import PostgresHarness, empty

AWAITLY = """
    CREATE TABLE IF NOT EXISTS perdure_runs (
        id text PRIMARY KEY, snapshot jsonb NOT NULL, updated_at timestamptz DEFAULT now()
    );
    CREATE INDEX IF NOT EXISTS perdure_runs_updated_at_idx ON perdure_runs (updated_at DESC);
"""

# Neither the pooling of connections nor the type of a column depends on the version of the server.
on_one_server = pytest.mark.parametrize("postgres_server", ["debian"], indirect=True)


@on_one_server
class TestOnAwaitlysTable(PostgresHarness, StoreConformance):
    """In a table that awaitly created, whose snapshots are jsonb."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        with psycopg.connect(empty_url) as connection:
            connection.execute(AWAITLY)
        async with postgres(empty_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(self.direct_url, prefix=prefix)


async def decode_json(connection: Any) -> None:
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
        )


@pytest.mark.slow
@on_one_server
class TestWithAPool(PostgresHarness, ConnectionConformance):
    """With a pool of the user, whose connections decode JSON, as those of many users do."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        self.pool = await asyncpg.create_pool(empty_url, min_size=0, max_size=10, init=decode_json)
        async with self.pool, postgres(pool=self.pool) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(pool=self.pool, prefix=prefix)


@pytest.mark.slow
@on_one_server
class TestWithAnEngine(PostgresHarness, ConnectionConformance):
    """With a SQLAlchemy engine of the user."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        self.engine = create_async_engine(
            empty_url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=10
        )
        async with postgres(engine=self.engine) as store:
            yield store
        await self.engine.dispose()

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(engine=self.engine, prefix=prefix)


@pytest.mark.slow
@on_one_server
class TestBehindPgBouncer(PostgresHarness, ConnectionConformance):
    """Behind a pooler in transaction mode: each transaction may use another session."""

    examples = 5

    @pytest.fixture
    async def store(self, database: str, pgbouncer_server: PgBouncer) -> AsyncIterator[Store]:
        pgbouncer_server.ensure()
        # Not `url`: other processes would open it with prepared statements.
        self.pooled_url = pgbouncer_server.before(database)
        self.direct_url = database
        async with postgres(self.pooled_url, prepared_statements=False) as store:
            yield store
        empty(database)

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(self.pooled_url, prefix=prefix, prepared_statements=False)
