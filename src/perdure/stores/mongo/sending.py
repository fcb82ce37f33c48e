"""Send messages: they are written first, and then counted by one write to the run's document.

That write decides everything at once: it gives messages their numbers, finds out whether the run
still exists and is not over, and wakes a run that awaits them. A few small messages are part of
that write and have no documents (see `embedding`). Messages of a sender that was killed before this
write do not count; another sender of the same message completes it. A run that waits for an event
is settled only if the number of its messages is still the one that its owner knows. So either the
rest comes first, and the sender wakes the run; or the message does, and the owner checks the inbox
before it settles the run.

A sender that completes another sender's message with a different payload counts it for that other
sender: of all senders that use a dedup id, the one whose payload counts is told that its message
was delivered.

The run's document contains only the numbers of its newest messages. If there are many, a sender
writes the numbers into the messages, and then removes them from the run.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bson.objectid import ObjectId
from pymongo import UpdateOne
from pymongo.errors import PyMongoError

from perdure.snapshot import is_over
from perdure.store import Delivery, NewMessage, Receipt
from perdure.stores.mongo.documents import MAX_DOCUMENT_SIZE, pack
from perdure.stores.mongo.embedding import FIELDS, are_embeddable, embed
from perdure.stores.mongo.errors import is_connection_lost
from perdure.stores.mongo.inbox import (
    WITH_DEDUP_ID,
    WITHOUT_DEDUP_ID,
    name_of,
    payload_of,
    unconsumed_count,
)
from perdure.stores.mongo.schema import Collections, insert, update_once
from perdure.stores.mongo.updates import (
    MESSAGE_COUNT,
    OVER,
    Document,
    Pipeline,
    by_id,
    equals,
    incarnation_of,
    status_of,
    wake_if_awaited,
)

T = TypeVar("T")

_MAX_NEWEST = 50
# Limited, because for each run, the server searches the list of all runs of the statement.
_MAX_RUNS = 500
# All may be for one run, whose document must hold their numbers.
_MAX_MESSAGES = 5_000


@dataclass(slots=True)
class _Outgoing:
    """A message to send; `index` is its position in the call, `name` that of its document."""

    index: int
    message: NewMessage
    order: ObjectId = field(default_factory=ObjectId)
    name: str = ""

    @property
    def suffix(self) -> str:
        """What distinguishes the message from others for its run."""
        dedup_id = self.message.dedup_id
        return (
            f"{WITHOUT_DEDUP_ID}{self.order}" if dedup_id is None else f"{WITH_DEDUP_ID}{dedup_id}"
        )

    def document(self, key: str) -> Document:
        """Return the message's document, which does not count yet."""
        message = self.message
        document: Document = {"_id": f"{key}\0{self.name}", "run": key, "name": message.name}
        document |= {"order": self.order, "consumed": False}
        if len(message.payload) > MAX_DOCUMENT_SIZE:
            what = f"the event {message.name!r} for run {message.to!r}"
            document["packed"] = pack(message.payload, what)
        else:
            document["payload"] = message.payload
        return document


@dataclass(slots=True)
class _Batch:
    """The messages of a call to one run.

    `counted_names` are the names of messages that already count, `events` the names and events of
    those that do not. `inserted_ids` are the `_id`s of messages that this call wrote, `others` the
    names of messages that another call wrote with another payload, with the `order` by which that
    call recognizes them. `moved` are the numbers of messages that this call counted, if they are no
    longer in the run; 0 if the message was consumed.
    """

    key: str
    messages: list[_Outgoing] = field(default_factory=list)
    run: Any = None
    counted_names: set[str] = field(default_factory=set)
    events: dict[str, str] = field(default_factory=dict)
    inserted_ids: set[str] = field(default_factory=set)
    others: dict[str, ObjectId] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    attempt: ObjectId = field(default_factory=ObjectId)

    @property
    def senders(self) -> set[ObjectId]:
        """By what this call recognizes messages that were counted for it."""
        # By their `order`, if another sender completed what this one wrote.
        return {self.attempt, *(each.order for each in self.messages)}

    def read(self, run: Any) -> None:
        """Start with the run as it is now."""
        self.run, self.events, self.others = run, {}, {}
        self.counted_names = {each["name"] for each in run.get("newest", ())}
        for each in self.messages:
            each.name = f"{incarnation_of(run)}.{each.suffix}"

    def uncounted_messages(self) -> list[Document]:
        """Return the messages that do not count yet, in the order of the call."""
        names = dict.fromkeys(each.name for each in self.messages if each.name in self.events)
        return [
            {"name": name, "event": self.events[name], "by": self.others.get(name, self.attempt)}
            for name in names
        ]

    def unresolved_messages(self) -> list[_Outgoing]:
        """Return the messages that may or may not count."""
        return [
            each
            for each in self.messages
            if each.name not in self.counted_names | self.events.keys()
        ]


async def send(db: Collections, prefix: str, messages: Sequence[NewMessage]) -> list[Receipt]:
    """Put messages in the inboxes of runs, and wake the runs that await them."""
    if not are_embeddable(messages):
        return await send_documents(db, prefix, messages)
    receipts, run = await embed(db, prefix, messages)
    return receipts or await send_documents(db, prefix, messages, run)


async def send_documents(
    db: Collections, prefix: str, messages: Sequence[NewMessage], run: Any = None
) -> list[Receipt]:
    """Send messages that are not embedded; `run` is what was read of the run of all of them."""
    runs = {} if run is None else {run["_id"]: run}
    receipts: dict[int, Receipt] = {}
    for start in range(0, len(messages), _MAX_MESSAGES):
        remaining = _batches(prefix, messages[start : start + _MAX_MESSAGES], start)
        while remaining:
            runs = runs or await _find_runs(db, remaining)
            remaining = await _send(db, remaining, runs, receipts)
            runs = {}
    return [receipts[index] for index in range(len(messages))]


def _batches(prefix: str, messages: Sequence[NewMessage], start: int) -> list[_Batch]:
    """Return the messages of each run, whose positions in the call begin with `start`."""
    batches: dict[str, _Batch] = {}
    for index, message in enumerate(messages, start):
        key = prefix + message.to
        batches.setdefault(key, _Batch(key)).messages.append(_Outgoing(index, message))
    return [batches[key] for key in sorted(batches)]


async def _send(
    db: Collections,
    batches: Sequence[_Batch],
    runs: Mapping[str, Any],
    receipts: dict[int, Receipt],
) -> list[_Batch]:
    """Send the messages; return the batches of runs that were changed in the meantime."""
    present: list[_Batch] = []
    for batch in batches:
        if _is_same_run(batch, runs.get(batch.key)):
            # Read before the messages: one without a number that its run does not know did not
            # count.
            batch.read(runs[batch.key])
            present.append(batch)
        else:
            receipts.update(await _withdraw(db, batch))
    await _insert(db, present)
    await _look_up(db, present)
    updated_runs = await _count_all(db, [batch for batch in present if batch.events])
    changed_batches: list[_Batch] = []
    for batch in present:
        if batch.events and batch.key not in updated_runs:
            changed_batches.append(batch)
        else:
            receipts.update(_receipts(batch, updated_runs.get(batch.key, batch.run)))
    for run in updated_runs.values():
        newest = [each for each in run["newest"] if "payload" not in each]
        if len(newest) > _MAX_NEWEST:
            await _number_messages(db, run, newest)
    return changed_batches


async def _find_runs(db: Collections, batches: Sequence[_Batch]) -> dict[str, Any]:
    keys = [batch.key for batch in batches]
    cursor = db.runs.find({"_id": {"$in": keys}}, FIELDS, batch_size=len(keys) + 1)
    return {run["_id"]: run async for run in cursor}


def _is_same_run(batch: _Batch, run: Any) -> bool:
    if run is None or batch.run is None:
        return run is not None
    return incarnation_of(batch.run) == incarnation_of(run)


async def _withdraw(db: Collections, batch: _Batch) -> dict[int, Receipt]:
    """Delete the messages: their run was deleted, perhaps in the meantime, with its inbox."""
    if batch.inserted_ids:
        await db.inbox.delete_many({"_id": {"$in": [*batch.inserted_ids]}})
    return {each.index: Receipt(Delivery.UNKNOWN) for each in batch.messages}


async def _insert(db: Collections, batches: Iterable[_Batch]) -> None:
    """Write the messages to runs that are not over."""
    new = [
        (batch, each, each.document(batch.key))
        for batch in batches
        if not is_over(status_of(batch.run))
        for each in batch.unresolved_messages()
    ]
    if not new:
        return
    documents = [document for *_, document in new]
    size = sum(len(each.message.payload) for _, each, _ in new)
    existing = await insert(db.inbox, documents, size)
    for position, (batch, each, document) in enumerate(new):
        if position not in existing:
            batch.events[each.name] = each.message.name
            batch.inserted_ids.add(document["_id"])


async def _look_up(db: Collections, batches: Iterable[_Batch]) -> None:
    """Find messages that another call, or an earlier attempt of this one, wrote."""
    owners = {
        f"{batch.key}\0{each.name}": (batch, each)
        for batch in batches
        for each in reversed(batch.unresolved_messages())
    }
    if not owners:
        return
    async for document in db.inbox.find({"_id": {"$in": [*owners]}}):
        (batch, each), name = owners[document["_id"]], name_of(document)
        if document["consumed"] or "number" in document or "sentAt" in document:
            batch.counted_names.add(name)
        else:
            batch.events[name] = document["name"]
            if (document["name"], payload_of(document)) != (
                each.message.name,
                each.message.payload,
            ):
                batch.others[name] = document["order"]


async def _count_all(db: Collections, batches: Sequence[_Batch]) -> dict[str, Any]:
    """Count the messages of runs that did not change; return these runs as they are afterwards."""
    if len(batches) == 1:
        run = await _repeated(batches, lambda: _count_one(db, batches[0]))
        return {} if run is None else {run["_id"]: run}
    updated_runs: dict[str, Any] = {}
    for start in range(0, len(batches), _MAX_RUNS):
        updated_runs |= await _count_many(db, batches[start : start + _MAX_RUNS])
    return updated_runs


async def _repeated(batches: Sequence[_Batch], write: Callable[[], Awaitable[T]]) -> T:
    """Write again if the reply is lost and every message has a dedup id."""
    try:
        return await write()
    except PyMongoError as error:
        messages = [each.message for batch in batches for each in batch.messages]
        has_dedup_ids = all(message.dedup_id is not None for message in messages)
        if not (has_dedup_ids and is_connection_lost(error)):
            raise
        for batch in batches:
            # A new attempt: messages that the run has counted after all are then duplicates.
            batch.attempt = ObjectId()
        return await write()


async def _count_one(db: Collections, batch: _Batch) -> Any:
    update = count_messages({"$literal": batch.uncounted_messages()})
    return await update_once(db.runs, _are_unchanged([batch]), update, FIELDS)


async def _count_many(db: Collections, batches: Sequence[_Batch]) -> dict[str, Any]:
    """Count by one update, which takes far less time than one for each run."""

    async def write() -> None:
        new = {batch.key: batch.uncounted_messages() for batch in batches}
        await db.runs.update_many(_are_unchanged(batches), count_messages(by_id(new)))

    await _repeated(batches, write)
    runs = await _find_runs(db, batches)
    present = [batch for batch in batches if _is_same_run(batch, runs.get(batch.key))]
    # If numbers moved before the update, it skipped the run. If they moved after it, messages that
    # it counted may be among them.
    unclear = [batch for batch in present if _numbers_moved(batch, runs[batch.key])]
    await _find_moved(db, unclear)
    skipped = {batch.key for batch in unclear if not _has_counted(batch, runs[batch.key])}
    return {batch.key: runs[batch.key] for batch in present if batch.key not in skipped}


def _are_unchanged(batches: Sequence[_Batch]) -> Document:
    """Match the runs of these batches unless they changed since they were read.

    If messages got numbers in the meantime, some of these may be among them.
    """
    runs = {batch.key: batch.run for batch in batches}
    keys = [*runs]
    return {
        "_id": keys[0] if len(keys) == 1 else {"$in": keys},
        "$and": [
            equals(field, {key: run.get(field) for key, run in runs.items()})
            for field in ("incarnation", "numbered")
        ],
    }


def _numbers_moved(batch: _Batch, run: Any) -> bool:
    return bool(run.get("numbered") != batch.run.get("numbered"))


async def _find_moved(db: Collections, batches: Sequence[_Batch]) -> None:
    """Find messages that were counted for these batches, and are no longer in their runs."""
    names = {f"{batch.key}\0{name}": (batch, name) for batch in batches for name in batch.events}
    if not names:
        return
    cursor = db.inbox.find({"_id": {"$in": [*names]}}, {"number": 1, "by": 1})
    documents = {document["_id"]: document async for document in cursor}
    for id, (batch, name) in names.items():
        document = documents.get(id)
        if document is None:
            # Without a dedup id, so this call wrote it, and it was deleted when it was consumed.
            batch.moved[name] = 0
        elif document.get("by") in batch.senders:
            batch.moved[name] = document["number"]


def _has_counted(batch: _Batch, run: Any) -> bool:
    """Return whether the update of this call counted messages of this batch."""
    newest = run.get("newest", ())
    return bool(batch.moved) or any(each.get("by") in batch.senders for each in newest)


def count_messages(messages: Document) -> Pipeline:
    """Return the update that counts messages unless the run is over, and wakes a run.

    `messages` is an expression for a list of them. Each has its `name`, the `event` that may be
    awaited, and `by`, its sender.
    """
    numbered_message = {
        "name": {"$arrayElemAt": ["$new.name", "$$this"]},
        "number": {"$add": [MESSAGE_COUNT, "$$this", 1]},
        "at": "$$NOW",
        "by": {"$arrayElemAt": ["$new.by", "$$this"]},
    }
    new_messages = {"$map": {"input": {"$range": [0, {"$size": "$new"}]}, "in": numbered_message}}
    return [
        {"$set": {"new": {"$cond": [{"$in": ["$status", OVER]}, [], _new_messages(messages)]}}},
        {
            "$set": {
                "newest": {"$concatArrays": [{"$ifNull": ["$newest", []]}, new_messages]},
                "messageCount": {"$add": [MESSAGE_COUNT, {"$size": "$new"}]},
                **wake_if_awaited("$new.event"),
            }
        },
        {"$unset": "new"},
    ]


def _new_messages(messages: Document) -> Document:
    """Return the expression for the messages that the run does not know."""
    known_names = {"$ifNull": ["$newest.name", []]}
    is_new = {"$not": [{"$in": ["$$this.name", known_names]}]}
    return {"$filter": {"input": messages, "cond": is_new}}


def _receipts(batch: _Batch, run: Any) -> dict[int, Receipt]:
    """Return the receipts of messages, by their positions in the call."""
    total, newest = unconsumed_count(run), run.get("newest", ())
    counted_names = batch.counted_names | {each["name"] for each in newest}
    senders = batch.senders
    numbers = {each["name"]: each["number"] for each in newest if each.get("by") in senders}
    numbers |= batch.moved
    count = total - len(numbers)
    receipts: dict[int, Receipt] = {}
    for each in batch.messages:
        if (number := numbers.pop(each.name, None)) is not None:
            count = max(1, total - run["messageCount"] + number)
            receipts[each.index] = Receipt(Delivery.DELIVERED, count)
        elif each.name in counted_names:
            receipts[each.index] = Receipt(Delivery.DUPLICATE, count)
        else:
            receipts[each.index] = Receipt(Delivery.OVER)
    return receipts


async def _number_messages(db: Collections, run: Any, newest: Sequence[Any]) -> None:
    """Write the numbers of a run's newest messages into their documents."""
    writes = [
        UpdateOne(
            {"_id": f"{run['_id']}\0{each['name']}"},
            {"$set": {"number": each["number"], "sentAt": each["at"], "by": each["by"]}},
        )
        for each in newest
    ]
    await db.inbox.bulk_write(writes, ordered=False)
    # Removed only now: until here, the run's document was the only place with the numbers.
    last = newest[-1]["number"]
    same_run = {"_id": run["_id"], "incarnation": run.get("incarnation")}
    numbered = {"number": {"$lte": last}, "payload": {"$exists": False}}
    update = {"$pull": {"newest": numbered}, "$max": {"numbered": last}}
    await db.runs.update_one(same_run, update)
