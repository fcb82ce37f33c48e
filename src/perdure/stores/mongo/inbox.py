"""Messages for a run, each a document or embedded in the run's document until it is consumed.

A message counts once the run's own document has its number (see `sending`), and messages are read
in the order of their numbers. The id of a message starts with its number, so a reader needs only
the id of a message to continue after it.

Consuming is part of the entry's own write: a message is consumed when an entry that counts names
it. The mark on the message is written afterwards, and only saves reads; after a crash in between,
the run's next owner writes it. Only when the mark is as durable as the entry may a rest leave out
the name of the message: if a failover could undo the mark, the message would be there again. An
embedded message (see `embedding`) is removed instead of marked: in the background, and otherwise by
the rest that replaces the entry which consumed it, in the same write.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from bson.objectid import ObjectId

from perdure.errors import InvalidArgument
from perdure.store import INBOX_PAGE, Message
from perdure.stores._checks import message_number
from perdure.stores._timestamps import to_microseconds
from perdure.stores.mongo import connection
from perdure.stores.mongo.documents import unpack
from perdure.stores.mongo.journal import (
    consumed_messages,
    is_embedded,
    message_name,
    read_logs,
)
from perdure.stores.mongo.schema import Collections, gather_all
from perdure.stores.mongo.updates import HEADER, Document, incarnation_of

WITH_DEDUP_ID, WITHOUT_DEDUP_ID = "d", "m"

# Messages of layout 1 have a time instead of a number; they come before all others.
_OLD_NUMBERS = -(10**16)
_NUMBER_FIELDS = {"run": 1, "number": 1, "sentAt": 1, "order": 1}


class Inbox(NamedTuple):
    """What a run's document contains about its messages.

    This is the number of the last one, how many are unconsumed, the numbers and times of the newest
    by name, the embedded messages, and whether others have documents.
    """

    incarnation: str
    last: int
    unconsumed: int
    newest: Mapping[str, tuple[int, datetime]]
    embedded: Sequence[Message]
    has_documents: bool

    @property
    def embedded_names(self) -> set[str]:
        """The names of the embedded messages."""
        return {message_name(each.id) for each in self.embedded}

    def remaining(self, consumed_names: Collection[str]) -> list[Message]:
        """Return the embedded messages without those that are known to be consumed."""
        return [each for each in self.embedded if message_name(each.id) not in consumed_names]


def inbox_of(run: Mapping[str, Any]) -> Inbox:
    """Return what a run's document contains about its messages."""
    newest = {each["name"]: (each["number"], each["at"]) for each in run.get("newest", ())}
    embedded = [_embedded(each) for each in run.get("newest", ()) if "payload" in each]
    last = run.get("messageCount", 0)
    has_documents = last > run.get("embeddedCount", 0)
    return Inbox(incarnation_of(run), last, unconsumed_count(run), newest, embedded, has_documents)


def _embedded(message: Mapping[str, Any]) -> Message:
    id = f"{message['number']}:{message['name']}"
    return Message(id, message["event"], message["payload"], message["at"])


def inboxes_of(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Inbox]:
    """Return the inboxes of the runs, given by key, to which messages were sent."""
    return {key: inbox_of(run) for key, run in runs.items() if run.get("messageCount")}


def unconsumed_count(run: Mapping[str, Any]) -> int:
    """Return how many messages of a run are unconsumed; an estimate that is never too low."""
    consumed_count: int = run.get("consumedCount", 0) + run.get("consumedSince", 0)
    count: int = run.get("messageCount", 0)
    return max(0, count - consumed_count)


def messages_of(run: str, incarnation: str) -> dict[str, str]:
    """Match all messages for a run, consumed or not."""
    return {"$gte": f"{run}\0{incarnation}.", "$lt": f"{run}\0{incarnation}/"}


async def first_messages(db: Collections, inboxes: Mapping[str, Inbox]) -> dict[str, list[Message]]:
    """Return up to a page of the messages not marked as consumed, for runs given by key."""
    large = [key for key, inbox in inboxes.items() if inbox.unconsumed > INBOX_PAGE]
    small: dict[str, list[Any]] = {key: [] for key in inboxes if key not in large}
    pages = await gather_all([_page(db, key, inboxes[key], None, INBOX_PAGE) for key in large])
    if with_documents := [key for key in small if inboxes[key].has_documents]:
        condition = {"run": {"$in": with_documents}, "consumed": False}
        async for document in db.inbox.find(condition):
            small[document["run"]].append(document)
    in_order = {
        key: _in_order(documents, inboxes[key])[:INBOX_PAGE] for key, documents in small.items()
    }
    return in_order | dict(zip(large, pages, strict=True))


async def _page(
    db: Collections, key: str, inbox: Inbox, after: int | None, limit: int | None
) -> list[Message]:
    """Return messages after a number, not marked as consumed, in order."""
    documents = await _documents(db, key, inbox, after, limit) if inbox.has_documents else []
    messages = _in_order(documents, inbox)
    return [each for each in messages if after is None or number_of(each.id) > after][:limit]


async def _documents(
    db: Collections, key: str, inbox: Inbox, after: int | None, limit: int | None
) -> list[Any]:
    number_range: Document = (
        {"$lte": inbox.last} if after is None else {"$gt": after, "$lte": inbox.last}
    )
    mine = {"run": key, "consumed": False}
    # Messages without a number are few; the others follow in the order of the index.
    unnumbered_documents = await db.inbox.find({**mine, "number": None}).to_list()
    cursor = db.inbox.find({**mine, "number": number_range}).sort("number")
    documents = await (cursor if limit is None else cursor.limit(limit)).to_list()
    return [*unnumbered_documents, *documents]


def _in_order(documents: Iterable[Mapping[str, Any]], inbox: Inbox) -> list[Message]:
    """Return the messages of documents and the embedded ones, in the order of their numbers."""
    # A message that gets its number while the index is read may be found twice.
    by_id = {document["_id"]: document for document in documents}
    messages = filter(None, (_message(document, inbox) for document in by_id.values()))
    return sorted([*inbox.embedded, *messages], key=lambda message: number_of(message.id))


async def runs_with_messages(
    db: Collections, inboxes: Mapping[str, Inbox], consumed_names: Collection[str]
) -> set[str]:
    """Return the runs, given by key, that have unconsumed messages.

    `consumed_names` are messages that are known to be consumed but not marked yet.
    """
    runs = {key for key, inbox in inboxes.items() if inbox.remaining(consumed_names)}
    others = [key for key, inbox in inboxes.items() if inbox.has_documents and key not in runs]
    if not others:
        return runs
    cursor = db.inbox.find({"run": {"$in": others}, "consumed": False}, _NUMBER_FIELDS)
    return runs | {
        document["run"]
        async for document in cursor
        if _number(document, inboxes[document["run"]]) is not None
        and name_of(document) not in consumed_names
    }


async def unconsumed_among(
    db: Collections, run: Mapping[str, Any], names: Collection[str]
) -> set[str]:
    """Return which of these names are those of messages of the run that its last rest left.

    Entries after the rest may have consumed them.
    """
    inbox = inbox_of(run)
    found = inbox.embedded_names.intersection(names)
    if inbox.has_documents and (keys := message_keys(run["_id"], names)):
        cursor = db.inbox.find({"_id": {"$in": keys}, "consumed": False}, _NUMBER_FIELDS)
        found |= {
            name_of(document) async for document in cursor if _number(document, inbox) is not None
        }
    return found - consumed_messages(run)


async def inbox(db: Collections, key: str, after: str | None, limit: int | None) -> list[Message]:
    """Return a run's unconsumed messages after the message `after`."""
    last = None if after is None else number_of(after)
    messages: list[Message] = []
    while limit is None or len(messages) < limit:
        # Read messages before entries: a message that is consumed in between is found among the
        # entries.
        run = await db.runs.find_one({"_id": key}, HEADER)
        if run is None or not run.get("messageCount"):
            break
        remaining = None if limit is None else limit - len(messages)
        page = await _page(db, key, inbox_of(run), last, remaining)
        if not page:
            break
        messages += await _without_consumed(db, key, page)
        last = number_of(page[-1].id)
        if remaining is None or len(page) < remaining:
            break
    return messages


async def _without_consumed(
    db: Collections, key: str, messages: Sequence[Message]
) -> list[Message]:
    run = await db.runs.find_one({"_id": key}, HEADER)
    if run is None:
        return []
    logs = await read_logs(db, {key: run.get("epochs", ())})
    consumed_names = consumed_messages(run, logs[key])
    return [message for message in messages if message_name(message.id) not in consumed_names]


async def has_awaited_message(
    db: Collections, key: str, inbox: Inbox, consumed_names: Collection[str], awaits: Sequence[str]
) -> bool:
    """Return whether the inbox has an unconsumed message with an awaited name."""
    if any(message.name in awaits for message in inbox.remaining(consumed_names)):
        return True
    return inbox.has_documents and await _has_awaited_document(
        db, key, inbox, consumed_names, awaits
    )


async def _has_awaited_document(
    db: Collections, key: str, inbox: Inbox, consumed_names: Collection[str], awaits: Sequence[str]
) -> bool:
    condition = {"run": key, "consumed": False, "name": {"$in": [*awaits]}}
    cursor = db.inbox.find(condition, _NUMBER_FIELDS)
    return any(
        [
            _number(document, inbox) is not None and name_of(document) not in consumed_names
            async for document in cursor
        ]
    )


def is_awaited(
    messages: Mapping[str, str], consumed_names: Collection[str], awaits: Sequence[str]
) -> bool:
    """Return whether one of the messages (events by name) is awaited and unconsumed."""
    return any(event in awaits and name not in consumed_names for name, event in messages.items())


def message_keys(run: str, ids: Iterable[str]) -> list[str]:
    """Return the `_id`s of a run's messages, except for embedded ones, which have none."""
    return [f"{run}\0{name}" for name in map(message_name, ids) if not is_embedded(name)]


async def mark_consumed(inbox: connection.Collection, keys: Sequence[str]) -> None:
    """Mark messages as consumed; a message with a dedup id is kept to recognize duplicates."""
    to_keep = [key for key in keys if _has_dedup_id(key)]
    to_delete = [key for key in keys if not _has_dedup_id(key)]
    if to_keep:
        update = {"$set": {"consumed": True}, "$unset": {"payload": "", "packed": ""}}
        await inbox.update_many({"_id": {"$in": to_keep}}, update)
    if to_delete:
        await inbox.delete_many({"_id": {"$in": to_delete}})


async def remove_embedded(runs: connection.Collection, key: str, names: Iterable[str]) -> None:
    """Remove consumed messages from a run's document."""
    if embedded := [*filter(is_embedded, names)]:
        update = {"$pull": {"newest": {"name": {"$in": embedded}}}}
        await runs.update_one({"_id": key}, update)


def number_of(id: str) -> int:
    """Return the number with which the id of a message starts."""
    number, _, name = id.partition(":")
    # Messages of layout 1 have negative numbers.
    magnitude = message_number(number.removeprefix("-")) if name else None
    if magnitude is None:
        raise InvalidArgument("after", id, "the id of a message")
    return -magnitude if number.startswith("-") else magnitude


def name_of(document: Mapping[str, Any]) -> str:
    """Return what distinguishes a message from all others of its run and of earlier runs."""
    name: str = document["_id"].partition("\0")[2]
    return name


def payload_of(document: Mapping[str, Any]) -> bytes:
    """Return the payload of a message that was not consumed."""
    packed = document.get("packed")
    payload: bytes = document["payload"] if packed is None else unpack(packed)
    return payload


def _has_dedup_id(key: str) -> bool:
    return key.partition("\0")[2].partition(".")[2].startswith(WITH_DEDUP_ID)


def _number(document: Mapping[str, Any], inbox: Inbox) -> int | None:
    """Return a message's number, or `None` if it does not count (yet)."""
    name = name_of(document)
    if not name.startswith(f"{inbox.incarnation}."):
        return None
    number: int | None = document.get("number")
    if number is None and name in inbox.newest:
        number = inbox.newest[name][0]
    if number is None and "sentAt" in document:
        return _OLD_NUMBERS + to_microseconds(document["sentAt"]) + _tie(document["order"])
    return None if number is None or number > inbox.last else number


def _tie(order: ObjectId) -> int:
    # The last bytes of an ObjectId are a counter of the process that sent the message.
    return int.from_bytes(order.binary[-3:], "big") % 1000


def _message(document: Mapping[str, Any], inbox: Inbox) -> Message | None:
    number = _number(document, inbox)
    if number is None:
        return None
    name = name_of(document)
    sent_at = document.get("sentAt") or inbox.newest[name][1]
    return Message(f"{number}:{name}", document["name"], payload_of(document), sent_at)
