"""A store in this process's memory: the reference of the contract, and the default."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime, timedelta
from heapq import nlargest
from itertools import islice

from perdure import codec
from perdure.clock import Clock, SystemClock, as_utc, check_clock, isoformat, parse_iso
from perdure.errors import InvalidArgument, StoreClosed, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, is_over, workflow_of
from perdure.store import (
    MAX_VALUE_SIZE,
    AsyncCloseable,
    Capabilities,
    Delivery,
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    Rest,
    RunSummary,
    Stats,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._reading import Granted, acquire_readable, claim_readable, read_grant
from perdure.stores.memory.rows import Run, Shelf
from perdure.validation import check_id, check_limit, check_prefix


class MemoryStore(AsyncCloseable):
    """Keeps runs in this process's memory, encoded as a database would; they end with the process.

    `shares` makes it another store on the same runs, as a second process would be on a database.

        async with MemoryStore() as store:
            await store.save("checkout-123", snapshot)
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        clock: Clock = SystemClock(),
        max_value_size: int = MAX_VALUE_SIZE,
        shares: "MemoryStore | None" = None,
    ) -> None:
        self.capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            notify=True,
            maintenance=True,
            shared="process",
            survives="nothing",
            max_value_size=max_value_size,
        )
        self._prefix = check_prefix(prefix)
        self._clock = check_clock(clock)
        if shares is not None and not isinstance(shares, MemoryStore):
            raise InvalidArgument("shares", shares, "a MemoryStore")
        self._shelf: Shelf = Shelf() if shares is None else shares._shelf
        self._runs = self._shelf.runs
        self._agenda = self._shelf.agenda
        self._closed = False

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        key = self._key(id)
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {id!r}", data)
        rest = rest_of(snapshot)
        run = self._runs.get(key) or self._create(key, data)
        run.epoch = next(self._shelf.epochs)
        run.workflow = workflow_of(snapshot)
        self._lay(run, data, rest)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        run = self._runs.get(self._key(id))
        return None if run is None else run.merged()

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        run = self._runs.pop(self._key(id), None)
        if run is None:
            return False
        self._agenda.drop(run)
        return True

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Give runs newest first, at most `limit`."""
        key_prefix = self._prefix + check_prefix(prefix)
        mark = None if after is None else self._mark(after)
        chosen = (
            run
            for run in self._mine()
            if run.id.startswith(key_prefix)
            and (status is None or run.status == status)
            and (workflow is None or run.workflow == workflow)
            and (mark is None or run.place() < mark)
        )
        return [self._listed(run) for run in nlargest(check_limit(limit), chosen, key=Run.place)]

    async def close(self) -> None:
        """Refuse further calls; stores that share the runs go on."""
        self._closed = True

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries and give a verdict for each, in order."""
        self._check_open()
        check_entries(entries, self.capabilities.max_value_size)
        return [self._append(entry) for entry in entries]

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            check_id(request.id)
            self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
        now = self._now()
        return await acquire_readable(
            [self._acquire(request, now) for request in requests], self.release
        )

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        expires_at = self._now() + ttl
        return [self._renew(lease, expires_at) for lease in leases]

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        at = self._now() if wake_at is None else as_utc(wake_at, "wake_at")
        for lease in leases:
            run = self._owned(lease)
            if run is not None:
                run.owner = None
                self._wake(run, at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        for new in runs:
            check_id(new.id)
            self._check_size(f"the snapshot of run {new.id!r}", new.snapshot)
        now = self._now()
        return [self._enqueue(new, now) for new in runs]

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs that are due at `now`, earliest first."""
        self._check_open()
        runs = self._agenda.due(as_utc(now), check_limit(limit), workflows, self._prefix)
        return [Due(self._id(run), run.wake_at) for run in runs if run.wake_at is not None]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first."""
        now = self._now()

        async def claim(left: int) -> list[Granted]:
            runs = self._agenda.due(now, left, workflows, self._prefix)
            return [self._grant(run, owner, now, ttl) for run in runs]

        return await claim_readable(claim, check_limit(limit), self.release)

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        run = self._runs.get(self._key(id))
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        if run is None:
            return Delivery.UNKNOWN
        if dedup_id is not None and dedup_id in run.known_mail:
            return Delivery.DUPLICATE
        if is_over(run.status):
            return Delivery.OVER
        if dedup_id is not None:
            run.known_mail.add(dedup_id)
        message = Message(str(next(self._shelf.message_ids)), name, payload, self._now())
        run.mail[message.id] = message
        if name in run.awaits:
            self._wake(run, message.sent_at)
        return Delivery.DELIVERED

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        run = self._runs.get(self._key(id))
        return [] if run is None else [*run.mail.values()]

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        before = self._now() - older_than
        old = (
            run
            for run in self._mine()
            if is_over(run.status) and status in (None, run.status) and run.updated_at < before
        )
        pruned = [*islice(old, check_limit(limit))]
        for run in pruned:
            del self._runs[run.id]
            self._agenda.drop(run)
        return len(pruned)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        by_status = Counter[str](run.status for run in self._mine())
        oldest = await self.due(self._now(), 1)
        return Stats(by_status, oldest[0].wake_at if oldest else None)

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due."""
        self._check_open()
        listener = asyncio.Event()
        self._shelf.listeners.add(listener)
        try:
            while True:
                await listener.wait()
                listener.clear()
                yield
        finally:
            self._shelf.listeners.discard(listener)

    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is None:
            return Verdict.UNKNOWN
        if entry.epoch != run.epoch:
            return Verdict.FENCED
        place = (entry.epoch, entry.n)
        if place in run.journal or place <= run.folded:
            return Verdict.ACCEPTED
        if run.owner is None:
            return Verdict.FENCED
        for message_id in entry.consumes:
            run.mail.pop(message_id, None)
        if entry.rest is None:
            run.journal[place] = entry.data
        elif entry.rest.delete:
            del self._runs[self._prefix + entry.id]
            self._agenda.drop(run)
        else:
            run.folded = place
            self._lay(run, entry.data, entry.rest)
        return Verdict.ACCEPTED

    def _lay(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        """Put a run to rest: what it was before is gone, but for its inbox."""
        now = run.updated_at = self._now()
        run.snapshot = snapshot
        run.journal.clear()
        run.owner = None
        run.takeovers = 0
        run.status = rest.status
        run.awaits = rest.awaits
        expected = any(message.name in rest.awaits for message in run.mail.values())
        self._wake(run, now if expected else rest.wake_at)

    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        key = self._prefix + request.id
        run = self._runs.get(key)
        if run is None:
            if request.create is None:
                return None
            run = self._create(key, request.create, request.workflow)
            return self._grant(run, request.owner, now, request.ttl, created=True)
        free = run.owner in (None, request.owner) or run.orphaned(now)
        if not free or not request.existing:
            return None
        return self._grant(run, request.owner, now, request.ttl)

    def _grant(
        self, run: Run, owner: str, now: datetime, ttl: timedelta, *, created: bool = False
    ) -> Granted:
        if any(epoch == run.epoch for epoch, _ in run.journal):
            run.takeovers = 0
        elif run.orphaned(now):
            run.takeovers += 1
        run.epoch = next(self._shelf.epochs)
        run.owner = owner
        run.status = "running"
        run.awaits = ()
        self._wake(run, now + ttl)
        mail = tuple(run.mail.values())
        lease = Lease(self._id(run), owner, run.epoch, now + ttl, bool(mail))
        return read_grant(lease, run.merged, now, mail, run.takeovers, created)

    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._owned(lease)
        if run is None:
            return None
        self._wake(run, expires_at)
        return Lease(lease.id, lease.owner, lease.epoch, expires_at, bool(run.mail))

    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        key = self._prefix + new.id
        if key in self._runs:
            return False
        wake_at = now if new.wake_at is None else as_utc(new.wake_at, "wake_at")
        self._wake(self._create(key, new.snapshot, new.workflow), wake_at)
        return True

    def _create(self, key: str, snapshot: bytes, workflow: str | None = None) -> Run:
        epoch = next(self._shelf.epochs)
        now = self._now()
        run = Run(id=key, workflow=workflow, snapshot=snapshot, updated_at=now, epoch=epoch)
        self._runs[key] = run
        return run

    def _wake(self, run: Run, at: datetime | None) -> None:
        run.wake_at = at
        self._agenda.put(run)
        # The end of a lease comes with time: nothing tells of it.
        if run.owner is None and at is not None and at <= self._now():
            for listener in self._shelf.listeners:
                listener.set()

    def _owned(self, lease: Lease) -> Run | None:
        run = self._runs.get(self._prefix + lease.id)
        if run is None or run.epoch != lease.epoch or run.owner != lease.owner:
            return None
        return run

    def _mine(self) -> Iterator[Run]:
        self._check_open()
        return (run for run in self._runs.values() if run.id.startswith(self._prefix))

    def _listed(self, run: Run) -> RunSummary:
        updated_at = isoformat(run.updated_at)
        cursor = f"{run.updated_at.isoformat()} {self._id(run)}"
        return RunSummary(self._id(run), updated_at, run.status, run.workflow, cursor)

    def _mark(self, cursor: str) -> tuple[datetime, str]:
        time, _, id = cursor.partition(" ")
        return parse_iso(time, "after"), self._prefix + id

    def _key(self, id: str) -> str:
        self._check_open()
        return self._prefix + check_id(id)

    def _id(self, run: Run) -> str:
        return run.id[len(self._prefix) :]

    def _now(self) -> datetime:
        self._check_open()
        return self._clock.now()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this MemoryStore was closed; open a new one")

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)
