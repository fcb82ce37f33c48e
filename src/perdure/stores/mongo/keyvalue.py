"""Strings by key in a MongoDB collection, with expiry by the server's clock."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pymongo import IndexModel
from pymongo.errors import DuplicateKeyError

from perdure.clock import Clock, SystemClock
from perdure.stores._keyvalue import DatabaseKeyValue, KeyValueBackend
from perdure.stores.mongo.connection import (
    Collection,
    Connection,
    check_collection,
    create_indexes,
    parse_target,
)
from perdure.stores.mongo.driver import AsyncMongoClient
from perdure.stores.mongo.updates import Document, from_now, has_prefix

T = TypeVar("T")

_INDEXES = (IndexModel([("expiresAt", 1)], name="expiresAt_ttl", expireAfterSeconds=0),)
# The server deletes expired documents about once a minute; until then they are hidden.
_IS_LIVE = {"$or": [{"expiresAt": None}, {"$expr": {"$gt": ["$expiresAt", "$$NOW"]}}]}
_IS_MISSING = {"$lte": ["$value", None]}
_HAS_EXPIRED = {"$and": [{"$gt": ["$expiresAt", None]}, {"$lte": ["$expiresAt", "$$NOW"]}]}


class KeyValueCollection(KeyValueBackend, Generic[T]):
    """Strings in the collection that `choose` returns; the server deletes expired ones."""

    def __init__(
        self, connection: Connection[T], choose: Callable[[T], Collection], prefix: str = ""
    ) -> None:
        super().__init__(prefix)
        self._connection = connection
        self._choose = choose

    async def set_up(self) -> None:
        with self._connection.use() as bound:
            await create_indexes(self._choose(bound), _INDEXES)

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        with self._connection.use() as bound:
            matching = {"_id": {"$in": [*keys]}, **_IS_LIVE}
            documents = self._choose(bound).find(matching, {"value": 1})
            return {document["_id"]: document["value"] async for document in documents}

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        with self._connection.use() as bound:
            await _upsert(self._choose(bound), key, [{"$replaceWith": _document(value, ttl)}])

    async def delete(self, key: str) -> bool:
        with self._connection.use() as bound:
            result = await self._choose(bound).delete_one({"_id": key, **_IS_LIVE})
            return result.deleted_count == 1

    async def keys(self, prefix: str) -> list[str]:
        with self._connection.use() as bound:
            matching = {**has_prefix(prefix), **_IS_LIVE}
            documents = self._choose(bound).find(matching, {"_id": 1})
            return [document["_id"] async for document in documents]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        expected = {"_id": key, "value": old, **_IS_LIVE}
        with self._connection.use() as bound:
            collection = self._choose(bound)
            if new is None:
                return (await collection.delete_one(expected)).deleted_count == 1
            if old is not None:
                update = [{"$replaceWith": _document(new, None)}]
                return (await collection.update_one(expected, update)).matched_count == 1
            is_absent = {"$or": [_IS_MISSING, _HAS_EXPIRED]}
            stage = {"$replaceWith": {"$cond": [is_absent, _document(new, None), "$$ROOT"]}}
            return await _upsert(collection, key, [stage])


class MongoKeyValue(DatabaseKeyValue):
    """A `KeyValueStore` with compare-and-set; the server deletes expired keys.

    The options are those of `mongo`; `collection` may be awaitly's own (`workflow_state`).

        kv = MongoKeyValue("mongodb://localhost:27017/mydb")
        persistence = StatePersistence(kv)
    """

    def __init__(
        self,
        url: str,
        *,
        database: str | None = None,
        collection: str = "perdure_keyvalue",
        client: AsyncMongoClient[Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        clock: Clock = SystemClock(),
    ) -> None:
        name = check_collection(collection)
        connection = Connection(
            url,
            target=parse_target(url, database, replica_set=False),
            client=client,
            client_options=client_options,
            clock=clock,
            bind=lambda opened: opened.get_collection(name),
            prepare=_prepare,
        )
        super().__init__(
            "MongoDB",
            KeyValueCollection(connection, lambda collection: collection),
            open=connection.open,
            close=connection.close,
            forget_loop=connection.forget_loop,
        )


async def _prepare(collection: Collection) -> None:
    """Do nothing: `KeyValueCollection` creates its indexes itself."""


def _document(value: str, ttl: timedelta | None) -> Document:
    document: Document = {"_id": "$_id", "value": {"$literal": value}, "updatedAt": "$$NOW"}
    if ttl is not None:
        document["expiresAt"] = from_now(ttl)
    return document


async def _upsert(collection: Collection, key: str, update: list[Document]) -> bool:
    """Update or insert a document; return whether it changed."""
    while True:
        try:
            result = await collection.update_one({"_id": key}, update, upsert=True)
        except DuplicateKeyError:
            # Another process inserted the document at the same time, so now it can be updated.
            continue
        return result.upserted_id is not None or result.modified_count == 1
