"""Filters and updates of a run's document; the server computes times and epochs.

A stored run is `_id`, `snapshot` and `updatedAt`, as awaitly writes them, and in addition:

`workflow`, `status`, `awaits`  what searches, claims and messages look at
`queue`, `version`, `tags`, `summary`, `createdAt`  the rest of the header; no field for no tags
`wakeAt`        when the run is due, or when its owner's lease ends
`turn`          microseconds from `wakeAt`, at most 0: a date has milliseconds
`owner`         holder of the lease
`epoch`         of the last acquisition or save
`epochs`        those whose journal is merged into the snapshot, oldest first
`expired`       those since the last rest whose lease expired or was taken over
`settled`       epoch and number of the entry that wrote the snapshot
`claim`         marks the documents that one call leased or created
`incarnation`   the claim that created the run: distinguishes it from earlier runs of its id
`messageCount`  how many messages were ever sent to it: the number of the last one
`embeddedCount` how many of these were embedded in it; the others have their own documents
`newest`        the last messages, with their numbers: their own documents have none yet, and those
                with a `payload` have no document
`numbered`      the number up to which messages have theirs in their documents
`consumed`      messages with documents that the last rest consumed
`consumedCount` how many messages were consumed up to the last rest
`consumedSince` how many were consumed by entries since then
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, get_args

from bson.objectid import ObjectId

from perdure.clock import as_utc
from perdure.snapshot import ExecutionState, RunStatus
from perdure.store import Entry, LeaseRequest, NewRun, Rest
from perdure.stores._prefix import end_of_prefix

Document: TypeAlias = dict[str, Any]
Pipeline: TypeAlias = list[Document]

HEADER: Document = {
    "epoch": 1,
    "epochs": 1,
    "owner": 1,
    "settled": 1,
    "incarnation": 1,
    "messageCount": 1,
    "embeddedCount": 1,
    "newest": 1,
    "numbered": 1,
    "consumed": 1,
    "consumedCount": 1,
    "consumedSince": 1,
    "status": 1,
    "wakeAt": 1,
}
STATE_FIELDS: Document = {"epochs": 1, "settled": 1, "incarnation": 1, "messageCount": 1}
MESSAGE_COUNT: Document = {"$ifNull": ["$messageCount", 0]}
OVER = ["completed", "failed", "cancelled"]
STATUS_FIELDS: Document = {
    "status": 1,
    "snapshot.execution.status": 1,
    "snapshot.execution.state": 1,
}
HAS_EXPIRED = {"$lte": ["$wakeAt", "$$NOW"]}
# A range instead of a type check, so that the server needs only the index.
HAS_WAKE_TIME = {"$gte": datetime(1, 1, 1, tzinfo=UTC)}
IS_DUE = {"wakeAt": HAS_WAKE_TIME, "$expr": HAS_EXPIRED}

_MILLISECOND = timedelta(milliseconds=1)
_IS_NEW = {"$eq": [{"$type": "$snapshot"}, "missing"]}
_HAS_OWNER = {"$gt": ["$owner", None]}
IS_UNOWNED: Document = {"$lte": ["$owner", None]}
_HAS_PASSED = {"$and": [{"$gt": ["$wakeAt", None]}, HAS_EXPIRED]}
# Documents of awaitly have neither; the index of due runs needs them.
QUEUE_DEFAULTS = {"queue": {"$ifNull": ["$queue", ""]}, "version": {"$ifNull": ["$version", 0]}}
# Runs of an older version do not have this field, but the time is part of their incarnation.
_CREATED_AT = {"$ifNull": ["$createdAt", {"$ifNull": [{"$toDate": "$incarnation"}, "$updatedAt"]}]}


def to_milliseconds(span: timedelta) -> int:
    """Return a duration in milliseconds, rounded up."""
    return -(-span // _MILLISECOND)


def to_date(time: datetime, parameter: str = "wake_at") -> datetime:
    """Return a time as BSON stores it: in milliseconds, rounded up so that it is never early."""
    utc = as_utc(time, parameter)
    return utc + timedelta(microseconds=-utc.microsecond % 1000)


def to_turn(time: datetime) -> int:
    """Return how many microseconds a time is after its date, at most 0."""
    return -(-as_utc(time).microsecond % 1000)


def wake_fields(time: datetime) -> Document:
    """Return the fields of a wake time."""
    return {"wakeAt": to_date(time), "turn": to_turn(time)}


def wake_time(run: Mapping[str, Any]) -> datetime | None:
    """Return a run's wake time with its microseconds, or `None`."""
    at: datetime | None = run.get("wakeAt")
    return None if at is None else at + timedelta(microseconds=run.get("turn", 0))


def from_now(ttl: timedelta) -> Document:
    """Return the expression for the server's time plus `ttl`."""
    return {"$add": ["$$NOW", to_milliseconds(ttl)]}


def has_prefix(prefix: str) -> Document:
    """Match ids that start with a prefix, by a range of the index."""
    if not prefix:
        return {}
    end = end_of_prefix(prefix)
    return {"_id": {"$gte": prefix} if end is None else {"$gte": prefix, "$lt": end}}


def is_not_system(prefix: str) -> Document:
    """Match ids that do not continue a prefix with `~`."""
    system = has_prefix(f"{prefix}~")["_id"]
    return {"$or": [{"_id": {"$lt": system["$gte"]}}, {"_id": {"$gte": system["$lt"]}}]}


def has_snapshot_status(statuses: Sequence[str]) -> Document:
    """Match runs without a header whose snapshots have one of these statuses."""
    states = [status for status in statuses if status in get_args(ExecutionState)]
    plain = {"snapshot.execution.state": None, "snapshot.execution.status": {"$in": [*statuses]}}
    return {"$or": [plain, {"snapshot.execution.state": {"$in": states}}]}


def status_of(run: Mapping[str, Any]) -> RunStatus:
    """Return a run's status, from its snapshot if it has no header."""
    if (status := run.get("status")) is not None:
        return status  # type: ignore[no-any-return]  # only this store writes it
    execution: Mapping[str, Any] = run.get("snapshot", {}).get("execution", {})
    return execution.get("state") or execution.get("status") or "running"


def incarnation_of(run: Mapping[str, Any]) -> str:
    """Return what distinguishes a run from others with its id; empty for awaitly's runs."""
    incarnation = run.get("incarnation")
    return "0" if incarnation is None else str(incarnation)


def is_unchanged(run: Mapping[str, Any], leased_run: Mapping[str, Any] | None) -> bool:
    """Return whether a run did not change before it was leased: no other owner, no message.

    Both have `STATE_FIELDS`. Every owner leaves an epoch or a rest.
    """
    if leased_run is None:
        return False
    before = {**leased_run, "epochs": leased_run["epochs"][:-1]}
    return all((run.get(name) or None) == (before.get(name) or None) for name in STATE_FIELDS)


def is_owned(epochs: Mapping[str, int], counts: Mapping[str, int | None] | None = None) -> Document:
    """Match runs whose newest epochs are these and open, so the runs have an owner.

    With `counts`, they must have received exactly that many messages.
    """
    condition = {**has_epoch(epochs), "owner": {"$ne": None}}
    return {**condition, "$and": [equals("messageCount", counts)]} if counts else condition


def is_leased(leases: Iterable[tuple[str, int, str]]) -> Document:
    """Match runs with these leases, given as `_id`, epoch and owner, each run once."""
    rows = [*leases]
    owners = equals("owner", {key: owner for key, _, owner in rows})
    return {**has_epoch({key: epoch for key, epoch, _ in rows}), "$and": [owners]}


def has_epoch(epochs: Mapping[str, int]) -> Document:
    """Match runs that have these epochs, given by `_id`."""
    # A write of one document must name its `_id` literally, because it is the shard key of a
    # cluster.
    keys = [*epochs]
    return {"_id": keys[0] if len(keys) == 1 else {"$in": keys}, **equals("epoch", epochs)}


def equals(field: str, values: Mapping[str, Any]) -> Document:
    """Match documents whose field has the value given for their `_id`; `None` means missing."""
    if len({*values.values()}) == 1:
        return {field: next(iter(values.values()))}
    return {"$expr": {"$eq": [{"$ifNull": [f"${field}", None]}, by_id(values)]}}


def owner_by_id(owners: Mapping[str, str | None]) -> Document:
    """Return the expression for the owner that is given for a document's `_id`."""
    is_same = len(set(owners.values())) == 1
    return {"$literal": next(iter(owners.values()))} if is_same else by_id(owners)


def by_id(values: Mapping[str, Any]) -> Document:
    """Return the expression for the value that is given for a document's `_id`."""
    index = {"$indexOfArray": [{"$literal": [*values]}, "$_id"]}
    return {"$arrayElemAt": [{"$literal": [*values.values()]}, index]}


def next_epoch(salt: int, floor: int) -> Document:
    """Return the expression of an epoch above the run's last, above `floor`, by the clock.

    A run that was deleted and recreated has no last epoch. The clock then makes the new epoch
    higher and, within the same millisecond, the salt (below 1,000) makes it different.
    """
    clock = {"$add": [{"$multiply": [{"$toLong": "$$NOW"}, 1000]}, salt]}
    return {"$max": [{"$add": ["$epoch", 1]}, clock, floor + 1]}


def new_header(claim: ObjectId, new: LeaseRequest | NewRun) -> Document:
    """Return the header fields of a run that is created with a claim."""
    fields: Document = {"status": "running", "claim": claim, "incarnation": claim, "queue": ""}
    fields |= {"version": new.version, "workflow": new.workflow}
    fields |= {"tags": [*new.tags] or None, "summary": new.summary or None}
    return without_null(fields)


def create_if_missing(document: Mapping[str, Any]) -> Document:
    """Return the stage that fills a newly inserted document, and leaves an existing one alone."""
    times = {"updatedAt": "$$NOW", "createdAt": "$$NOW"}
    new = {"$mergeObjects": ["$$ROOT", {"$literal": document}, times]}
    return {"$replaceWith": {"$cond": [_IS_NEW, new, "$$ROOT"]}}


def lease_if_free(
    owner: Document,
    ttl: timedelta,
    claim: ObjectId,
    epoch: Document,
    *,
    existing: bool = True,
    instead_of: Document | None = None,
    is_due: bool = False,
) -> Document:
    """Return the stage that leases a run that is free or that `claim` created, and marks it.

    A run with an unexpired lease is also free if its owner is `instead_of`. A run that `is_due` was
    found by the index, and has the fields that the index needs.
    """
    own = {"$eq": ["$owner", owner]}
    is_abandoned: Document = HAS_EXPIRED
    if instead_of is not None:
        is_abandoned = {"$or": [HAS_EXPIRED, {"$eq": ["$owner", instead_of]}]}
    # By the claim, not the incarnation: another owner may have taken over the new run.
    free = {"$or": [IS_UNOWNED, own, is_abandoned]} if existing else {"$eq": ["$claim", claim]}
    return lease_if(free, owner, ttl, claim, epoch, is_abandoned=is_abandoned, is_due=is_due)


def lease_if(
    condition: Document,
    owner: Document,
    ttl: timedelta,
    claim: ObjectId,
    epoch: Document,
    *,
    is_abandoned: Document = HAS_EXPIRED,
    is_due: bool = False,
) -> Document:
    """Return the stage that leases a run if a condition holds, and marks it with `claim`.

    If `is_abandoned` holds for a run with an owner, its epoch is noted as expired.
    """
    is_new = {"$eq": ["$incarnation", claim]}
    orphaned_epochs = {"$cond": [{"$and": [_HAS_OWNER, is_abandoned]}, ["$epoch"], []]}
    lease_fields = {
        "epoch": "$$epoch",
        "epochs": {"$concatArrays": [{"$ifNull": ["$epochs", []]}, ["$$epoch"]]},
        "owner": owner,
        "wakeAt": from_now(ttl),
        "turn": 0,
        "status": "running",
        "awaits": [],
        "expired": {"$concatArrays": [{"$ifNull": ["$expired", []]}, orphaned_epochs]},
        "updatedAt": {"$cond": [is_new, "$$NOW", "$updatedAt"]},
        "claim": claim,
    }
    if not is_due:
        lease_fields |= QUEUE_DEFAULTS
    grant_fields = {
        "$let": {"vars": {"epoch": epoch}, "in": {"$mergeObjects": ["$$ROOT", lease_fields]}},
    }
    return {"$replaceWith": {"$cond": [condition, grant_fields, "$$ROOT"]}}


def release_lease(wake_at: datetime | None) -> Pipeline:
    """Return the update that releases a lease."""
    wake = {"wakeAt": "$$NOW", "turn": 0} if wake_at is None else wake_fields(wake_at)
    return [{"$set": {"owner": "$$REMOVE", **wake}}]


def save_run(document: Mapping[str, Any], epoch: Document, claim: ObjectId) -> Pipeline:
    """Return the update that replaces or creates a run; its messages stay."""
    consumed_count = {
        "$add": [{"$ifNull": ["$consumedCount", 0]}, {"$ifNull": ["$consumedSince", 0]}]
    }
    header = {
        "_id": "$_id",
        "messageCount": "$messageCount",
        "embeddedCount": "$embeddedCount",
        "newest": "$newest",
        "numbered": "$numbered",
        "consumed": "$consumed",
        "consumedCount": {"$cond": [{"$gt": ["$messageCount", 0]}, consumed_count, "$$REMOVE"]},
        "incarnation": {"$cond": [_IS_NEW, claim, "$incarnation"]},
        "createdAt": {"$cond": [_IS_NEW, "$$NOW", _CREATED_AT]},
        "epoch": "$$epoch",
        "epochs": [],
        "settled": {"epoch": "$$epoch", "n": -1},
        "updatedAt": "$$NOW",
    }
    document_fields = {"$mergeObjects": [{"$literal": document}, header]}
    return [{"$replaceWith": {"$let": {"vars": {"epoch": epoch}, "in": document_fields}}}]


def awaits_any(events: object) -> Document:
    """Return the expression for whether a run awaits one of these events."""
    return {"$ne": [{"$setIntersection": [events, {"$ifNull": ["$awaits", []]}]}, []]}


def wake_if_awaited(events: object) -> Document:
    """Return the fields that wake an unowned run that awaits one of these events."""
    # A run with an owner awaits nothing.
    wakes = {"$and": [awaits_any(events), {"$not": [_HAS_PASSED]}]}
    return {
        "wakeAt": {"$cond": [wakes, "$$NOW", "$wakeAt"]},
        "turn": {"$cond": [wakes, 0, "$turn"]},
        # A run of an older version is not in the index of due runs until it has these.
        **QUEUE_DEFAULTS,
    }


def rest_header(rest: Rest) -> Document:
    """Return the header fields that a rest writes; tags that it removes are `None`."""
    fields: Document = {"status": rest.status, "awaits": [*rest.awaits], "expired": []}
    if rest.wake_at is not None:
        fields |= wake_fields(rest.wake_at)
    if rest.version is not None:
        fields["version"] = rest.version
    if rest.tags is not None:
        fields["tags"] = [*rest.tags] or None
    if rest.summary is not None:
        fields["summary"] = rest.summary
    return fields


def without_null(fields: Document) -> Document:
    """Return the fields of a document that is written as a whole."""
    return {name: value for name, value in fields.items() if value is not None}


def rest_fields(
    entry: Entry, rest: Rest, body: Document, consumed: Sequence[str], *, due: bool
) -> Document:
    """Return the fields that a rest writes; the wake time of a due run is `True` at first."""
    fields = {**rest_header(rest), **body}
    fields["epochs"] = []
    fields["settled"] = {"epoch": entry.epoch, "n": entry.n}
    if consumed:
        fields["consumed"] = [*consumed]
    if due:
        fields |= {"wakeAt": True, "turn": 0}
    return fields


def settle_runs(rests: Mapping[str, Document], embedded: Sequence[str] = ()) -> Pipeline:
    """Return the update that writes rests, given by `_id`: snapshot, header and end of lease.

    `embedded` are the names of embedded messages that were consumed since the last rests.
    """
    old_fields = ["owner", "packed", "consumed", "consumedSince", "wakeAt", "turn"]
    corrections: Document = {}
    if all("tags" in fields for fields in rests.values()):
        old_fields.append("tags")
        rests = {key: without_null(fields) for key, fields in rests.items()}
    else:
        corrections["tags"] = {"$ifNull": ["$tags", "$$REMOVE"]}
    if any(fields.get("wakeAt") is True for fields in rests.values()):
        corrections["wakeAt"] = {"$cond": [{"$eq": ["$wakeAt", True]}, "$$NOW", "$wakeAt"]}
    if embedded:
        corrections["newest"] = _without(embedded)
    times = {"updatedAt": "$$NOW", "createdAt": _CREATED_AT}
    document = {"$mergeObjects": ["$$ROOT", by_id(rests), times]}
    stages: Pipeline = [{"$unset": old_fields}, {"$replaceWith": document}]
    return [*stages, {"$set": corrections}] if corrections else stages


def _without(names: Sequence[str]) -> Document:
    """Return the expression for a run's newest messages without these; no other run has them."""
    is_other = {"$not": [{"$in": ["$$this.name", {"$literal": [*names]}]}]}
    others = {"$filter": {"input": "$newest", "cond": is_other}}
    return {"$cond": [{"$isArray": ["$newest"]}, others, "$$REMOVE"]}
