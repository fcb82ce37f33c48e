"""The collections of the runs: their documents, indexes, and how many are inserted at once."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from bson.codec_options import CodecOptions, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import IndexModel
from pymongo.errors import BulkWriteError, WriteConcernError, WriteError

from perdure.stores.mongo.connection import Client, Collection, Database, create_indexes
from perdure.stores.mongo.documents import AS_PLAIN_INTEGERS
from perdure.stores.mongo.errors import DUPLICATE

T = TypeVar("T")

# One command is one document, which has 16 MiB.
COMMAND_ROOM = 8 * 1024 * 1024

_RAW: CodecOptions[Any] = CodecOptions(
    document_class=RawBSONDocument, tz_aware=True, type_registry=TypeRegistry(AS_PLAIN_INTEGERS)
)

WAKE_INDEX = "perdure_wakeAt"
RUN_INDEXES = (
    IndexModel([("updatedAt", -1), ("_id", -1)], name="perdure_updatedAt"),
    IndexModel([("status", 1), ("updatedAt", -1), ("_id", -1)], name="perdure_status"),
    # By workflow first: a crowd of due runs that nobody here works on is not looked at.
    IndexModel(
        [("workflow", 1), ("wakeAt", 1), ("_id", 1)],
        name=WAKE_INDEX,
        partialFilterExpression={"wakeAt": {"$type": "date"}},
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
        [("run", 1), ("sentAt", 1), ("order", 1)],
        name="perdure_untaken",
        partialFilterExpression={"taken": False},
    ),
)


class Collections(NamedTuple):
    """What a verb works with. `runs` gives raw documents, so that a snapshot is decoded once."""

    client: Client
    database: Database
    runs: Collection
    journal: Collection
    inbox: Collection


def collections_of(database: Database, name: str) -> Collections:
    """Give the collections whose names begin with this one."""
    return Collections(
        database.client,
        database,
        database.get_collection(name, codec_options=_RAW),
        database.get_collection(f"{name}_journal"),
        database.get_collection(f"{name}_inbox"),
    )


async def prepare(db: Collections) -> None:
    """Create collections and indexes; it does no harm when others do so at the same moment."""
    await create_indexes(db.runs, RUN_INDEXES)
    await create_indexes(db.journal, JOURNAL_INDEXES)
    await create_indexes(db.inbox, INBOX_INDEXES)


async def together(works: Sequence[Awaitable[T]]) -> list[T]:
    """Give what all give; an error of one comes out when the others have ended, too."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("list[T]", done)


async def insert(
    collection: Collection, documents: Sequence[Mapping[str, Any]], weight: int = 0
) -> set[int]:
    """Insert documents in one round trip; give the places of those whose `_id` was there already.

    `weight` is about how many bytes they have; very many are more than one round trip takes.

    As a bare command it carries no number for the driver's retries, which the server would have to
    write down beside the documents. Who inserts here finds out itself what a lost answer meant.
    """
    if weight > COMMAND_ROOM:
        return await _insert_apart(collection, documents)
    answer = await collection.database.command(
        {
            "insert": collection.name,
            "documents": documents,
            "ordered": False,
            "writeConcern": collection.write_concern.document,
        }
    )
    if (concern := answer.get("writeConcernError")) is not None:
        raise WriteConcernError(concern.get("errmsg", ""), concern.get("code"), concern)
    return _duplicates(answer.get("writeErrors", ()))


async def _insert_apart(collection: Collection, documents: Sequence[Mapping[str, Any]]) -> set[int]:
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        if concerns := error.details.get("writeConcernErrors"):
            raise WriteConcernError(concerns[0].get("errmsg", "")) from error
        return _duplicates(error.details["writeErrors"])
    return set()


def _duplicates(errors: Sequence[Mapping[str, Any]]) -> set[int]:
    for error in errors:
        if error["code"] != DUPLICATE:
            raise WriteError(error.get("errmsg", ""), error["code"], error)
    return {error["index"] for error in errors}
