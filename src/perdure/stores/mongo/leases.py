"""Leases: given, moved and taken back; and the runs that wait for one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from bson.objectid import ObjectId
from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError, PyMongoError

from perdure import codec
from perdure.snapshot import Snapshot
from perdure.store import Due, Grant, Lease, LeaseRequest, Message, NewRun
from perdure.stores._reading import Granted, read_grant
from perdure.stores._timestamps import to_microseconds
from perdure.stores.mongo.documents import body_of, read_run
from perdure.stores.mongo.errors import is_cut
from perdure.stores.mongo.inbox import have_mail, mark_taken, message_ids, taken_in, untaken
from perdure.stores.mongo.journal import Log, Positions, Record, seal_logs
from perdure.stores.mongo.schema import WAKE_INDEX, Collections, insert
from perdure.stores.mongo.server_clock import ServerClock
from perdure.stores.mongo.updates import (
    Document,
    are_held,
    begins_with,
    creating,
    date,
    epochs_are,
    is_due,
    later,
    leasing,
    life_of,
    milliseconds,
    next_epoch,
    owner_of,
    releasing,
)

_ATTEMPTS = 3
_AT_ONCE = 500

_SOON = timedelta(seconds=1)


class Epochs:
    """Epochs that no run had before; `floor` is the highest that was seen to end with its run."""

    def __init__(self) -> None:
        self.floor = 0

    def next(self) -> Document:
        """Give the expression of a new epoch."""
        # An ObjectId ends in a count that begins anywhere: another process has another one.
        salt = int.from_bytes(ObjectId().binary[-3:], "big") % 1000
        return next_epoch(salt, self.floor)

    def at(self, moment: datetime) -> int:
        """Give a new epoch that is there at this moment, above all that this process gave so."""
        self.floor = max(self.floor + 1, to_microseconds(moment))
        return self.floor

    def ended(self, epoch: int) -> None:
        """Note an epoch that must not come again, though nothing in the database tells of it."""
        self.floor = max(self.floor, epoch)


class Leases:
    """The verbs of leases and schedule on the runs whose ids begin with `prefix`."""

    def __init__(
        self,
        prefix: str,
        positions: Positions,
        epochs: Epochs,
        clock: ServerClock,
    ) -> None:
        self._prefix = prefix
        self._positions = positions
        self._epochs = epochs
        self._clock = clock

    async def acquire(
        self, db: Collections, requests: Sequence[LeaseRequest]
    ) -> list[Granted | None]:
        """Give each want its lease, or None."""
        grants: list[Granted | None] = [None] * len(requests)
        left = [*enumerate(requests)]
        while left:
            # Wants for one run are answered one after another.
            wave = {request.id: (place, request) for place, request in reversed(left)}
            places = {place for place, _ in wave.values()}
            asked = [request for _, request in wave.values()]
            for (place, _), grant in zip(
                wave.values(), await self._acquire(db, asked), strict=True
            ):
                grants[place] = grant
            left = [(place, request) for place, request in left if place not in places]
        return grants

    async def _acquire(
        self, db: Collections, requests: Sequence[LeaseRequest]
    ) -> list[Granted | None]:
        claim = ObjectId()
        new = [request for request in requests if request.create is not None]
        made = await self._create(db, new, claim) if new else {}
        # What was inserted before a connection ended is known by its claim.
        in_doubt = made is None
        granted: dict[str, Granted] = {**(made or {})}
        keys = [self._prefix + request.id for request in requests]
        left = [
            request
            for key, request in zip(keys, requests, strict=True)
            if key not in granted and (request.existing or in_doubt)
        ]
        if left:
            if in_doubt or len(left) == 1:
                found = [await self._lease_one(db, request, claim) for request in left]
            else:
                found = await self._lease_many(db, left, claim)
            leased = {run["_id"]: {**run} for run in found if run is not None}
            ttls = {self._prefix + request.id: request.ttl for request in left}
            granted |= await self._equip(db, leased, ttls)
        return [granted.get(key) for key in keys]

    async def _create(
        self, db: Collections, requests: Sequence[LeaseRequest], claim: ObjectId
    ) -> dict[str, Grant] | None:
        """Create those of the runs that are not there, each with its lease, in one insert.

        Gives their grants by `_id`, or None when it is not known which were created.
        """
        moment = await self._clock.now()
        epoch = self._epochs.at(moment)
        now = moment - timedelta(microseconds=moment.microsecond % 1000)
        header = {"epoch": epoch, "epochs": [epoch], "status": "running", "awaits": []}
        header |= {"expired": [], "updatedAt": now, "claim": claim, "born": claim}
        bodies: dict[bytes, Document] = {}
        grants: dict[str, Grant] = {}
        documents: list[Document] = []
        weight = 0
        for request in requests:
            assert request.create is not None
            if (body := bodies.get(request.create)) is None:
                body = bodies[request.create] = body_of(request.create, _naming(request))
            ends = now + timedelta(milliseconds=milliseconds(request.ttl))
            key = self._prefix + request.id
            own = {"_id": key, "owner": request.owner, "wakeAt": ends, **_workflow_of(request)}
            documents.append({**own, **header, **body})
            lease = Lease(request.id, request.owner, epoch, ends)
            grants[key] = Grant(lease, codec.loads(request.create), now, created=True)
            weight += len(request.create)
        try:
            known = await insert(db.runs, documents, weight)
        except PyMongoError as error:
            if not is_cut(error):
                raise
            self._clock.forget()
            return None
        # Only then is the epoch a thing of the past, also for who begins the run again elsewhere.
        await self._clock.pass_by(moment)
        if await self._clock.now() - moment > _SOON:
            # This process was stopped meanwhile: the epoch may be older than one that was given to
            # an earlier run of the same id. A new one is asked for.
            return None
        for place in known:
            del grants[documents[place]["_id"]]
        for key in grants:
            self._positions.grant(key, epoch, str(claim))
        return grants

    async def _lease_one(self, db: Collections, request: LeaseRequest, claim: ObjectId) -> Any:
        owner = owner_of({"": request.owner})
        pipeline = [
            leasing(owner, request.ttl, claim, self._epochs.next(), existing=request.existing)
        ]
        if request.create is not None:
            body = body_of(request.create, _naming(request))
            new = {**body, **_workflow_of(request), "claim": claim, "born": claim}
            pipeline.insert(0, creating(new))
        run = None
        for _ in range(_ATTEMPTS):
            try:
                run = await db.runs.find_one_and_update(
                    {"_id": self._prefix + request.id},
                    pipeline,
                    upsert=request.create is not None,
                    return_document=ReturnDocument.AFTER,
                )
                break
            except DuplicateKeyError:
                # Somebody else created the run at the same moment: now it is there.
                continue
        return run if run is not None and run.get("claim") == claim else None

    async def _lease_many(
        self, db: Collections, requests: Sequence[LeaseRequest], claim: ObjectId
    ) -> list[Any]:
        owners: dict[timedelta, dict[str, str]] = {}
        for request in requests:
            owners.setdefault(request.ttl, {})[self._prefix + request.id] = request.owner
        for ttl, some in owners.items():
            lease = leasing(owner_of(some), ttl, claim, self._epochs.next())
            await db.runs.update_many({"_id": {"$in": [*some]}}, [lease])
        keys = [key for some in owners.values() for key in some]
        return await _claimed(db, keys, claim)

    async def claim(
        self,
        db: Collections,
        owner: str,
        ttl: timedelta,
        limit: int,
        workflows: Sequence[str] | None,
    ) -> list[Granted]:
        """Lease and load runs that are due, earliest first."""
        for _ in range(_ATTEMPTS):
            keys = await self._due_keys(db, limit, workflows)
            if not keys:
                return []
            claim = ObjectId()
            await db.runs.update_many(
                {"_id": {"$in": keys}, **is_due()},
                [leasing(owner_of({"": owner}), ttl, claim, self._epochs.next())],
            )
            found = await _claimed(db, keys, claim)
            if found:
                leased = {run["_id"]: {**run} for run in found}
                granted = await self._equip(db, leased, dict.fromkeys(keys, ttl))
                return [granted[key] for key in keys if key in granted]
        return []

    async def _due_keys(
        self, db: Collections, limit: int, workflows: Sequence[str] | None
    ) -> list[str]:
        if not limit:
            return []
        mine = await self._mine(db, workflows)
        due = db.runs.find({**is_due(), **mine}, {"_id": 1}, batch_size=limit + 1)
        return [run["_id"] async for run in due.sort("wakeAt").limit(limit)]

    async def due(
        self, db: Collections, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> list[Due]:
        """Give the runs without a live lease whose time has come by `now`, earliest first."""
        if not limit:
            return []
        chosen = {
            "wakeAt": {"$type": "date", "$lte": date(now, "now")},
            "$or": [{"owner": None}, {"$expr": {"$lte": ["$wakeAt", "$$NOW"]}}],
            **await self._mine(db, workflows),
        }
        found = db.runs.find(chosen, {"wakeAt": 1}, batch_size=limit + 1)
        found = found.sort("wakeAt").limit(limit)
        return [Due(self._id(run["_id"]), run["wakeAt"]) async for run in found]

    async def renew(
        self, db: Collections, leases: Sequence[Lease], ttl: timedelta
    ) -> list[Lease | None]:
        """Move the expiry of all leases; None for each that was lost."""
        keys = [self._prefix + lease.id for lease in leases]
        for held in self._held(leases):
            await db.runs.update_many(held, [{"$set": {"wakeAt": later(ttl)}}])
        fields = {"epoch": 1, "owner": 1, "wakeAt": 1, "letters": 1}
        found = db.runs.find({"_id": {"$in": keys}}, fields, batch_size=len(keys) + 1)
        runs = {run["_id"]: run async for run in found}
        mailed = [key for key, run in runs.items() if run.get("letters")]
        mail = await have_mail(db, mailed) if mailed else set()
        return [
            self._renewed(lease, runs.get(key), key in mail)
            for key, lease in zip(keys, leases, strict=True)
        ]

    def _renewed(self, lease: Lease, run: Any, mail: bool) -> Lease | None:
        key = self._prefix + lease.id
        if run is None or (run.get("epoch"), run.get("owner")) != (lease.epoch, lease.owner):
            self._positions.drop(key, lease.epoch)
            return None
        self._positions.confirm(key, lease.epoch)
        return Lease(lease.id, lease.owner, lease.epoch, run["wakeAt"], mail)

    async def release(
        self, db: Collections, leases: Sequence[Lease], wake_at: datetime | None
    ) -> None:
        """Give the leases up."""
        for held in self._held(leases):
            await db.runs.update_many(held, releasing(wake_at))
        keyed = [(self._prefix + lease.id, lease.epoch) for lease in leases]
        await self._seal_released(db, {k: e for k, e in keyed if not self._positions.get(k, e)})
        for key, epoch in keyed:
            self._positions.drop(key, epoch)

    async def _seal_released(self, db: Collections, epochs: Mapping[str, int]) -> None:
        """Close epochs with which another process may go by memory."""
        if epochs:
            released = db.runs.find({**epochs_are(epochs), "owner": None}, {"_id": 1})
            keys = [run["_id"] async for run in released]
            await seal_logs(db, {key: [epochs[key]] for key in keys})

    def _held(self, leases: Sequence[Lease]) -> Iterator[Document]:
        """Match the runs with these leases, in parts: the server looks through a part for each."""
        left = [(self._prefix + lease.id, lease.epoch, lease.owner) for lease in leases]
        while left:
            part = {lease[0]: lease for lease in left[:_AT_ONCE]}
            yield are_held(part.values())
            left = [lease for lease in left if part.get(lease[0]) is not lease]

    async def enqueue(self, db: Collections, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs that wait for a claim; False for each id that was there."""
        if not runs:
            return []
        claim, now, past = ObjectId(), await self._clock.now(), await self._clock.past()
        documents = [
            {
                "_id": self._prefix + run.id,
                **body_of(run.snapshot, f"the snapshot of run {run.id!r}"),
                "workflow": run.workflow,
                "status": "running",
                "updatedAt": now,
                "wakeAt": date(run.wake_at or past),
                "claim": claim,
                "born": claim,
            }
            for run in runs
        ]
        known = await insert(db.runs, documents, sum(len(run.snapshot) for run in runs))
        await self._clock.pass_by(now)
        return [place not in known for place in range(len(runs))]

    async def _equip(
        self, db: Collections, leased: Mapping[str, Any], ttls: Mapping[str, timedelta]
    ) -> dict[str, Granted]:
        """Read under their leases what the runs' owners need, and shut out the owners of before."""
        older = {key: run["epochs"][:-1] for key, run in leased.items() if len(run["epochs"]) > 1}
        mailed = {key: life_of(run) for key, run in leased.items() if run.get("letters")}
        mail = await untaken(db, mailed) if mailed else {}
        logs = await seal_logs(db, older) if older else {}
        lost = await _lost(db, [leased[key] for key in {*older, *mailed}])
        grants: dict[str, Granted] = {}
        marks: list[str] = []
        for key, run in leased.items():
            if key in lost:
                continue
            taken = taken_in(run).union(*(log.taken() for log in logs.get(key, ())))
            letters = mail.get(key, [])
            marks += message_ids(key, (letter.id for letter in letters if letter.id in taken))
            left = tuple(letter for letter in letters if letter.id not in taken)
            grants[key] = self._grant(run, ttls[key], logs.get(key, ()), left)
        if marks:
            await mark_taken(db, marks)
        return grants

    def _grant(
        self, run: Any, ttl: timedelta, logs: Sequence[Log], mail: tuple[Message, ...]
    ) -> Granted:
        id, expires_at = self._id(run["_id"]), run["wakeAt"]
        lease = Lease(id, run["owner"], run["epoch"], expires_at, bool(mail))
        self._positions.grant(
            run["_id"],
            lease.epoch,
            life_of(run),
            sealed=bool(logs),
            letters=run.get("letters", 0),
            mail={message.id: message.name for message in mail},
        )
        now = expires_at - timedelta(milliseconds=milliseconds(ttl))
        created = run.get("born") == run["claim"]
        read = partial(_read_run, id, run, logs)
        # Counted here: before the logs were sealed, entries could still come.
        written = max((log.epoch for log in logs if log.records), default=0)
        takeovers = sum(epoch > written for epoch in run["expired"])
        return read_grant(lease, read, now, mail, takeovers, created)

    async def _mine(self, db: Collections, workflows: Sequence[str] | None) -> Document:
        names: Sequence[str | None] | None = workflows
        if names is None:
            names = await sleeping_workflows(db)
        return {**begins_with(self._prefix), "workflow": {"$in": [*names]}}

    def _id(self, key: str) -> str:
        return key[len(self._prefix) :]


def _naming(request: LeaseRequest) -> str:
    return f"the snapshot of run {request.id!r}"


def _workflow_of(request: LeaseRequest) -> Document:
    return {} if request.workflow is None else {"workflow": request.workflow}


async def sleeping_workflows(db: Collections) -> list[str | None]:
    """Give the names of all workflows that have runs with a wake time."""
    names: list[str | None] = [None]
    above: Document = {"$gte": ""}
    while True:
        # From name to name: the server's own `distinct` would look at every run.
        timed = {"workflow": above, "wakeAt": {"$type": "date"}}
        found = db.runs.find(timed, {"workflow": 1}).sort("workflow").limit(1)
        if not (first := await found.hint(WAKE_INDEX).to_list()):
            return names
        names.append(first[0]["workflow"])
        above = {"$gt": names[-1]}


async def _claimed(db: Collections, keys: Sequence[str], claim: ObjectId) -> list[Any]:
    marked = {"_id": {"$in": [*keys]}, "claim": claim}
    # In one batch: by itself the server would give the first hundred, and want to be asked again.
    return await db.runs.find(marked, batch_size=len(keys) + 1).to_list()


async def _lost(db: Collections, leased: Sequence[Any]) -> set[str]:
    """Return the runs that have another owner, or were put to rest, since they were leased so.

    What was read of their logs and messages does not belong to the snapshot of the lease: an
    owner in between may have removed it.
    """
    if not leased:
        return set()
    keys = [run["_id"] for run in leased]
    now = db.runs.find({"_id": {"$in": keys}}, {"owner": 1, "rested": 1}, batch_size=len(keys) + 1)
    latest = {run["_id"]: run async for run in now}
    return {run["_id"] for run in leased if not _is_held(run, latest.get(run["_id"]))}


def _is_held(leased: Any, latest: Any) -> bool:
    # By the owner and not by the epoch: one that asks twice at once would overtake itself.
    if latest is None or latest.get("owner") != leased["owner"]:
        return False
    return bool(latest.get("rested", {}).get("epoch", 0) < leased["epoch"])


def _read_run(id: str, run: Mapping[str, Any], logs: Sequence[Log]) -> Snapshot:
    return read_run(id, run, merged_data(run, logs))


def merged_data(run: Mapping[str, Any], logs: Iterable[Log]) -> Iterator[bytes]:
    """Give the data of all entries that count on top of a run's snapshot, in their order."""
    records: dict[tuple[int, int], Record] = {}
    for log in logs:
        for record in log.records:
            records.setdefault((record.epoch, record.n), record)
    return (records[place].data() for place in sorted(records))
