"""The MongoDB store satisfies the contract, on a replica set and on a standalone server."""

from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from pymongo import AsyncMongoClient

from perdure.store import Store
from perdure.stores.mongo import MongoStore, MongoTransaction, embedding, mongo
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.batches import BatchesChecks
from perdure.testing.conformance.harness import Harness
from perdure.testing.conformance.inbox import InboxChecks
from perdure.testing.conformance.model import ModelChecks
from perdure.testing.conformance.races import RaceChecks
from tests.servers.process import Server
from tests.stores.crashes import VERBS, survives_crash
from tests.stores.mongo.databases import Sandbox, crashing_store, sandbox_on


@pytest.fixture(scope="module")
def replica_set(mongo_server: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_server) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def standalone(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


class _MongoHarness(Harness):
    examples = 12
    sandbox: Sandbox
    crashed: list[MongoStore]

    async def opened(self, sandbox: Sandbox) -> AsyncIterator[MongoStore]:
        self.sandbox, self.url, self.crashed = sandbox, sandbox.url, []
        try:
            async with mongo(sandbox.url) as store:
                yield store
            for another in self.crashed:
                await another.close()
        finally:
            sandbox.clear()

    async def reopen(self, store: Store, *, prefix: str = "") -> MongoStore:
        return mongo(self.sandbox.url, prefix=prefix)

    async def crashing(self, store: Store, writes: int) -> MongoStore:
        crashing = await crashing_store(self.sandbox.url, writes)
        self.crashed.append(crashing)
        return crashing


class _MongoChecks(_MongoHarness, StoreConformance):
    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_crash_between_any_two_writes_loses_nothing(
        self, store: MongoStore, verb: str
    ) -> None:
        """Where a verb makes several writes, their order makes a crash between them safe."""
        for writes in range(20):
            crashing = await self.crashing(store, writes)
            if await survives_crash(store, crashing, self.sandbox, VERBS[verb]):  # type: ignore[arg-type]  # moves time
                return
            self.sandbox.clear()
        pytest.fail(f"{verb} took more than 20 writes")


class TestMongoReplicaSet(_MongoChecks):
    """With transactions and notifications."""

    @pytest.fixture
    async def store(self, replica_set: Sandbox) -> AsyncIterator[MongoStore]:
        async for store in self.opened(replica_set):
            yield store

    async def user_write(self, connection: MongoTransaction, note: str) -> None:
        await connection.database["notes"].insert_one({"note": note}, session=connection.session)

    async def user_notes(self, store: Store) -> Sequence[str]:
        async with AsyncMongoClient[dict[str, str]](self.sandbox.url) as client:
            notes = client.get_default_database()["notes"]
            return [document["note"] async for document in notes.find()]


class TestMongoStandalone(_MongoChecks):
    """Without transactions: the order of writes is what makes them safe."""

    @pytest.fixture
    async def store(self, standalone: Sandbox) -> AsyncIterator[MongoStore]:
        async for store in self.opened(standalone):
            yield store


class TestMongoWithoutEmbedding(_MongoHarness, InboxChecks, BatchesChecks, RaceChecks, ModelChecks):
    """Every message has a document, as large messages and those with a dedup id always do."""

    @pytest.fixture
    async def store(
        self, replica_set: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[MongoStore]:
        monkeypatch.setattr(embedding, "MAX_EMBEDDED", 0)
        async for store in self.opened(replica_set):
            yield store
