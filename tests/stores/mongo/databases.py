"""Databases for tests of the MongoDB store, and stores that crash between two writes."""

import gc
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
from pymongo import MongoClient

from perdure.stores.mongo import MongoStore, mongo
from perdure.stores.mongo.schema import collections_of
from tests.servers.mongo import ADMIN, fresh_database
from tests.servers.process import Server
from tests.stores.crashes import Crash

# A client that is closed while its monitor connects leaves that socket to the garbage collector.
ignore_driver_leaks = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)

WRITES = {
    "bulk_write",
    "command",
    "delete_many",
    "delete_one",
    "find_one_and_delete",
    "find_one_and_update",
    "insert_many",
    "update_many",
    "update_one",
}


class Sandbox:
    """One database that many tests use, each of which finds it empty.

    Creating collections and indexes for each test would take most of the time.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: MongoClient[dict[str, Any]] = MongoClient(url, appname=ADMIN)
        self.database = self.client.get_default_database()

    def clear(self) -> None:
        """Delete all documents."""
        for name in self.database.list_collection_names():
            self.database[name].delete_many({})

    async def advance(self, span: timedelta) -> None:
        """Let time pass for the runs: their wake times and leases end that much earlier."""
        earlier = {"$subtract": ["$wakeAt", span // timedelta(milliseconds=1)]}
        self.database["perdure_runs"].update_many(
            {"wakeAt": {"$type": "date"}}, [{"$set": {"wakeAt": earlier}}]
        )


@contextmanager
def sandbox_on(server: Server) -> Generator[Sandbox]:
    """Provide a database; at the end no client of the tests may be connected."""
    with fresh_database(server) as url:
        sandbox = Sandbox(url)
        try:
            yield sandbox
        finally:
            sandbox.client.close()


@pytest.fixture(autouse=True)
def no_garbage_left() -> Iterator[None]:
    """Report the driver's leaks in the test that caused them."""
    yield
    gc.collect()


async def crashing_store(url: str, writes: int) -> MongoStore:
    """Return an open store that makes that many writes and crashes before the next."""
    store = mongo(url)
    await store.load("nothing")
    connection = store._backend._connection
    database = cast(Any, Crashing(connection.bound().database, Budget(writes)))
    connection._bound = collections_of(database, connection.bound().runs.name)
    return store


class Budget:
    """How many writes are left."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def limit(self, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return the write, which crashes when none is left."""

        async def limited(*arguments: Any, **options: Any) -> Any:
            if not self.left:
                raise Crash
            self.left -= 1
            return await write(*arguments, **options)

        return limited


class Crashing:
    """A database or collection whose writes are counted."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name in WRITES:
            return self._budget.limit(value)
        if name in ("get_collection", "with_options"):
            return lambda *arguments, **options: Crashing(
                value(*arguments, **options), self._budget
            )
        return Crashing(value, self._budget) if name == "database" else value
