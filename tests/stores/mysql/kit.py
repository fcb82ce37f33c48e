"""The conformance kit on MySQL, with one database for all checks of a class."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncmy
import pytest

from perdure.store import Store
from perdure.testing.conformance import Harness
from tests.servers.mysql import connect, connect_arguments, fresh_database, query
from tests.servers.process import Server, eventually

_OTHERS = """
    SELECT id, info FROM information_schema.processlist
    WHERE db = DATABASE() AND id <> CONNECTION_ID()
"""


class MysqlHarness(Harness):
    """The fixtures for every way to open the store.

    Creating tables takes longer than most checks: they are created once and emptied after each.
    """

    direct_url: str

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, mysql_server: Server) -> Iterator[str]:
        """A database that is empty at the start of each check."""
        with fresh_database(mysql_server) as url:
            query(url, "CREATE TABLE notes (note VARCHAR(100))")
            yield url

    @pytest.fixture
    def empty_url(self, database: str) -> Iterator[str]:
        """The database; a check that leaves a connection open fails."""
        yield database
        with connect(database) as connection, connection.cursor() as cursor:
            eventually(lambda: check_alone(cursor), retry_on=(AssertionError,), connect_timeout=2)
            cursor.execute("SHOW TABLES")
            for (table,) in cursor.fetchall():
                if not table.endswith("_migrations"):
                    cursor.execute(f"DELETE FROM {table}")

    async def user_write(self, connection: Any, note: str) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute("INSERT INTO notes VALUES (%s)", (note,))

    @asynccontextmanager
    async def user_transaction(self, store: Store) -> AsyncIterator[Any]:
        connection = await asyncmy.connect(**connect_arguments(self.direct_url), charset="utf8mb4")
        try:
            await connection.begin()
            yield connection
            await connection.commit()
        finally:
            await connection.ensure_closed()

    async def user_notes(self, store: Store) -> Sequence[str]:
        return [note for (note,) in query(self.direct_url, "SELECT note FROM notes")]


def check_alone(cursor: Any) -> None:
    """Fail if there is another connection to the database."""
    cursor.execute(_OTHERS)
    others = cursor.fetchall()
    assert not others, f"the check left connections open: {others}"
