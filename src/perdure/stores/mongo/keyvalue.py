"""Texts under keys in a MongoDB collection, with times to live that the server keeps."""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pymongo import IndexModel
from pymongo.errors import DuplicateKeyError

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores.mongo.connection import (
    Collection,
    Connection,
    check_collection,
    create_indexes,
    target_of,
)
from perdure.stores.mongo.driver import AsyncMongoClient
from perdure.stores.mongo.updates import Document, begins_with, later

_EXPIRY = (IndexModel([("expiresAt", 1)], name="expiresAt_ttl", expireAfterSeconds=0),)
# The server removes what has expired about once a minute; until then it is not shown.
_IS_LIVE = {"$or": [{"expiresAt": None}, {"$expr": {"$gt": ["$expiresAt", "$$NOW"]}}]}
_IS_MISSING = {"$lte": ["$value", None]}
_HAS_EXPIRED = {"$and": [{"$gt": ["$expiresAt", None]}, {"$lte": ["$expiresAt", "$$NOW"]}]}


class MongoKeyValue(AsyncCloseable):
    """A `KeyValueStore` with compare-and-set; the server removes what has expired.

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
            target=target_of(url, database, replica_set=False),
            client=client,
            client_options=client_options,
            clock=clock,
            bind=lambda bound: bound.get_collection(name),
            prepare=_prepare,
        )

    async def get(self, key: str, /) -> str | None:
        """Give the text, or None when there is none or its time is over."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Give the text of each key, in order."""
        async with self._connection.use() as texts:
            found = texts.find({"_id": {"$in": [*keys]}, **_IS_LIVE}, {"value": 1})
            values = {text["_id"]: text["value"] async for text in found}
        return [values.get(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` when that is given and else until it is deleted."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "text")
        span = None if ttl is None else parse_duration(ttl, "ttl")
        async with self._connection.use() as texts:
            await _upsert(texts, key, [{"$replaceWith": _text(value, span)}])

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Put `new` where `old` is, in one atomic act; None stands for nothing."""
        if old is None and new is None:
            return not await self.exists(key)
        there = {"_id": key, "value": old, **_IS_LIVE}
        async with self._connection.use() as texts:
            if new is None:
                return (await texts.delete_one(there)).deleted_count == 1
            if old is not None:
                done = await texts.update_one(there, [{"$replaceWith": _text(new, None)}])
                return done.matched_count == 1
            absent = {"$or": [_IS_MISSING, _HAS_EXPIRED]}
            added = {"$replaceWith": {"$cond": [absent, _text(new, None), "$$ROOT"]}}
            return await _upsert(texts, key, [added])

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        async with self._connection.use() as texts:
            return (await texts.delete_one({"_id": key, **_IS_LIVE})).deleted_count == 1

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match; `*` stands for any text, everything else for itself."""
        prefix = pattern.partition("*")[0]
        matching = {"$and": [begins_with(prefix), {"_id": {"$regex": _regex(pattern)}}]}
        async with self._connection.use() as texts:
            found = texts.find({**matching, **_IS_LIVE}, {"_id": 1}).sort("_id")
            return [text["_id"] async for text in found]

    async def close(self) -> None:
        """Close the client if it is the store's own."""
        await self._connection.close()


async def _prepare(texts: Collection) -> None:
    await create_indexes(texts, _EXPIRY)


def _text(value: str, ttl: timedelta | None) -> Document:
    text: Document = {"_id": "$_id", "value": {"$literal": value}, "updatedAt": "$$NOW"}
    if ttl is not None:
        text["expiresAt"] = later(ttl)
    return text


async def _upsert(texts: Collection, key: str, update: list[Document]) -> bool:
    """Change a document or make it; tell whether it is another one now."""
    while True:
        try:
            done = await texts.update_one({"_id": key}, update, upsert=True)
        except DuplicateKeyError:
            # Somebody else made it at the same moment: now there is one to change.
            continue
        return done.upserted_id is not None or done.modified_count == 1


def _regex(pattern: str) -> str:
    """Give the pattern as the server's regular expression, which takes no NUL as it is."""
    parts = (re.escape(part).replace("\0", r"\x00") for part in pattern.split("*"))
    return r"(?s)\A" + ".*".join(parts) + r"\z"
