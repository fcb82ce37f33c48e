"""The verbs of a memory store; docstrings here say how they differ from those of a database."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import datetime, timedelta
from heapq import nlargest
from itertools import islice

from perdure.clock import Clock, as_utc
from perdure.snapshot import RunStatus, Snapshot, is_over
from perdure.store import (
    Delivery,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    Rest,
    Stats,
    Verdict,
)
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted, read_grant
from perdure.stores._shell import Ownership, Query, Row
from perdure.stores.memory.documents import MemoryDocuments
from perdure.stores.memory.rows import Run, Runs


class MemoryBackend:
    """The runs of one prefix. No verb yields to the event loop, so each is atomic."""

    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        self.runs = runs
        self.prefix = prefix
        self.clock = clock
        self.documents = MemoryDocuments(runs.documents(clock), scope_of(prefix))
        self._is_closed = False

    async def open(self) -> None:
        """Do nothing: there is no database to connect to."""

    def forget_loop(self) -> None:
        """Do nothing: runs do not belong to an event loop."""

    async def close(self) -> None:
        """End the notifications of this store; stores that share its runs stay open."""
        self._is_closed = True
        self._notify()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        """Replace the run, except for its inbox."""
        run = self._find(id) or self._create(id, data)
        run.epoch = next(self.runs.epochs)
        run.workflow = workflow
        self._rest(run, data, rest)

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        run = self._find(id)
        return None if run is None else run.merged()

    async def delete(self, id: str) -> bool:
        """Delete a run."""
        return self.runs.remove(self.prefix + id)

    async def list(self, query: Query) -> Sequence[Row]:
        """Return the newest runs by a scan: the runs of one process are few enough."""
        prefix = self.prefix + query.prefix
        after = None if query.after is None else (query.after[0], self.prefix + query.after[1])
        matching = (
            run
            for run in self.runs
            if run.id.startswith(prefix)
            and query.status in (None, run.status)
            and query.workflow in (None, run.workflow)
            and (after is None or run.sort_key() < after)
        )
        newest = nlargest(query.limit, matching, key=Run.sort_key)
        return [
            Row(self._id(run), run.updated_at, run.status, run.workflow, run.owner)
            for run in newest
        ]

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Write the entries one by one."""
        return [self._append(entry) for entry in entries]

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        """Lease runs by id, creating those that are missing."""
        now = self.clock.now()
        return [self._acquire(request, now) for request in requests]

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Return who has the lease of each run."""
        runs = map(self._find, ids)
        return [
            None if run is None else Ownership(run.owner, run.wake_at if run.owner else None)
            for run in runs
        ]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        """Extend leases."""
        expires_at = self.clock.now() + ttl
        return [self._renew(lease, expires_at) for lease in leases]

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        """Release leases."""
        at = wake_at or self.clock.now()
        for run in filter(None, map(self._owned, leases)):
            run.owner = None
            self._wake(run, at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create runs that wait for a claim."""
        now = self.clock.now()
        return [self._enqueue(run, now) for run in runs]

    async def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Due]:
        """Return due runs from the index."""
        runs = self.runs.index.due(now, limit, workflows, self.prefix)
        return [Due(self._id(run), run.wake_at) for run in runs if run.wake_at is not None]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]:
        """Lease due runs from the index."""
        now = self.clock.now()
        runs = self.runs.index.due(now, limit, workflows, self.prefix)
        return [self._grant(run, owner, now, ttl, is_abandoned=True) for run in runs]

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        """Put a message in an inbox."""
        run = self._find(id)
        if run is None:
            return Delivery.UNKNOWN
        if dedup_id is not None and dedup_id in run.dedup_ids:
            return Delivery.DUPLICATE
        if is_over(run.status):
            return Delivery.OVER
        if dedup_id is not None:
            run.dedup_ids.add(dedup_id)
        message = Message(str(next(self.runs.message_ids)), name, payload, self.clock.now())
        run.inbox[message.id] = message
        if name in run.awaits:
            self._wake(run, message.sent_at)
        return Delivery.DELIVERED

    async def inbox(self, id: str) -> Sequence[Message]:
        """Return the messages of a run."""
        run = self._find(id)
        return [] if run is None else [*run.inbox.values()]

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        """Delete old runs, found by a scan."""
        before = self.clock.now() - older_than
        old = (run.id for run in self._mine() if run.status in statuses and run.updated_at < before)
        pruned = [*islice(old, limit)]
        for id in pruned:
            self.runs.remove(id)
        return len(pruned)

    async def stats(self) -> Stats:
        """Count the runs by a scan."""
        by_status = Counter[str](run.status for run in self._mine())
        oldest = await self.due(self.clock.now(), 1, None)
        return Stats(by_status, oldest[0].wake_at if oldest else None)

    async def notifications(self) -> AsyncGenerator[None]:
        """Yield when a run of any store that shares these runs becomes due."""
        listener = asyncio.Event()
        self.runs.listeners.add(listener)
        try:
            while await listener.wait() and not self._is_closed:
                listener.clear()
                yield
        finally:
            self.runs.listeners.discard(listener)

    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is None:
            return Verdict.UNKNOWN
        if entry.epoch != run.epoch:
            return Verdict.FENCED
        position = (entry.epoch, entry.n)
        if position in run.journal or position <= run.folded:
            return Verdict.ACCEPTED
        if run.owner is None:
            return Verdict.FENCED
        for message_id in entry.consumes:
            run.inbox.pop(message_id, None)
        if entry.rest is None:
            run.journal[position] = entry.data
        elif entry.rest.delete:
            self.runs.remove(run.id)
        else:
            run.folded = position
            self._rest(run, entry.data, entry.rest)
        return Verdict.ACCEPTED

    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        """Replace an unowned run's state; only its inbox stays."""
        now = run.updated_at = self.clock.now()
        run.snapshot = snapshot
        run.journal.clear()
        run.owner = None
        run.takeovers = 0
        run.status = rest.status
        run.awaits = rest.awaits
        has_awaited = any(message.name in rest.awaits for message in run.inbox.values())
        self._wake(run, now if has_awaited else rest.wake_at)

    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        run = self._find(request.id)
        if run is None:
            if request.create is None:
                return None
            run = self._create(request.id, request.create, request.workflow)
            return self._grant(run, request.owner, now, request.ttl, created=True)
        is_abandoned = run.is_orphaned(now) or run.owner == request.instead_of
        if not request.existing or not (is_abandoned or run.owner in (None, request.owner)):
            return None
        return self._grant(run, request.owner, now, request.ttl, is_abandoned=is_abandoned)

    def _grant(
        self,
        run: Run,
        owner: str,
        now: datetime,
        ttl: timedelta,
        *,
        created: bool = False,
        is_abandoned: bool = False,
    ) -> Granted:
        if any(epoch == run.epoch for epoch, _ in run.journal):
            run.takeovers = 0
        elif run.owner is not None and is_abandoned:
            run.takeovers += 1
        run.epoch = next(self.runs.epochs)
        run.owner = owner
        run.status = "running"
        run.awaits = ()
        self._wake(run, now + ttl)
        inbox = tuple(run.inbox.values())
        lease = Lease(self._id(run), owner, run.epoch, now + ttl, bool(inbox))
        return read_grant(lease, run.merged, now, inbox, run.takeovers, created)

    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._owned(lease)
        if run is None:
            return None
        self._wake(run, expires_at)
        return Lease(lease.id, lease.owner, lease.epoch, expires_at, bool(run.inbox))

    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        if self._find(new.id) is not None:
            return False
        self._wake(self._create(new.id, new.snapshot, new.workflow), new.wake_at or now)
        return True

    def _create(self, id: str, snapshot: bytes, workflow: str | None = None) -> Run:
        run = Run(
            id=self.prefix + id,
            workflow=workflow,
            snapshot=snapshot,
            updated_at=self.clock.now(),
            epoch=next(self.runs.epochs),
        )
        self.runs.add(run)
        return run

    def _wake(self, run: Run, at: datetime | None) -> None:
        """Set when the run is due: its wake time, or the end of its owner's lease."""
        run.wake_at = at = None if at is None else as_utc(at)
        self.runs.index.put(run)
        # An orphan is not announced: a lease expires without any call to the store.
        if run.owner is None and at is not None and at <= self.clock.now():
            self._notify()

    def _notify(self) -> None:
        for listener in self.runs.listeners:
            listener.set()

    def _find(self, id: str) -> Run | None:
        return self.runs.get(self.prefix + id)

    def _owned(self, lease: Lease) -> Run | None:
        """Return the run if the lease is still the current one."""
        run = self._find(lease.id)
        if run is None or run.epoch != lease.epoch or run.owner != lease.owner:
            return None
        return run

    def _mine(self) -> Iterator[Run]:
        return (run for run in self.runs if run.id.startswith(self.prefix))

    def _id(self, run: Run) -> str:
        return run.id[len(self.prefix) :]
