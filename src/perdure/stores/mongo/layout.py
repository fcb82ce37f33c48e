"""The layout of the database: created if it is new, and upgraded from older versions.

Each step of an upgrade can be repeated, and several processes may perform it at once. The number of
the layout is written last, so that after a crash, another process repeats all steps. A database
with a higher number belongs to a newer version and is refused.

Layout 1 has no number. Versions that know only layout 1 refuse later ones, because their index of
due runs has the same name as theirs but other fields. Layout 3 differs from layout 2 only in that
runs can contain messages.
"""

from collections.abc import Mapping, Sequence

from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from perdure.stores._layout import check_layout
from perdure.stores.mongo.connection import Collection, create_indexes
from perdure.stores.mongo.errors import INDEX_NOT_FOUND, NAMESPACE_NOT_FOUND, UNAUTHORIZED
from perdure.stores.mongo.schema import (
    DUE_INDEX,
    INBOX_INDEXES,
    JOURNAL_INDEXES,
    RUN_INDEXES,
    Collections,
)
from perdure.stores.mongo.updates import HAS_WAKE_TIME, Pipeline

LAYOUT = 3
_WITH_QUEUES = 2
_ID = "layout"
_BATCH_SIZE = 1_000
# The indexes of layout 1 that layout 2 replaces.
_OLD_RUN_INDEXES = (
    {"status": 1, "updatedAt": -1, "_id": -1},
    {"workflow": 1, "wakeAt": 1, "_id": 1},
)
_OLD_INBOX_INDEX = {"run": 1, "sentAt": 1, "order": 1}


async def prepare(db: Collections) -> None:
    """Create collections and indexes, or upgrade them; several processes may do so at once."""
    stored_layout = await db.layout.find_one({"_id": _ID})
    number = 1 if stored_layout is None else stored_layout["number"]
    check_layout(f"collection {db.runs.name}", number, LAYOUT, alternative="collection")
    if number < _WITH_QUEUES:
        await _drop_old_indexes(db)
    await create_indexes(db.runs, RUN_INDEXES)
    await create_indexes(db.journal, JOURNAL_INDEXES)
    await create_indexes(db.inbox, INBOX_INDEXES)
    await _upgrade(db, number)


async def _drop_old_indexes(db: Collections) -> None:
    for keys in _OLD_RUN_INDEXES:
        await _drop_index(db.runs, keys)
    await _drop_index(db.inbox, _OLD_INBOX_INDEX)


async def _drop_index(collection: Collection, keys: Mapping[str, int]) -> None:
    # Found by its fields, not its name: another process may already have created the new one.
    try:
        await collection.database.command("dropIndexes", collection.name, index=keys)
    except OperationFailure as error:
        if error.code not in (INDEX_NOT_FOUND, NAMESPACE_NOT_FOUND, UNAUTHORIZED):
            raise


async def _upgrade(db: Collections, number: int) -> None:
    try:
        await _add_queues(db)
        if number < _WITH_QUEUES:
            await _count_messages(db)
        if number < LAYOUT:
            await db.layout.update_one({"_id": _ID}, {"$max": {"number": LAYOUT}}, upsert=True)
    except OperationFailure as error:
        # A read-only user can use a database that others upgrade.
        if error.code != UNAUTHORIZED:
            raise


async def _add_queues(db: Collections) -> None:
    """Set the queue of runs without one to "", because the index of due runs starts with it.

    This is done whenever a store is opened: processes of the older version may have created runs
    after the upgrade.
    """
    without = {"queue": None, "wakeAt": HAS_WAKE_TIME}
    update = {"$set": {"queue": "", "version": 0, "turn": 0}}
    await db.runs.update_many(without, update, hint=DUE_INDEX)


async def _count_messages(db: Collections) -> None:
    """Count messages that are not in an inbox as consumed."""
    condition = {"messageCount": {"$gt": 0}, "consumedCount": None}
    is_old = {"consumed": False, "number": None, "sentAt": {"$exists": True}}
    counting: Pipeline = [{"$match": is_old}, {"$group": {"_id": "$run", "count": {"$sum": 1}}}]
    writes = [
        UpdateOne(
            {"_id": group["_id"], **condition},
            [{"$set": {"consumedCount": {"$subtract": ["$messageCount", group["count"]]}}}],
        )
        async for group in await db.inbox.aggregate(counting)
    ]
    await _write_all(db.runs, writes)
    await db.runs.update_many(condition, [{"$set": {"consumedCount": "$messageCount"}}])


async def _write_all(collection: Collection, writes: Sequence[UpdateOne]) -> None:
    for start in range(0, len(writes), _BATCH_SIZE):
        await collection.bulk_write(writes[start : start + _BATCH_SIZE], ordered=False)
