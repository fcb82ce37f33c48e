"""The MongoDB store keeps the whole contract, on a replica set and on a server that is alone."""

from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from pymongo import AsyncMongoClient

from perdure.store import Store
from perdure.stores.mongo import MongoStore, MongoTransaction, mongo
from perdure.testing.conformance import StoreConformance
from tests.servers.process import Server
from tests.stores.crashes import VERBS, survives_crash
from tests.stores.mongo.places import Place, dying, place_on


@pytest.fixture(scope="module")
def replica_set(mongo_server: Server) -> Iterator[Place]:
    with place_on(mongo_server) as place:
        yield place


@pytest.fixture(scope="module")
def alone(mongo_standalone: Server) -> Iterator[Place]:
    with place_on(mongo_standalone) as place:
        yield place


class _MongoChecks(StoreConformance):
    examples = 12
    place: Place
    dying: list[MongoStore]

    async def opened(self, place: Place) -> AsyncIterator[MongoStore]:
        self.place, self.url, self.dying = place, place.url, []
        try:
            async with mongo(place.url) as store:
                yield store
            for another in self.dying:
                await another.close()
        finally:
            place.clear()

    async def reopen(self, store: Store, *, prefix: str = "") -> MongoStore:
        return mongo(self.place.url, prefix=prefix)

    async def crashing(self, store: Store, writes: int) -> MongoStore:
        self.dying.append(dying(self.place.url, writes))
        await self.dying[-1].load("nothing")
        return self.dying[-1]

    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_crash_between_any_two_writes_loses_nothing(
        self, store: MongoStore, verb: str
    ) -> None:
        """Where a verb is several writes, their order and marks make a crash between them safe."""
        for writes in range(20):
            crashing = await self.crashing(store, writes)
            if await survives_crash(store, crashing, self.place, VERBS[verb]):  # type: ignore[arg-type]  # moves time
                return
            self.place.clear()
        pytest.fail(f"{verb} took more than 20 writes")


class TestMongoReplicaSet(_MongoChecks):
    """With transactions and hints."""

    @pytest.fixture
    async def store(self, replica_set: Place) -> AsyncIterator[MongoStore]:
        async for store in self.opened(replica_set):
            yield store

    async def user_write(self, connection: MongoTransaction, note: str) -> None:
        await connection.database["notes"].insert_one({"note": note}, session=connection.session)

    async def user_notes(self, store: Store) -> Sequence[str]:
        async with AsyncMongoClient[dict[str, str]](self.place.url) as client:
            notes = client.get_default_database()["notes"]
            return [line["note"] async for line in notes.find()]


class TestMongoAlone(_MongoChecks):
    """Without transactions: order and marks do the work."""

    @pytest.fixture
    async def store(self, alone: Place) -> AsyncIterator[MongoStore]:
        async for store in self.opened(alone):
            yield store
