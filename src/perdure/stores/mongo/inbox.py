"""Messages for a run, each a document of its own until an entry consumes it.

Consuming is part of the entry's own write: a message is consumed when an entry that counts names
it. The mark on the message is written after that and only saves reading; after a crash in between,
the run's next owner writes it.

Sending writes the message first and increments the run's message count second. A run that settles
on an event does so only if the count is still the one its owner knows. So either the rest comes
first, and the sender finds the suspended run and wakes it; or the count does, and the owner looks
in the inbox before it settles the run.

Whether the run is over is checked before the message is written. If the run ends in between, the
message counts as sent before the end, and stays: another sender of the same message may have been
told that it is a duplicate, and a run that is retried finds it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bson.objectid import ObjectId
from pymongo.errors import PyMongoError

from perdure.snapshot import is_over
from perdure.store import Delivery, Message
from perdure.stores.mongo.connection import relaxed
from perdure.stores.mongo.documents import MAX_DOCUMENT_SIZE, pack, unpack
from perdure.stores.mongo.errors import is_connection_lost
from perdure.stores.mongo.journal import consumed_messages, read_logs
from perdure.stores.mongo.schema import Collections, find_and_update, update_once
from perdure.stores.mongo.updates import (
    HEADER,
    STATUS_FIELDS,
    count_message,
    incarnation_of,
    status_of,
)

_WITH_DEDUP_ID, _WITHOUT_DEDUP_ID = "d", "m"


def messages_of(run: str, incarnation: str) -> dict[str, str]:
    """Match all messages for a run, consumed or not."""
    return {"$gte": f"{run}\0{incarnation}.", "$lt": f"{run}\0{incarnation}/"}


async def send(
    db: Collections, key: str, name: str, payload: bytes, dedup_id: str | None
) -> Delivery:
    """Put a message in a run's inbox, and wake the run if it awaits it."""
    run = await db.runs.find_one({"_id": key}, {**STATUS_FIELDS, "incarnation": 1})
    if run is None:
        return Delivery.UNKNOWN
    order = ObjectId()
    suffix = f"{_WITHOUT_DEDUP_ID}{order}" if dedup_id is None else f"{_WITH_DEDUP_ID}{dedup_id}"
    id = f"{key}\0{incarnation_of(run)}.{suffix}"
    if is_over(status_of(run)) and not await db.inbox.find_one({"_id": id}, {"_id": 1}):
        return Delivery.OVER
    message = await _put(db, id, key, name, payload, order)
    if not message["consumed"]:
        # A duplicate wakes the run, too: the first sender may have died before it did.
        same_run = {"_id": key, "incarnation": run.get("incarnation")}
        if not await _count(db, same_run, message["name"]):
            # The run was deleted in the meantime, and its inbox with it.
            await db.inbox.delete_one({"_id": id})
            return Delivery.UNKNOWN
    return Delivery.DELIVERED if message["order"] == order else Delivery.DUPLICATE


async def _put(
    db: Collections, id: str, key: str, name: str, payload: bytes, order: ObjectId
) -> Mapping[str, Any]:
    """Insert a message unless its id exists; return the message of that id."""
    message: dict[str, Any] = {"run": key, "name": name, "order": order, "consumed": False}
    if len(payload) > MAX_DOCUMENT_SIZE:
        message["packed"] = pack(payload, f"the event {name!r} for run {key!r}")
    else:
        message["payload"] = payload
    new = {"$mergeObjects": ["$$ROOT", {"$literal": message}, {"sentAt": "$$NOW"}]}
    exists = {"$eq": [{"$type": "$run"}, "string"]}
    update = [{"$replaceWith": {"$cond": [exists, "$$ROOT", new]}}]
    projection = {"name": 1, "order": 1, "consumed": 1}
    stored: Mapping[str, Any] = await find_and_update(db.inbox, id, update, projection=projection)
    return stored


async def _count(db: Collections, same_run: Mapping[str, Any], name: str) -> bool:
    """Count a message, and wake the run if it awaits it; return whether the run exists."""
    update = count_message(name)
    try:
        run = await update_once(db.runs, same_run, update, {"_id": 1})
    except PyMongoError as error:
        if not is_connection_lost(error):
            raise
        # Counted twice, a message only makes the owner look into the inbox once more.
        run = await update_once(db.runs, same_run, update, {"_id": 1})
    return run is not None


async def unconsumed(db: Collections, runs: Mapping[str, str]) -> dict[str, list[Message]]:
    """Return the messages not marked as consumed, for runs given by key and incarnation."""
    messages: dict[str, list[Message]] = {run: [] for run in runs}
    if runs:
        found = db.inbox.find({"run": {"$in": [*runs]}, "consumed": False})
        async for document in found.sort([("sentAt", 1), ("order", 1)]):
            run, _, id = document["_id"].partition("\0")
            if id.startswith(f"{runs[run]}."):
                messages[run].append(_message(id, document))
    return messages


async def runs_with_messages(
    db: Collections, runs: Mapping[str, str], consumed: Collection[str]
) -> set[str]:
    """Return those of the runs, given by key and incarnation, that have unconsumed messages.

    `consumed` are the ids of messages that are known to be consumed, although not marked yet.
    """
    if not runs:
        return set()
    found = db.inbox.find({"run": {"$in": [*runs]}, "consumed": False}, {"_id": 1})
    parts = [document["_id"].partition("\0") async for document in found]
    return {run for run, _, id in parts if id.startswith(f"{runs[run]}.") and id not in consumed}


async def inbox(db: Collections, key: str) -> list[Message]:
    """Return a run's messages that were not consumed."""
    # Messages before entries: what is consumed in between is found among the entries.
    run = await db.runs.find_one({"_id": key}, {"incarnation": 1})
    if run is None:
        return []
    messages = (await unconsumed(db, {key: incarnation_of(run)}))[key]
    run = await db.runs.find_one({"_id": key}, HEADER) if messages else None
    if run is None:
        return []
    logs = await read_logs(db, {key: run.get("epochs", ())})
    consumed = consumed_messages(run, logs[key])
    return [message for message in messages if message.id not in consumed]


async def has_awaited_message(
    db: Collections, key: str, incarnation: str, consumed: Collection[str], awaits: Sequence[str]
) -> bool:
    """Return whether the inbox has a message of an awaited name that was not consumed."""
    messages = (await unconsumed(db, {key: incarnation}))[key]
    return is_awaited({message.id: message.name for message in messages}, consumed, awaits)


def is_awaited(
    messages: Mapping[str, str], consumed: Collection[str], awaits: Sequence[str]
) -> bool:
    """Return whether one of the messages, names by id, is awaited and not consumed."""
    return any(name in awaits and id not in consumed for id, name in messages.items())


def message_keys(run: str, ids: Iterable[str]) -> list[str]:
    """Return the `_id` of a run's messages."""
    return [f"{run}\0{id}" for id in ids]


async def mark_consumed(db: Collections, keys: Sequence[str]) -> None:
    """Mark messages as consumed; one with a dedup id stays, to recognize its duplicates."""
    to_keep = [key for key in keys if _has_dedup_id(key)]
    to_delete = [key for key in keys if not _has_dedup_id(key)]
    inbox = relaxed(db.inbox)
    if to_keep:
        emptied = {"$set": {"consumed": True}, "$unset": {"payload": "", "packed": ""}}
        await inbox.update_many({"_id": {"$in": to_keep}}, emptied)
    if to_delete:
        await inbox.delete_many({"_id": {"$in": to_delete}})


def _has_dedup_id(key: str) -> bool:
    return key.partition("\0")[2].partition(".")[2].startswith(_WITH_DEDUP_ID)


def _message(id: str, document: Mapping[str, Any]) -> Message:
    packed = document.get("packed")
    payload = document["payload"] if packed is None else unpack(packed)
    return Message(id, document["name"], payload, document["sentAt"])
