"""Acquire, claim, renew and release leases, and create runs that wait for a claim."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from bson.objectid import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.errors import PyMongoError

from perdure import codec
from perdure.store import Due, Grant, Lease, LeaseRequest, Message, NewRun, SupportedVersions
from perdure.stores._backend import Ownership
from perdure.stores._reading import Granted
from perdure.stores._timestamps import to_microseconds
from perdure.stores.mongo.documents import encode_snapshot
from perdure.stores.mongo.errors import is_connection_lost
from perdure.stores.mongo.grants import Grants
from perdure.stores.mongo.inbox import first_messages, inboxes_of, runs_with_messages
from perdure.stores.mongo.journal import Positions, seal_logs
from perdure.stores.mongo.schedule import find_due, is_due_at
from perdure.stores.mongo.schema import Collections, find_and_update, insert, update_once
from perdure.stores.mongo.server_clock import ServerClock
from perdure.stores.mongo.updates import (
    HEADER,
    IS_DUE,
    STATE_FIELDS,
    Document,
    create_if_missing,
    from_now,
    has_epoch,
    is_leased,
    is_unchanged,
    lease_if_free,
    new_header,
    next_epoch,
    owner_by_id,
    release_lease,
    rest_header,
    to_milliseconds,
    wake_fields,
    wake_time,
    without_null,
)

# The fields that show a change of the run, and those needed to find its messages.
_STATE = {
    **STATE_FIELDS,
    **dict.fromkeys(("newest", "embeddedCount", "consumedCount", "consumedSince"), 1),
}
_MAX_ATTEMPTS = 3
# Limited, because for each run, the server searches the list of all leases of the statement.
_MAX_LEASES = 500

_MAX_CREATION_TIME = timedelta(seconds=1)


class Epochs:
    """Creates epochs that no run had before, above `floor`, the highest of a deleted run."""

    def __init__(self) -> None:
        self.floor = 0

    def next(self) -> Document:
        """Return the expression of a new epoch, computed by the server."""
        # The last bytes of an ObjectId are a counter with a random start in each process.
        salt = int.from_bytes(ObjectId().binary[-3:], "big") % 1000
        return next_epoch(salt, self.floor)

    def at(self, time: datetime) -> int:
        """Return a new epoch for a time, above all others of this process."""
        self.floor = max(self.floor + 1, to_microseconds(time))
        return self.floor

    def end(self, epoch: int) -> None:
        """Note an epoch that must not be used again, although the database forgets it."""
        self.floor = max(self.floor, epoch)


class Leases:
    """The operations on leases and the schedule, for runs whose `_id` starts with `prefix`."""

    def __init__(
        self, prefix: str, positions: Positions, epochs: Epochs, clock: ServerClock
    ) -> None:
        self._prefix = prefix
        self._positions = positions
        self._epochs = epochs
        self._clock = clock
        self._grants = Grants(prefix, positions)

    async def acquire(
        self, db: Collections, requests: Sequence[LeaseRequest]
    ) -> list[Granted | None]:
        """Return a grant or `None` for each request."""
        grants: list[Granted | None] = [None] * len(requests)
        remaining = dict(enumerate(requests))
        while remaining:
            # One request per run at a time: a second one is answered after the first.
            indexes = [
                *{request.id: index for index, request in reversed(remaining.items())}.values()
            ]
            answers = await self._acquire(db, [remaining.pop(index) for index in indexes])
            for index, grant in zip(indexes, answers, strict=True):
                grants[index] = grant
        return grants

    async def _acquire(
        self, db: Collections, requests: Sequence[LeaseRequest]
    ) -> list[Granted | None]:
        claim = ObjectId()
        new = [request for request in requests if request.create is not None]
        created_grants = await self._create(db, new, claim) if new else {}
        # After a lost reply, runs that this call inserted are recognized by their claim.
        in_doubt = created_grants is None
        grants: dict[str, Granted] = {**(created_grants or {})}
        remaining = {
            self._prefix + request.id: request
            for request in requests
            if self._prefix + request.id not in grants and (request.existing or in_doubt)
        }
        if remaining:
            if in_doubt or len(remaining) == 1:
                runs = [await self._lease_one(db, *item, claim) for item in remaining.items()]
            else:
                runs = await self._lease_many(db, remaining, claim)
            leased_runs = {run["_id"]: inflate(run) for run in runs if run is not None}
            ttls = {key: request.ttl for key, request in remaining.items()}
            grants |= await self._grants.read(db, leased_runs, ttls)
        return [grants.get(self._prefix + request.id) for request in requests]

    async def _create(
        self, db: Collections, requests: Sequence[LeaseRequest], claim: ObjectId
    ) -> dict[str, Grant] | None:
        """Create the runs that do not exist, each with its lease, in one insert.

        Return the grants by `_id`, or `None` if it is unknown which runs were created.
        """
        created_at = await self._clock.now()
        epoch = self._epochs.at(created_at)
        documents, grants = self._new_runs(requests, claim, epoch, created_at)
        try:
            size = sum(len(request.create or b"") for request in requests)
            existing = await insert(db.runs, documents, size)
        except PyMongoError as error:
            if not is_connection_lost(error):
                raise
            self._clock.forget()
            return None
        # Wait until the epoch is in the past, so that the next run with the same id, which another
        # process may create with its own estimate of the time, gets a higher one.
        await self._clock.wait_past(created_at)
        if await self._clock.now() - created_at > _MAX_CREATION_TIME:
            # This process was suspended in the meantime. The epoch may be lower than that of an
            # earlier run with the same id, so request a new one.
            return None
        for index in existing:
            del grants[documents[index]["_id"]]
        for key in grants:
            self._positions.add(key, epoch, str(claim))
        return grants

    def _new_runs(
        self, requests: Sequence[LeaseRequest], claim: ObjectId, epoch: int, time: datetime
    ) -> tuple[list[Document], dict[str, Grant]]:
        """Return the documents of new runs, and their grants by `_id`."""
        now = time - timedelta(microseconds=time.microsecond % 1000)
        header = {"epoch": epoch, "epochs": [epoch], "updatedAt": now, "createdAt": now}
        header |= {"awaits": [], "expired": [], "turn": 0}
        documents: list[Document] = []
        grants: dict[str, Grant] = {}
        # Runs that are created together often start with the same snapshot.
        bodies: dict[bytes, Document] = {}
        for request in requests:
            assert request.create is not None
            if (body := bodies.get(request.create)) is None:
                body = bodies[request.create] = _encode(request.id, request.create)
            expires_at = now + timedelta(milliseconds=to_milliseconds(request.ttl))
            key = self._prefix + request.id
            own = {"_id": key, "owner": request.owner, "wakeAt": expires_at}
            documents.append({**own, **new_header(claim, request), **header, **body})
            lease = Lease(request.id, request.owner, epoch, expires_at)
            grants[key] = Grant(
                lease, codec.loads(request.create), now, created=True, version=request.version
            )
        return documents, grants

    async def _lease_one(
        self, db: Collections, key: str, request: LeaseRequest, claim: ObjectId
    ) -> Any:
        lease = lease_if_free(
            {"$literal": request.owner},
            request.ttl,
            claim,
            self._epochs.next(),
            existing=request.existing,
            instead_of=_instead_of({key: request}),
        )
        stages = [lease]
        if request.create is not None:
            body = _encode(request.id, request.create)
            stages.insert(0, create_if_missing({**body, **new_header(claim, request)}))
        run = await find_and_update(db.runs, key, stages, upsert=request.create is not None)
        return run if run is not None and run.get("claim") == claim else None

    async def _lease_many(
        self, db: Collections, requests: Mapping[str, LeaseRequest], claim: ObjectId
    ) -> list[Any]:
        by_ttl: dict[timedelta, dict[str, LeaseRequest]] = {}
        for key, request in requests.items():
            by_ttl.setdefault(request.ttl, {})[key] = request
        for ttl, some in by_ttl.items():
            owner = owner_by_id({key: request.owner for key, request in some.items()})
            epoch, instead_of = self._epochs.next(), _instead_of(some)
            lease = lease_if_free(owner, ttl, claim, epoch, instead_of=instead_of)
            await db.runs.update_many({"_id": {"$in": [*some]}}, [lease])
        return await _claimed_runs(db, [*requests], claim)

    async def owners(self, db: Collections, ids: Sequence[str]) -> list[Ownership | None]:
        """Return the owner of each run; `None` for a missing run."""
        keys = [self._prefix + id for id in ids]
        fields = {"owner": 1, "wakeAt": 1}
        cursor = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
        owners = {run["_id"]: _ownership(run) async for run in cursor}
        return [owners.get(key) for key in keys]

    async def claim(
        self,
        db: Collections,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Granted]:
        """Lease and load runs that are due, earliest first."""
        for _ in range(_MAX_ATTEMPTS):
            due = await find_due(db, self._prefix, limit, supports, queues, fields=_STATE)
            if not due:
                break
            due_runs = {run["_id"]: run for run in due}
            runs, messages = await self._lease_and_read(db, due_runs, owner, ttl)
            if runs:
                grants = await self._grants.read(db, runs, dict.fromkeys(runs, ttl), messages)
                return [grants[key] for key in due_runs if key in grants]
        return []

    async def _lease_and_read(
        self, db: Collections, due_runs: Mapping[str, Any], owner: str, ttl: timedelta
    ) -> tuple[dict[str, Any], dict[str, list[Message]]]:
        """Lease due runs, and read the documents of their messages at the same time.

        The messages may be read before the lease is granted. They are used only for runs that did
        not change between the search and the lease: no owner consumed a message, and none was sent.
        """
        leasing = self._lease_due(db, [*due_runs], owner, ttl)
        inboxes = {key: inbox for key, inbox in inboxes_of(due_runs).items() if inbox.has_documents}
        if not inboxes:
            return await leasing, {}
        runs, messages = await asyncio.gather(leasing, first_messages(db, inboxes))
        same = [key for key in messages if is_unchanged(due_runs[key], runs.get(key))]
        return runs, {key: messages[key] for key in same}

    async def _lease_due(
        self, db: Collections, keys: Sequence[str], owner: str, ttl: timedelta
    ) -> dict[str, Any]:
        """Lease the runs that are still due, and return them by `_id`."""
        claim, epoch = ObjectId(), self._epochs.next()
        lease = lease_if_free({"$literal": owner}, ttl, claim, epoch, is_due=True)
        if len(keys) == 1:
            run = await update_once(db.runs, {"_id": keys[0], **IS_DUE}, [lease])
            return {} if run is None else {keys[0]: inflate(run)}
        await db.runs.update_many({"_id": {"$in": [*keys]}, **IS_DUE}, [lease])
        return {run["_id"]: inflate(run) for run in await _claimed_runs(db, keys, claim)}

    async def due(
        self,
        db: Collections,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        """Return the runs without a live lease whose wake time is at or before `now`."""
        runs = await find_due(db, self._prefix, limit, supports, queues, is_due_at(now))
        times = ((run["_id"][len(self._prefix) :], wake_time(run)) for run in runs)
        return [Due(id, at) for id, at in times if at is not None]

    async def renew(
        self, db: Collections, leases: Sequence[Lease], ttl: timedelta
    ) -> list[Lease | None]:
        """Extend all leases; return `None` for each that was lost."""
        for condition in self._lease_conditions(leases):
            await db.runs.update_many(condition, [{"$set": {"wakeAt": from_now(ttl)}}])
        keys = [self._prefix + lease.id for lease in leases]
        epochs = zip(keys, (lease.epoch for lease in leases), strict=True)
        # Read before the messages: messages that are marked in between are not found.
        unmarked_names = self._positions.unmarked(epochs)
        cursor = db.runs.find({"_id": {"$in": keys}}, HEADER, batch_size=len(keys) + 1)
        runs = {run["_id"]: run async for run in cursor}
        with_messages = await runs_with_messages(db, inboxes_of(runs), unmarked_names)
        return [
            self._renewed_lease(lease, runs.get(key), key in with_messages)
            for key, lease in zip(keys, leases, strict=True)
        ]

    def _renewed_lease(self, lease: Lease, run: Any, has_messages: bool) -> Lease | None:
        key = self._prefix + lease.id
        if run is None or (run.get("epoch"), run.get("owner")) != (lease.epoch, lease.owner):
            self._positions.remove(key, lease.epoch)
            return None
        self._positions.confirm(key, lease.epoch)
        return Lease(lease.id, lease.owner, lease.epoch, run["wakeAt"], has_messages)

    async def release(
        self, db: Collections, leases: Sequence[Lease], wake_at: datetime | None
    ) -> None:
        """Release the leases."""
        for condition in self._lease_conditions(leases):
            await db.runs.update_many(condition, release_lease(wake_at))
        epochs = [(self._prefix + lease.id, lease.epoch) for lease in leases]
        # These epochs belong to other processes, which may still write from memory.
        unknown = {key: epoch for key, epoch in epochs if not self._positions.get(key, epoch)}
        if unknown:
            cursor = db.runs.find({**has_epoch(unknown), "owner": None}, {"_id": 1})
            await seal_logs(db, {run["_id"]: [unknown[run["_id"]]] async for run in cursor})
        for key, epoch in epochs:
            self._positions.remove(key, epoch)

    def _lease_conditions(self, leases: Sequence[Lease]) -> Iterator[Document]:
        """Yield filters for the runs with these leases, in parts that contain each run once."""
        remaining = [(self._prefix + lease.id, lease.epoch, lease.owner) for lease in leases]
        while remaining:
            part = {lease[0]: lease for lease in remaining[:_MAX_LEASES]}
            yield is_leased(part.values())
            remaining = [lease for lease in remaining if part.get(lease[0]) is not lease]

    async def enqueue(self, db: Collections, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs that wait for a claim; return `False` for each id that existed."""
        claim, now, past = ObjectId(), await self._clock.now(), await self._clock.past()
        documents = [
            {
                "_id": self._prefix + run.id,
                **_encode(run.id, run.snapshot),
                **_new_header(run, claim, past),
                "updatedAt": now,
                "createdAt": now,
            }
            for run in runs
        ]
        existing = await insert(db.runs, documents, sum(len(run.snapshot) for run in runs))
        await self._clock.wait_past(now)
        return [index not in existing for index in range(len(runs))]


def _new_header(run: NewRun, claim: ObjectId, now: datetime) -> Document:
    header = {**new_header(claim, run), "queue": run.queue}
    if run.rest is not None:
        return without_null(header | rest_header(run.rest))
    wake_at = run.wake_at or now - run.head_start
    return {**header, "status": "queued", **wake_fields(wake_at)}


def _encode(id: str, snapshot: bytes) -> Document:
    return encode_snapshot(snapshot, f"the snapshot of run {id!r}")


def _instead_of(requests: Mapping[str, LeaseRequest]) -> Document | None:
    """Return the expression for the owner from which a run, given by `_id`, is taken over."""
    owners = {key: request.instead_of for key, request in requests.items()}
    return owner_by_id(owners) if any(owners.values()) else None


def _ownership(run: Mapping[str, Any]) -> Ownership:
    owner = run.get("owner")
    # The wake time of an unowned run is not the end of a lease.
    return Ownership(owner, None if owner is None else run.get("wakeAt"))


def inflate(run: RawBSONDocument) -> Document:
    """Return the fields of a run, whose snapshot is still encoded."""
    # Not `{**run}`, which looks up each field separately.
    return dict(run.items())


async def _claimed_runs(db: Collections, keys: Sequence[str], claim: ObjectId) -> list[Any]:
    condition = {"_id": {"$in": [*keys]}, "claim": claim}
    return await db.runs.find(condition, batch_size=len(keys) + 1).to_list()
