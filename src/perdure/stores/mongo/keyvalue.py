"""Strings by key in a MongoDB collection, with expiry by the server's clock."""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pymongo import IndexModel
from pymongo.errors import DuplicateKeyError

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores._lifecycle import Lifecycle
from perdure.stores.mongo.connection import (
    Collection,
    Connection,
    Use,
    check_collection,
    create_indexes,
    parse_target,
)
from perdure.stores.mongo.driver import AsyncMongoClient
from perdure.stores.mongo.updates import Document, from_now, has_prefix

_INDEXES = (IndexModel([("expiresAt", 1)], name="expiresAt_ttl", expireAfterSeconds=0),)
# The server deletes expired documents about once a minute; until then they are hidden.
_IS_LIVE = {"$or": [{"expiresAt": None}, {"$expr": {"$gt": ["$expiresAt", "$$NOW"]}}]}
_IS_MISSING = {"$lte": ["$value", None]}
_HAS_EXPIRED = {"$and": [{"$gt": ["$expiresAt", None]}, {"$lte": ["$expiresAt", "$$NOW"]}]}


class MongoKeyValue(AsyncCloseable):
    """A `KeyValueStore` with compare-and-set; the server deletes what has expired.

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
        self._connection = Connection(
            url,
            target=parse_target(url, database, replica_set=False),
            client=client,
            client_options=client_options,
            clock=clock,
            bind=lambda opened: opened.get_collection(name),
            prepare=_prepare,
        )
        forget_loop = self._connection.forget_loop
        self._life = Lifecycle("MongoDB key-value", self._connection.open, on_move=forget_loop)

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if there is none or it has expired."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Return the value of each key, in order."""
        with await self._use() as collection:
            found = collection.find({"_id": {"$in": [*keys]}, **_IS_LIVE}, {"value": 1})
            values = {document["_id"]: document["value"] async for document in found}
        return [values.get(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value, for `ttl` or until it is deleted."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "a string")
        span = None if ttl is None else parse_duration(ttl, "ttl")
        with await self._use() as collection:
            await _upsert(collection, key, [{"$replaceWith": _document(value, span)}])

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace `old` by `new` atomically; `None` stands for a missing value."""
        if old is None and new is None:
            return not await self.exists(key)
        expected = {"_id": key, "value": old, **_IS_LIVE}
        with await self._use() as collection:
            if new is None:
                return (await collection.delete_one(expected)).deleted_count == 1
            if old is not None:
                update = [{"$replaceWith": _document(new, None)}]
                return (await collection.update_one(expected, update)).matched_count == 1
            is_absent = {"$or": [_IS_MISSING, _HAS_EXPIRED]}
            added = {"$replaceWith": {"$cond": [is_absent, _document(new, None), "$$ROOT"]}}
            return await _upsert(collection, key, [added])

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        with await self._use() as collection:
            return (await collection.delete_one({"_id": key, **_IS_LIVE})).deleted_count == 1

    async def exists(self, key: str, /) -> bool:
        """Return whether the key has a value that has not expired."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the keys that match; `*` matches any string, all else only itself."""
        prefix = pattern.partition("*")[0]
        matching = {"$and": [has_prefix(prefix), {"_id": {"$regex": _regex(pattern)}}]}
        with await self._use() as collection:
            found = collection.find({**matching, **_IS_LIVE}, {"_id": 1}).sort("_id")
            return [document["_id"] async for document in found]

    async def close(self) -> None:
        """Close the client unless it was passed in."""
        if self._life.close():
            await self._connection.close()

    async def _use(self) -> Use[Collection]:
        await self._life.ready()
        return self._connection.use()


async def _prepare(collection: Collection) -> None:
    await create_indexes(collection, _INDEXES)


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
            # Another process inserted it at the same time: now there is one to update.
            continue
        return result.upserted_id is not None or result.modified_count == 1


def _regex(pattern: str) -> str:
    """Return the server's regular expression for a pattern; NUL must be escaped in it."""
    parts = (re.escape(part).replace("\0", r"\x00") for part in pattern.split("*"))
    return r"(?s)\A" + ".*".join(parts) + r"\z"
