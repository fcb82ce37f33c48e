"""What is said to the server about a run's document: filters, and updates that it computes itself.

A run's document at rest is `_id`, `snapshot`, `updatedAt`, as awaitly writes them, and beside them:

`workflow`, `status`, `wakeAt`, `awaits`  what lists, claims and events look at
`owner`     who has the lease; its end is `wakeAt`
`epoch`     of the last acquisition or save
`epochs`    those whose journal counts on top of the snapshot, oldest first
`expired`   those since the last rest whose owners let the lease expire
`rested`    epoch and number of the entry that wrote the snapshot
`claim`     marks the documents that one call leased or created
`born`      the claim that created the run; tells its mail from that of a run of the same id before
`letters`   how many events were ever sent to it
`took`      messages that the last rest took
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias, get_args

from bson.objectid import ObjectId

from perdure.clock import as_utc
from perdure.snapshot import ExecutionState
from perdure.store import Entry, Rest

Document: TypeAlias = dict[str, Any]
Pipeline: TypeAlias = list[Document]

OVER = ("completed", "failed", "cancelled")
HEADER = dict.fromkeys(
    ("epoch", "epochs", "owner", "rested", "born", "letters", "took", "status", "wakeAt"), 1
)

_MILLISECOND = timedelta(milliseconds=1)
_IS_NEW = {"$eq": [{"$type": "$snapshot"}, "missing"]}
_HAS_OWNER = {"$gt": ["$owner", None]}
_HAS_EXPIRED = {"$lte": ["$wakeAt", "$$NOW"]}


def milliseconds(span: timedelta) -> int:
    """Give a span as whole milliseconds, the next above."""
    return -(-span // _MILLISECOND)


def date(moment: datetime, parameter: str = "wake_at") -> datetime:
    """Give a moment as BSON keeps it: in whole milliseconds, the next above, and so never early."""
    utc = as_utc(moment, parameter)
    return utc + timedelta(microseconds=-utc.microsecond % 1000)


def is_due() -> Document:
    """Match runs whose time has come by the server's clock."""
    return {"wakeAt": {"$type": "date"}, "$expr": _HAS_EXPIRED}


def status_is(statuses: Sequence[str]) -> Document:
    """Match runs of these statuses, those without our header by what their snapshot says."""
    finer = [status for status in statuses if status in get_args(ExecutionState)]
    plain = {"snapshot.execution.state": None, "snapshot.execution.status": {"$in": [*statuses]}}
    headless = [plain, {"snapshot.execution.state": {"$in": finer}}]
    return {"$or": [{"status": {"$in": [*statuses]}}, {"status": None, "$or": headless}]}


def later(ttl: timedelta) -> Document:
    """Give the server's time so much later."""
    return {"$add": ["$$NOW", milliseconds(ttl)]}


def next_epoch(salt: int, floor: int) -> Document:
    """Give an epoch that the run never had: above its last, above `floor`, and by the clock.

    A run that was deleted and begun again has no last one. Then the clock tells them apart, and
    within the same millisecond the salt, which is below 1,000.
    """
    clock = {"$add": [{"$multiply": [{"$toLong": "$$NOW"}, 1000]}, salt]}
    return {"$max": [{"$add": ["$epoch", 1]}, clock, floor + 1]}


def creating(document: Mapping[str, Any]) -> Document:
    """Make a document that is not there yet; leave one that is."""
    new = {"$mergeObjects": ["$$ROOT", {"$literal": document}, {"updatedAt": "$$NOW"}]}
    return {"$replaceWith": {"$cond": [_IS_NEW, new, "$$ROOT"]}}


def epochs_are(epochs: Mapping[str, int]) -> Document:
    """Match the runs that have these epochs, given by `_id`."""
    return {"_id": {"$in": [*epochs]}, **_is("epoch", epochs)}


def _is(field: str, by_id: Mapping[str, Any]) -> Document:
    """Match the documents whose field has what is given by `_id`; None is like nothing."""
    if len({*by_id.values()}) == 1:
        return {field: next(iter(by_id.values()))}
    return {"$expr": {"$eq": [{"$ifNull": [f"${field}", None]}, _of_this(by_id)]}}


def are_running(epochs: Mapping[str, int], letters: Mapping[str, int | None]) -> Document:
    """Match the runs whose newest epochs are these, and are open.

    Those in `letters`, which are all or none, have got so many.
    """
    running = {**epochs_are(epochs), "owner": {"$ne": None}}
    return {**running, "$and": [_is("letters", letters)]} if letters else running


def are_held(leases: Iterable[tuple[str, int, str]]) -> Document:
    """Match the runs with these leases, given as `_id`, epoch and owner, no run twice."""
    by_id = {key: (epoch, owner) for key, epoch, owner in leases}
    epochs = {key: epoch for key, (epoch, _) in by_id.items()}
    owners = {key: owner for key, (_, owner) in by_id.items()}
    own = {"$eq": ["$owner", _of_this(owners)]}
    return {**epochs_are(epochs), "$and": [{"$expr": own}]}


def owner_of(owners: Mapping[str, str]) -> Document:
    """Give the owner that is meant for a document, from owners by `_id`."""
    one = len(set(owners.values())) == 1
    return {"$literal": next(iter(owners.values()))} if one else _of_this(owners)


def _of_this(by_id: Mapping[str, Any]) -> Document:
    """Give what is meant for a document, from values by `_id`."""
    place = {"$indexOfArray": [{"$literal": [*by_id]}, "$_id"]}
    return {"$arrayElemAt": [{"$literal": [*by_id.values()]}, place]}


def leasing(
    owner: Document, ttl: timedelta, claim: ObjectId, epoch: Document, *, existing: bool = True
) -> Document:
    """Lease a document that is free or that `claim` created, and mark it; leave any other."""
    created = {"$eq": ["$born", claim]}
    unowned = {"$lte": ["$owner", None]}
    own = {"$eq": ["$owner", owner]}
    free = {"$or": [unowned, own, _HAS_EXPIRED]} if existing else created
    orphaned = {"$cond": [{"$and": [_HAS_OWNER, _HAS_EXPIRED]}, ["$epoch"], []]}
    leased = {
        "epoch": "$$epoch",
        "epochs": {"$concatArrays": [{"$ifNull": ["$epochs", []]}, ["$$epoch"]]},
        "owner": owner,
        "wakeAt": later(ttl),
        "status": "running",
        "awaits": [],
        "expired": {"$concatArrays": [{"$ifNull": ["$expired", []]}, orphaned]},
        "updatedAt": {"$cond": [created, "$$NOW", "$updatedAt"]},
        "claim": claim,
    }
    granted = {
        "$let": {"vars": {"epoch": epoch}, "in": {"$mergeObjects": ["$$ROOT", leased]}},
    }
    return {"$replaceWith": {"$cond": [free, granted, "$$ROOT"]}}


def releasing(wake_at: datetime | None) -> Pipeline:
    """Give a lease up."""
    at = "$$NOW" if wake_at is None else date(wake_at)
    return [{"$set": {"owner": "$$REMOVE", "wakeAt": at}}]


def saving(document: Mapping[str, Any], epoch: Document, claim: ObjectId) -> Pipeline:
    """Replace a run, or make it; its mail stays."""
    kept = {
        "_id": "$_id",
        "letters": "$letters",
        "took": "$took",
        "born": {"$cond": [_IS_NEW, claim, "$born"]},
        "epoch": "$$epoch",
        "epochs": [],
        "rested": {"epoch": "$$epoch", "n": -1},
        "updatedAt": "$$NOW",
    }
    merged = {"$mergeObjects": [{"$literal": document}, kept]}
    return [{"$replaceWith": {"$let": {"vars": {"epoch": epoch}, "in": merged}}}]


def lying(rest: Rest) -> Document:
    """Give the fields that tell how a run lies."""
    fields: Document = {"status": rest.status, "awaits": [*rest.awaits], "expired": []}
    if rest.wake_at is not None:
        fields["wakeAt"] = date(rest.wake_at)
    return fields


def fenced(key: str, entry: Entry) -> Document:
    """Match the run if the entry's epoch is its newest and is open: the run has an owner."""
    return {"_id": key, "epoch": entry.epoch, "owner": {"$ne": None}}


def rest_fields(
    entry: Entry, rest: Rest, body: Document, consumes: Sequence[str], *, due: bool
) -> Document:
    """Give what a rest writes; a run that is due has no time yet, but `True` for it."""
    fields = {**lying(rest), **body}
    fields["epochs"] = []
    fields["rested"] = {"epoch": entry.epoch, "n": entry.n}
    if consumes:
        fields["took"] = [*consumes]
    if due:
        fields["wakeAt"] = True
    return fields


def resting(rests: Mapping[str, Document]) -> Pipeline:
    """Put runs to rest, given by `_id`: snapshot, header and the end of the lease in one write."""
    rested = {"$mergeObjects": ["$$ROOT", _of_this(rests), {"updatedAt": "$$NOW"}]}
    wake_at = {"$cond": [{"$eq": ["$wakeAt", True]}, "$$NOW", "$wakeAt"]}
    return [
        {"$unset": ["owner", "packed", "took", "wakeAt"]},
        {"$replaceWith": rested},
        {"$set": {"wakeAt": wake_at}},
    ]


def waking(name: str) -> Pipeline:
    """Count an event, and make a run at rest that awaits it due."""
    awaited = {"$in": [{"$literal": name}, {"$ifNull": ["$awaits", []]}]}
    soonest = {"$min": ["$wakeAt", "$$NOW"]}
    return [
        {
            "$set": {
                "letters": {"$add": [{"$ifNull": ["$letters", 0]}, 1]},
                "wakeAt": {"$cond": [awaited, soonest, "$wakeAt"]},
            }
        }
    ]


def life_of(run: Mapping[str, Any]) -> str:
    """Give the text that tells a run from others of its id."""
    born = run.get("born")
    return "0" if born is None else str(born)


def begins_with(prefix: str) -> Document:
    """Match ids that begin with a text, by a range of the index."""
    if not prefix:
        return {}
    shorter = prefix.rstrip(chr(0x10FFFF))
    if not shorter:
        return {"_id": {"$gte": prefix}}
    last = ord(shorter[-1]) + 1
    # The range of surrogates holds no characters.
    after = shorter[:-1] + chr(0xE000 if last == 0xD800 else last)
    return {"_id": {"$gte": prefix, "$lt": after}}
