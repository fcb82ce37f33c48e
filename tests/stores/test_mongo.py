"""The MongoDB store keeps the whole contract, on a replica set and on a server that is alone."""

from collections.abc import AsyncIterator, Sequence

import pytest
from pymongo import AsyncMongoClient

from perdure.store import Store
from perdure.stores.mongo import MongoStore, MongoTransaction, mongo
from perdure.testing.conformance import StoreConformance


class TestMongoReplicaSet(StoreConformance):
    """With transactions and hints."""

    @pytest.fixture
    async def store(self, mongo_url: str) -> AsyncIterator[MongoStore]:
        self.url = mongo_url
        async with mongo(mongo_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MongoStore:
        assert self.url is not None
        return mongo(self.url, prefix=prefix)

    async def user_write(self, connection: MongoTransaction, note: str) -> None:
        await connection.database["notes"].insert_one({"note": note}, session=connection.session)

    async def user_notes(self, store: Store) -> Sequence[str]:
        assert self.url is not None
        async with AsyncMongoClient[dict[str, str]](self.url) as client:
            notes = client.get_default_database()["notes"]
            return [line["note"] async for line in notes.find()]


class TestMongoAlone(StoreConformance):
    """Without transactions: order and marks do the work."""

    @pytest.fixture
    async def store(self, mongo_standalone_url: str) -> AsyncIterator[MongoStore]:
        self.url = mongo_standalone_url
        async with mongo(mongo_standalone_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MongoStore:
        assert self.url is not None
        return mongo(self.url, prefix=prefix)
