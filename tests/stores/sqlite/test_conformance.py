"""The SQLite store passes the conformance kit, on a file and in memory."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from perdure.store import Store
from perdure.stores.sqlite import SqliteStore, Transaction, sqlite
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from tests.stores.kit_parts import ClockConformance


class TestSqliteFile(StoreConformance):
    """On a file, with a clock that the checks control."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SqliteStore]:
        self.clock = TestClock()
        self.path = tmp_path / "runs.db"
        async with sqlite(self.path, clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> SqliteStore:
        assert self.clock is not None
        return sqlite(self.path, clock=self.clock, prefix=prefix)

    async def user_write(self, connection: Transaction, note: str) -> None:
        await connection.execute("CREATE TABLE IF NOT EXISTS notes (note TEXT)")
        await connection.execute("INSERT INTO notes VALUES (?)", (note,))

    @asynccontextmanager
    async def user_transaction(self, store: Store) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("BEGIN")
            yield connection

    async def user_notes(self, store: Store) -> Sequence[str]:
        with closing(sqlite3.connect(self.path)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'notes'")
            if not tables.fetchall():
                return []
            return [note for (note,) in connection.execute("SELECT note FROM notes")]


class TestSqliteFileOnSystemClock(ClockConformance):
    """On a file, in real time, together with other processes."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SqliteStore]:
        self.path = tmp_path / "runs.db"
        self.url = f"sqlite:///{self.path}"
        async with sqlite(self.path) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> SqliteStore:
        return sqlite(self.path, prefix=prefix)


class TestSqliteMemory(StoreConformance):
    """In memory."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[SqliteStore]:
        self.clock = TestClock()
        async with sqlite(":memory:", clock=self.clock) as store:
            yield store
