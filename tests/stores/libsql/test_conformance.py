"""The libSQL store passes the conformance kit, on a real server and on a file."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from perdure.store import Store
from perdure.stores.libsql import LibsqlStore, Transaction, libsql
from perdure.stores.sqlite import SqliteStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance
from tests.servers.sqld import query
from tests.stores.kit_parts import ConnectionConformance


class TestLibsqlServer(StoreConformance):
    """On sqld, by its clock, together with other processes."""

    @pytest.fixture
    async def store(self, sqld_url: str) -> AsyncIterator[LibsqlStore | SqliteStore]:
        self.server = sqld_url
        self.url = f"libsql+{sqld_url}"
        async with libsql(sqld_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> LibsqlStore | SqliteStore:
        return libsql(self.server, prefix=prefix)

    async def user_write(self, connection: Transaction, note: str) -> None:
        await connection.execute("CREATE TABLE IF NOT EXISTS notes (note TEXT)")
        await connection.execute("INSERT INTO notes VALUES (?)", (note,))

    async def user_notes(self, store: Store) -> Sequence[str]:
        if not query(self.server, "SELECT 1 FROM sqlite_master WHERE name = 'notes'"):
            return []
        return [note for (note,) in query(self.server, "SELECT note FROM notes")]


class TestLibsqlFile(ConnectionConformance):
    """On a local file, for which `libsql` returns the store of `sqlite`."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[LibsqlStore | SqliteStore]:
        self.clock = TestClock()
        self.path = tmp_path / "runs.db"
        async with libsql(f"file:{self.path}", clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> LibsqlStore | SqliteStore:
        assert self.clock is not None
        return libsql(f"file:{self.path}", clock=self.clock, prefix=prefix)
