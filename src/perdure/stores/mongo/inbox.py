"""Events that wait for a run, each a document of its own, until an entry takes them.

Taking is part of the entry's own write: a message is taken when an entry that counts names it. The
mark on the message comes after that write and only saves looking; a crash in between leaves the
mark to the run's next owner.

Sending is in this order: the message, then the run's count of letters. A run that goes to rest on
an event does so only if the count is still what its owner knows. So either the rest comes first,
and the sender finds the run at rest and wakes it; or the count does, and the one who rests looks
into the inbox.

Whether the run is over is decided before the message is written. One that meets the end of its run
counts as sent before it, and stays: another sender of the same event may have been told that it is
there already, and a run that is retried finds it.
"""

from collections.abc import Collection as SizedIterable
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from bson.objectid import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from perdure.snapshot import RunStatus
from perdure.store import Delivery, Message
from perdure.stores.mongo.connection import casual
from perdure.stores.mongo.documents import DOCUMENT_ROOM, pack, unpack
from perdure.stores.mongo.journal import read_logs
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.updates import HEADER, OVER, life_of, waking

_KNOWN, _SINGLE = "d", "m"
_PROGRESS = {
    "born": 1,
    "status": 1,
    "snapshot.execution.status": 1,
    "snapshot.execution.state": 1,
}


def mail_of(run: str, life: str) -> dict[str, str]:
    """Match all messages for a run, taken or not."""
    return {"$gte": f"{run}\0{life}.", "$lt": f"{run}\0{life}/"}


def status_of(run: Mapping[str, Any]) -> RunStatus:
    """Give a run's status, from its snapshot when it has no header of ours."""
    if (status := run.get("status")) is not None:
        return status  # type: ignore[no-any-return]  # nobody else writes it
    execution: Mapping[str, Any] = run.get("snapshot", {}).get("execution", {})
    return execution.get("state") or execution.get("status") or "running"


async def send(
    db: Collections, run_id: str, name: str, payload: bytes, dedup_id: str | None
) -> Delivery:
    """Put an event in a run's inbox, and wake the run if it awaits it."""
    run = await db.runs.find_one({"_id": run_id}, _PROGRESS)
    if run is None:
        return Delivery.UNKNOWN
    key = f"{_SINGLE}{ObjectId()}" if dedup_id is None else f"{_KNOWN}{dedup_id}"
    message_id = f"{run_id}\0{life_of(run)}.{key}"
    if status_of(run) in OVER and not await db.inbox.find_one({"_id": message_id}, {"_id": 1}):
        return Delivery.OVER
    order = ObjectId()
    message = await _put(db, message_id, run_id, name, payload, order)
    if not message["taken"]:
        # A duplicate wakes the run, too: whoever sent it first may have died before doing so.
        same = {"_id": run_id, "born": run.get("born")}
        if not (await db.runs.update_one(same, waking(message["name"]))).matched_count:
            # The run was deleted, and what lies in its inbox with it.
            await db.inbox.delete_one({"_id": message_id})
            return Delivery.UNKNOWN
    return Delivery.DELIVERED if message["order"] == order else Delivery.DUPLICATE


async def _put(
    db: Collections, id: str, run_id: str, name: str, payload: bytes, order: ObjectId
) -> Mapping[str, Any]:
    """Give the message that lies under this id, which is the given one if there was none."""
    message: dict[str, Any] = {"run": run_id, "name": name, "order": order, "taken": False}
    if len(payload) > DOCUMENT_ROOM:
        message["packed"] = pack(payload, f"the event {name!r} for run {run_id!r}")
    else:
        message["payload"] = payload
    new = {"$mergeObjects": ["$$ROOT", {"$literal": message}, {"sentAt": "$$NOW"}]}
    there = {"$eq": [{"$type": "$run"}, "string"]}
    update = [{"$replaceWith": {"$cond": [there, "$$ROOT", new]}}]
    while True:
        try:
            message_there: Any = await db.inbox.find_one_and_update(
                {"_id": id},
                update,
                projection={"name": 1, "order": 1, "taken": 1},
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
            return cast("Mapping[str, Any]", message_there)
        except DuplicateKeyError:
            # Somebody else sent it at the same moment: now it is there.
            continue


async def untaken(db: Collections, runs: Mapping[str, str]) -> dict[str, list[Message]]:
    """Give the messages without a mark of being taken, for runs that are given by id and life."""
    found: dict[str, list[Message]] = {run: [] for run in runs}
    if runs:
        mail = db.inbox.find({"run": {"$in": [*runs]}, "taken": False})
        async for document in mail.sort([("sentAt", 1), ("order", 1)]):
            run, _, id = document["_id"].partition("\0")
            if id.startswith(f"{runs[run]}."):
                found[run].append(_message(id, document))
    return found


async def have_mail(db: Collections, runs: Sequence[str]) -> set[str]:
    """Give those of the runs that have messages without a mark."""
    return {*await db.inbox.distinct("run", {"run": {"$in": [*runs]}, "taken": False})}


async def inbox(db: Collections, run_id: str) -> list[Message]:
    """Give a run's messages that were not taken."""
    # Messages before entries: what is taken in between is found among the entries.
    run = await db.runs.find_one({"_id": run_id}, {"born": 1})
    if run is None:
        return []
    messages = (await untaken(db, {run_id: life_of(run)}))[run_id]
    run = await db.runs.find_one({"_id": run_id}, HEADER) if messages else None
    if run is None:
        return []
    logs = await read_logs(db, {run_id: run.get("epochs", ())})
    taken = taken_in(run).union(*(log.taken() for log in logs[run_id]))
    return [message for message in messages if message.id not in taken]


def taken_in(run: Mapping[str, Any]) -> set[str]:
    """Give the messages that a run's own document names as taken."""
    return {*run.get("took", ())}


def message_ids(run_id: str, consumes: Iterable[str]) -> list[str]:
    """Give the `_id` of a run's messages."""
    return [f"{run_id}\0{id}" for id in consumes]


async def mark_taken(db: Collections, ids: Sequence[str]) -> None:
    """Mark messages as taken: one with a dedup id stays, to be known again."""
    known = [id for id in ids if _is_known(id)]
    single = [id for id in ids if not _is_known(id)]
    inbox = casual(db.inbox)
    if known:
        emptied = {"$set": {"taken": True}, "$unset": {"payload": "", "packed": ""}}
        await inbox.update_many({"_id": {"$in": known}}, emptied)
    if single:
        await inbox.delete_many({"_id": {"$in": single}})


def awaited(mail: Mapping[str, str], consumes: SizedIterable[str], names: Sequence[str]) -> bool:
    """Tell whether mail of one of these names is left when `consumes` are taken."""
    return any(name in names and id not in consumes for id, name in mail.items())


def _is_known(id: str) -> bool:
    return id.partition("\0")[2].partition(".")[2].startswith(_KNOWN)


def _message(id: str, document: Mapping[str, Any]) -> Message:
    packed = document.get("packed")
    payload = document["payload"] if packed is None else unpack(packed)
    return Message(id, document["name"], payload, document["sentAt"])
