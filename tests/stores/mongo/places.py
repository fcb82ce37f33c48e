"""Databases for tests of the MongoDB store, and stores that die between two writes."""

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import pytest
from pymongo import MongoClient

from perdure.stores.mongo import MongoStore, mongo
from perdure.stores.mongo.schema import Collections
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


class Place:
    """One database that many tests use, each of which finds it empty.

    Making collections and indexes anew for each would take most of the tests' time.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: MongoClient[dict[str, Any]] = MongoClient(url, appname=ADMIN)
        self.database = self.client.get_default_database()

    def clear(self) -> None:
        """Remove all documents."""
        for name in self.database.list_collection_names():
            self.database[name].delete_many({})

    async def advance(self, span: timedelta) -> None:
        """Let time pass for the runs: what is to come is so much nearer."""
        nearer = {"$subtract": ["$wakeAt", span // timedelta(milliseconds=1)]}
        self.database["perdure_runs"].update_many(
            {"wakeAt": {"$type": "date"}}, [{"$set": {"wakeAt": nearer}}]
        )


@contextmanager
def place_on(server: Server) -> Iterator[Place]:
    """Give a database; at the end no client of the tests may be connected."""
    with fresh_database(server) as url:
        place = Place(url)
        try:
            yield place
        finally:
            place.client.close()


@pytest.fixture(autouse=True)
def no_garbage_left() -> Iterator[None]:
    """Let the driver's leaks come out where they happened."""
    yield
    gc.collect()


def dying(url: str, writes: int) -> MongoStore:
    """Give a store that makes so many writes; every later one dies before it is made."""
    store = mongo(url)
    connection = store._backend._connection
    bind, budget = connection._bind, Budget(writes)

    def bind_dying(database: Any) -> Collections:
        return bind(cast(Any, Dying(database, budget)))

    connection._bind = bind_dying
    return store


class Budget:
    """How many writes are left."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def spending(self, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Give the write, with its price."""

        async def paid(*arguments: Any, **options: Any) -> Any:
            if not self.left:
                raise Crash
            self.left -= 1
            return await write(*arguments, **options)

        return paid


class Dying:
    """A database or collection whose writes are counted."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in WRITES:
            return self._budget.spending(found)
        if name in ("get_collection", "with_options"):
            return lambda *arguments, **options: Dying(found(*arguments, **options), self._budget)
        return Dying(found, self._budget) if name == "database" else found
