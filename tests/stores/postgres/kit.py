"""The conformance kit on PostgreSQL, with one database for all checks of a class."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from perdure.store import Store
from perdure.testing.conformance import Harness
from tests.servers.postgres import await_no_connections, fresh_database
from tests.servers.process import Server

_TABLES = (
    "perdure_runs",
    "perdure_runs_journal",
    "perdure_runs_inbox",
    "perdure_runs_tags",
    "notes",
)


class PostgresHarness(Harness):
    """The fixtures for every way to open the store.

    Creating a database takes longer than most checks: it is created once and emptied after each.
    """

    direct_url: str

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, postgres_server: Server) -> Iterator[str]:
        """A database that is empty at the start of each check."""
        with fresh_database(postgres_server, pooled=True) as url:
            with psycopg.connect(url) as connection:
                connection.execute("CREATE TABLE notes (note text)")
            yield url

    @pytest.fixture
    def empty_url(self, database: str, postgres_server: Server) -> Iterator[str]:
        """The database; a check that leaves a connection open fails."""
        yield database
        await_no_connections(postgres_server, urlsplit(database).path[1:])
        empty(database)

    async def user_write(self, connection: Any, note: str) -> None:
        await connection.execute("INSERT INTO notes VALUES ($1)", note)

    @asynccontextmanager
    async def user_transaction(self, store: Store) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.direct_url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    async def user_notes(self, store: Store) -> Sequence[str]:
        with psycopg.connect(self.direct_url) as connection:
            return [note for (note,) in connection.execute("SELECT note FROM notes")]


def empty(url: str) -> None:
    """Delete the rows of all tables."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table in _TABLES:
            if connection.execute("SELECT to_regclass(%s)", [table]).fetchone() != (None,):
                connection.execute(f"DELETE FROM {table}".encode())
