"""Send messages in one write: they are embedded in the run's own document.

The write that counts messages and wakes their run also stores them. So sending costs one durable
write instead of two, and a process that claims the run reads its messages with it.

Only messages without a dedup id are embedded: a dedup id must be recognized even after its message
was consumed, which needs a document that remains. Messages have documents too if they are large,
or if the run already contains several that it has not consumed, because every write of a run writes
its whole document.

If the reply is lost, the sender does not know whether its messages were sent, as with every message
without a dedup id.
"""

from collections.abc import Sequence
from typing import Any

from bson.objectid import ObjectId

from perdure.store import Delivery, NewMessage, Receipt
from perdure.stores.mongo.inbox import unconsumed_count
from perdure.stores.mongo.journal import EMBEDDED
from perdure.stores.mongo.schema import Collections, update_once
from perdure.stores.mongo.updates import (
    HEADER,
    MESSAGE_COUNT,
    OVER,
    STATUS_FIELDS,
    Document,
    wake_if_awaited,
)

MAX_EMBEDDED = 8
_MAX_SIZE = 4096

# What a sender needs to know about a run.
FIELDS = {**HEADER, **STATUS_FIELDS}

_INCARNATION = {"$ifNull": [{"$toString": "$incarnation"}, "0"]}
_NEWEST = {"$ifNull": ["$newest", []]}
_EMBEDDED_COUNT = {"$ifNull": ["$embeddedCount", 0]}


async def embed(
    db: Collections,
    prefix: str,
    messages: Sequence[NewMessage],
    stages: Sequence[Document] = (),
    fields: Document | None = FIELDS,
) -> tuple[list[Receipt], Any]:
    """Embed embeddable messages in their run, all or none, after other stages of the update.

    Return their receipts, or none, and these fields of the run, or `None` if there is no run.
    """
    names = [f".{EMBEDDED}{ObjectId()}" for _ in messages]
    update = [*stages, _embed_if_possible(names, messages)]
    run = await update_once(db.runs, {"_id": prefix + messages[0].to}, update, fields)
    return _receipts(run, names), run


def are_embeddable(messages: Sequence[NewMessage]) -> bool:
    """Return whether these are a few small messages without dedup ids for one run."""
    to = messages[0].to
    return len(messages) <= MAX_EMBEDDED and all(
        each.to == to and each.dedup_id is None and len(each.payload) <= _MAX_SIZE
        for each in messages
    )


def has_room(count: int) -> Document:
    """Return the expression for whether a run is not over and has room for so many messages.

    A run that awaitly wrote has no status.
    """
    is_open = {"$not": [{"$in": [{"$ifNull": ["$status", OVER[0]]}, OVER]}]}
    embedded_count = {"$size": {"$ifNull": ["$newest.payload", []]}}
    return {"$and": [is_open, {"$lte": [embedded_count, MAX_EMBEDDED - count]}]}


def _embed_if_possible(names: Sequence[str], messages: Sequence[NewMessage]) -> Document:
    """Return the stage that embeds messages in a run that is not over and has room for them."""
    new = [
        _new_message(name, position, message)
        for position, (name, message) in enumerate(zip(names, messages, strict=True), 1)
    ]
    fields = {
        "newest": {"$concatArrays": [_NEWEST, new]},
        "messageCount": {"$add": [MESSAGE_COUNT, len(new)]},
        "embeddedCount": {"$add": [_EMBEDDED_COUNT, len(new)]},
        **wake_if_awaited({"$literal": [message.name for message in messages]}),
    }
    embedded = {"$mergeObjects": ["$$ROOT", fields]}
    return {"$replaceWith": {"$cond": [has_room(len(messages)), embedded, "$$ROOT"]}}


def _new_message(name: str, position: int, message: NewMessage) -> Document:
    return {
        # Only the server knows which incarnation of the run it is.
        "name": {"$concat": [_INCARNATION, name]},
        "number": {"$add": [MESSAGE_COUNT, position]},
        "at": "$$NOW",
        "event": {"$literal": message.name},
        "payload": {"$literal": message.payload},
    }


def _receipts(run: Any, names: Sequence[str]) -> list[Receipt]:
    """Return the receipts of the messages with these names, or none if they were not embedded."""
    if run is None:
        return []
    if not any(each["name"].endswith(names[-1]) for each in run.get("newest", ())):
        return []
    # These messages are the last of all that were sent.
    total = unconsumed_count(run)
    return [
        Receipt(Delivery.DELIVERED, max(1, total - following))
        for following in reversed(range(len(names)))
    ]
