"""The PostgreSQL store keeps the whole contract, on a real server, however it is opened."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from perdure.store import Store
from perdure.stores import postgres
from perdure.testing.conformance import StoreConformance
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import await_no_connections, fresh_database
from tests.servers.process import Server

TABLES = ("perdure_runs", "perdure_runs_journal", "perdure_runs_inbox", "notes")

AWAITLY = """
    CREATE TABLE IF NOT EXISTS perdure_runs (
        id text PRIMARY KEY, snapshot jsonb NOT NULL, updated_at timestamptz DEFAULT now()
    );
    CREATE INDEX IF NOT EXISTS perdure_runs_updated_at_idx ON perdure_runs (updated_at DESC);
"""


@pytest.fixture(scope="class")
def database(postgres_server: Server) -> Iterator[str]:
    """One database for all checks: making one takes longer than most checks."""
    with fresh_database(postgres_server, pooled=True) as url:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE notes (note text)")
        yield url


@pytest.fixture
def empty_url(database: str, postgres_server: Server) -> Iterator[str]:
    """The database without rows; fails the check that leaves a connection open."""
    yield database
    await_no_connections(postgres_server, urlsplit(database).path[1:])
    empty(database)


def empty(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for table in TABLES:
            there = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()
            if there != (None,):
                connection.execute(f"DELETE FROM {table}".encode())


class PostgresConformance(StoreConformance):
    """What every way of opening the store shares."""

    direct_url: str

    async def user_write(self, connection: Any, note: str) -> None:
        await connection.execute("INSERT INTO notes VALUES ($1)", note)

    async def user_notes(self, store: Store) -> Sequence[str]:
        with psycopg.connect(self.direct_url) as connection:
            return [note for (note,) in connection.execute("SELECT note FROM notes")]


class TestPostgresStore(PostgresConformance):
    """By URL."""

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        async with postgres(empty_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(self.url, prefix=prefix)


class TestOnAwaitlysTable(TestPostgresStore):
    """A table that awaitly made, whose snapshots are jsonb, is as good as one of our own."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        with psycopg.connect(empty_url) as connection:
            connection.execute(AWAITLY)
        async with postgres(empty_url) as store:
            yield store


class TestWithAPool(PostgresConformance):
    """With a pool of the user's own."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        self.pool = await asyncpg.create_pool(empty_url, min_size=0, max_size=10)
        async with self.pool, postgres(pool=self.pool) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(pool=self.pool, prefix=prefix)


class TestBehindPgBouncer(PostgresConformance):
    """Behind a pooler in transaction mode: no session is ours for longer than a transaction."""

    examples = 5

    @pytest.fixture
    async def store(self, database: str, pgbouncer_server: PgBouncer) -> AsyncIterator[Store]:
        pgbouncer_server.ensure()
        # Not `url`: other processes would open it as if no pooler were there.
        self.pooled_url = pgbouncer_server.before(database)
        self.direct_url = database
        async with postgres(self.pooled_url, prepared_statements=False) as store:
            yield store
        empty(database)

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(self.pooled_url, prefix=prefix, prepared_statements=False)
