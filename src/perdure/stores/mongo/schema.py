"""The collections of the store, their indexes, and writes that many modules share."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from bson.codec_options import CodecOptions, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import IndexModel, ReturnDocument
from pymongo.errors import BulkWriteError, DuplicateKeyError, WriteConcernError, WriteError

from perdure.stores.mongo.connection import Client, Collection, Database
from perdure.stores.mongo.documents import AS_PLAIN_INTEGERS
from perdure.stores.mongo.errors import DUPLICATE_KEY
from perdure.stores.mongo.updates import HAS_WAKE_TIME, Pipeline

T = TypeVar("T")

# A command is one document, and a document has at most 16 MiB.
MAX_COMMAND_SIZE = 8 * 1024 * 1024
# The server plans the parts of a union one by one, and allows a limited number of stages.
_MAX_UNION = 100

# Runs are read as raw documents, so that a snapshot is decoded only once.
RAW_CODEC: CodecOptions[Any] = CodecOptions(
    document_class=RawBSONDocument, tz_aware=True, type_registry=TypeRegistry(AS_PLAIN_INTEGERS)
)

DUE_INDEX, STATUS_INDEX = "perdure_wakeAt", "perdure_workflow"
UPDATE_INDEX, TAG_INDEX = "perdure_updatedAt", "perdure_tags"
RUN_INDEXES = (
    IndexModel([("updatedAt", -1), ("_id", -1)], name=UPDATE_INDEX),
    IndexModel([("workflow", 1), ("status", 1), ("updatedAt", -1), ("_id", -1)], name=STATUS_INDEX),
    # By queue and workflow first, so that due runs that are not asked for are never examined.
    IndexModel(
        [("queue", 1), ("workflow", 1), ("wakeAt", 1), ("turn", 1), ("version", 1), ("_id", 1)],
        name=DUE_INDEX,
        partialFilterExpression={"wakeAt": HAS_WAKE_TIME},
    ),
    IndexModel(
        [("tags", 1), ("createdAt", -1), ("_id", -1)],
        name=TAG_INDEX,
        partialFilterExpression={"tags": {"$exists": True}},
    ),
)
JOURNAL_INDEXES = (
    IndexModel(
        [("expireAt", 1)],
        name="perdure_expireAt",
        expireAfterSeconds=0,
        partialFilterExpression={"expireAt": {"$type": "date"}},
    ),
)
INBOX_INDEXES = (
    IndexModel(
        [("run", 1), ("number", 1)],
        name="perdure_unconsumed",
        partialFilterExpression={"consumed": False},
    ),
)


class Collections(NamedTuple):
    """The collections of one store."""

    client: Client
    database: Database
    runs: Collection
    journal: Collection
    inbox: Collection
    layout: Collection


def collections_of(database: Database, name: str) -> Collections:
    """Return the collections whose names start with `name`."""
    return Collections(
        database.client,
        database,
        database.get_collection(name, codec_options=RAW_CODEC),
        database.get_collection(f"{name}_journal"),
        database.get_collection(f"{name}_inbox"),
        database.get_collection(f"{name}_layout"),
    )


async def gather_all(works: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results; an error is raised only after all others have ended."""
    if len(works) == 1:
        return [await works[0]]
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


async def aggregate_all(collection: Collection, pipelines: Sequence[Pipeline]) -> list[Any]:
    """Return the results of all pipelines, up to a hundred per round trip."""
    parts = [
        pipelines[start : start + _MAX_UNION] for start in range(0, len(pipelines), _MAX_UNION)
    ]
    results = await gather_all([_aggregate_union(collection, part) for part in parts])
    return [document for part in results for document in part]


async def _aggregate_union(collection: Collection, pipelines: Sequence[Pipeline]) -> list[Any]:
    first, *others = pipelines
    unions = [
        {"$unionWith": {"coll": collection.name, "pipeline": pipeline}} for pipeline in others
    ]
    return await (await collection.aggregate([*first, *unions])).to_list()


async def find_and_update(
    collection: Collection,
    id: str,
    update: Sequence[Mapping[str, Any]],
    *,
    projection: Mapping[str, Any] | None = None,
    upsert: bool = True,
    return_document: bool = ReturnDocument.AFTER,
) -> Any:
    """Update one document, inserting it with `upsert` if it does not exist, and return it."""
    while True:
        try:
            return await collection.find_one_and_update(
                {"_id": id},
                update,
                projection=projection,
                upsert=upsert,
                return_document=return_document,
            )
        except DuplicateKeyError:
            # Another process inserted the document at the same time, so now it can be updated.
            continue


async def update_once(
    collection: Collection,
    condition: Mapping[str, Any],
    update: Sequence[Mapping[str, Any]],
    projection: Mapping[str, Any] | None = None,
) -> Any:
    """Update one document and return it, or `None` if there is none.

    A plain command, as in `insert`: for retries by the driver, the server would also store the
    returned document.
    """
    command = {
        "findAndModify": collection.name,
        "query": condition,
        "update": update,
        "new": True,
        "writeConcern": collection.write_concern.document,
    }
    if projection is not None:
        command["fields"] = projection
    reply = await collection.database.command(command, codec_options=collection.codec_options)
    _check_concern(reply)
    return reply["value"]


def _check_concern(reply: Mapping[str, Any]) -> None:
    """Raise if a write was made but is not durable enough."""
    if (concern := reply.get("writeConcernError")) is not None:
        raise WriteConcernError(concern.get("errmsg", ""), concern.get("code"), concern)


async def insert(
    collection: Collection, documents: Sequence[Mapping[str, Any]], size: int = 0
) -> set[int]:
    """Insert documents in one round trip; return the indexes of those whose `_id` existed.

    `size` is their approximate size in bytes; if it exceeds a command, several round trips are
    made.

    A plain command has no transaction number, which the driver adds for its own retries and which
    the server would have to store beside the documents. The callers find out themselves whether an
    insert with a lost reply took place.
    """
    if size > MAX_COMMAND_SIZE:
        return await _insert_in_parts(collection, documents)
    reply = await collection.database.command(
        {
            "insert": collection.name,
            "documents": documents,
            "ordered": False,
            "writeConcern": collection.write_concern.document,
        }
    )
    _check_concern(reply)
    return _duplicates(reply.get("writeErrors", ()))


async def _insert_in_parts(
    collection: Collection, documents: Sequence[Mapping[str, Any]]
) -> set[int]:
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        if concerns := error.details.get("writeConcernErrors"):
            raise WriteConcernError(concerns[0].get("errmsg", "")) from error
        return _duplicates(error.details["writeErrors"])
    return set()


def _duplicates(errors: Sequence[Mapping[str, Any]]) -> set[int]:
    for error in errors:
        if error["code"] != DUPLICATE_KEY:
            raise WriteError(error.get("errmsg", ""), error["code"], error)
    return {error["index"] for error in errors}
