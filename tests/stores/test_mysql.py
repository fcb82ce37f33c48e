"""The MySQL store keeps the whole contract, on a real server, however it is opened."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncmy
import pymysql
import pytest

from perdure.store import Store
from perdure.stores import mysql
from perdure.testing.conformance import StoreConformance
from tests.servers.mysql import connect_arguments, fresh_database
from tests.servers.process import Server, eventually


@pytest.fixture(scope="class")
def database(mysql_server: Server) -> Iterator[str]:
    """One database for all checks: making its tables takes longer than most checks."""
    with fresh_database(mysql_server) as url:
        query(url, "CREATE TABLE notes (note VARCHAR(100))")
        yield url


@pytest.fixture
def empty_url(database: str) -> Iterator[str]:
    """The database without rows; fails the check that leaves a connection open."""
    yield database
    connection = pymysql.connect(**connect_arguments(database), autocommit=True)
    with connection, connection.cursor() as cursor:
        eventually(lambda: check_alone(cursor), retry_on=(AssertionError,), patience=2)
        cursor.execute("SHOW TABLES")
        for (table,) in cursor.fetchall():
            if not table.endswith("_migrations"):
                cursor.execute(f"DELETE FROM {table}")


def check_alone(cursor: Any) -> None:
    cursor.execute(
        "SELECT id, info FROM information_schema.processlist "
        "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
    )
    others = cursor.fetchall()
    assert not others, f"the check left connections open: {others}"


def query(url: str, statement: str) -> Sequence[tuple[Any, ...]]:
    connection = pymysql.connect(**connect_arguments(url), autocommit=True)
    with connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return tuple(cursor.fetchall())


class MysqlConformance(StoreConformance):
    """What every way of opening the store shares."""

    async def user_write(self, connection: Any, note: str) -> None:
        async with connection.cursor() as cursor:
            await cursor.execute("INSERT INTO notes VALUES (%s)", (note,))

    async def user_notes(self, store: Store) -> Sequence[str]:
        assert self.url is not None
        return [note for (note,) in query(self.url, "SELECT note FROM notes")]


class TestMysqlStore(MysqlConformance):
    """By URL."""

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = empty_url
        async with mysql(empty_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        assert self.url is not None
        return mysql(self.url, prefix=prefix)


class TestWithAPool(MysqlConformance):
    """With a pool of the user's own, whose sessions are in modes that break careless statements."""

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = empty_url
        modes = "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT'"
        strange = f"SET SESSION sql_mode = {modes}, SESSION time_zone = '-07:00'"
        options = connect_arguments(empty_url) | {"init_command": strange, "autocommit": False}
        async with (
            asyncmy.create_pool(minsize=0, maxsize=10, **options) as self.pool,
            mysql(pool=self.pool) as store,
        ):
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return mysql(pool=self.pool, prefix=prefix)
