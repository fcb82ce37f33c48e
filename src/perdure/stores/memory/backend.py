"""The operations of a memory store."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice

from msgspec.structs import replace

from perdure.clock import Clock, as_utc
from perdure.snapshot import Snapshot, is_over
from perdure.store import (
    INBOX_PAGE,
    Count,
    Delivery,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Query,
    QueueStats,
    Receipt,
    Rest,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
)
from perdure.stores._backend import Ownership, PruneRequest
from perdure.stores._checks import number_after
from perdure.stores._handoff import Claimant
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted, read_grant
from perdure.stores._searching import Position, SearchResult, count, find
from perdure.stores.memory.documents import MemoryDocuments
from perdure.stores.memory.rows import Run, Runs
from perdure.stores.memory.transaction import MemoryTransaction


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
        run = self._find(id) or self._create(id, data, self.clock.now())
        run.epoch = next(self.runs.epochs)
        run.workflow, run.queue = workflow, ""
        self._rest(run, data, rest)

    async def load(self, id: str) -> Snapshot | None:
        """Return the merged snapshot."""
        run = self._find(id)
        return None if run is None else run.merged_snapshot()

    async def delete(self, id: str) -> bool:
        """Delete a run."""
        return self.runs.remove(self.prefix + id)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Write the entries one by one."""
        return [self._append(entry) for entry in entries]

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        """Lease runs by id, creating those that are missing."""
        now = self.clock.now()
        return [self._acquire(request, now) for request in requests]

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Return the owner of each run."""
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
        for run in filter(None, map(self._find_owned, leases)):
            run.owner = None
            self._wake(run, at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        """Create runs that wait for a claim."""
        now = self.clock.now()
        return [self._enqueue(run, now) for run in runs]

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        """Return due runs from the index."""
        runs = self.runs.index.due(now, limit, supports, queues, self.prefix)
        return [Due(self._id(run), run.wake_at) for run in runs if run.wake_at is not None]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        """Lease due runs from the index."""
        now = self.clock.now()
        runs = self.runs.index.take(now, limit, supports, queues, self.prefix)
        return [self._grant(run, owner, now, ttl, is_abandoned=True) for run in runs]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues from the index."""
        names = self.runs.index.queues(now, self.prefix)
        return [name for name in names if name >= low and (high is None or name < high)][:limit]

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        """Put messages in inboxes one by one."""
        receipts, woken_runs = self._deliver(messages)
        for run in woken_runs:
            self._wake(run, self.clock.now())
        return receipts

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        """Put messages in inboxes one by one, then lease runs that await them."""
        receipts, woken_runs = self._deliver(messages)
        owner, ttl, limit, _ = claimant
        grants: list[Granted] = []
        for run in woken_runs:
            now = self.clock.now()
            is_executable = not run.queue and claimant.can_execute(run.workflow, run.version)
            if is_executable and len(grants) < limit:
                grants.append(self._grant(run, owner, now, ttl))
            else:
                self._wake(run, now)
        return receipts, grants

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        """Return the messages of a run."""
        run = self._find(id)
        messages = () if run is None else run.inbox.values()
        last = number_after(after)
        return [*islice((each for each in messages if int(each.id) > last), limit)]

    async def prune(self, request: PruneRequest) -> int:
        """Delete old runs, found by a scan."""
        before = self.clock.now() - request.older_than
        old = (
            run.id
            for run in self._mine()
            if run.status in request.statuses
            and run.updated_at < before
            and request.workflow in (None, run.workflow)
            and all(tag in run.tags for tag in request.tags)
        )
        ids = [*islice(old, request.limit)]
        for id in () if request.dry_run else ids:
            self.runs.remove(id)
        return len(ids)

    async def stats(self) -> Stats:
        """Count the runs by a scan."""
        now = self.clock.now()
        by_queue: dict[str, QueueStats] = {}
        for run in self._mine():
            if run.wake_at is not None and not run.queue.startswith("~"):
                name = run.queue.partition("/")[0]
                by_queue[name] = _count_run(by_queue.get(name, QueueStats()), run, now)
        by_queue = {name: queue for name, queue in by_queue.items() if queue != QueueStats()}
        oldest = [queue.oldest_due for queue in by_queue.values() if queue.oldest_due is not None]
        by_status = Counter[str](run.status for run in self._mine())
        return Stats(by_status, min(oldest, default=None), by_queue)

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find runs by a scan: the runs of one process are few enough."""
        return find(self._summaries(), query, limit, after)

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        """Return runs by id."""
        return [
            None if run is None else replace(run.to_summary(self.prefix), revision=run.revision())
            for run in map(self._find, ids)
        ]

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        """Count runs by a scan."""
        return count(self._summaries(), query, cap)

    async def notifications(self) -> AsyncGenerator[None]:
        """Yield when a run of any store that shares these runs becomes due."""
        listener = asyncio.Event()
        self.runs.listeners[listener] = None
        try:
            while await listener.wait() and not self._is_closed:
                listener.clear()
                yield
        finally:
            del self.runs.listeners[listener]

    async def transact(
        self, id: str, epoch: int, work: Callable[[MemoryTransaction], Awaitable[Entry]]
    ) -> Verdict:
        """Commit what `work` writes to the table with its entry."""
        async with self.runs.table.begin() as transaction:
            run = self._find(id)
            if run is None:
                return Verdict.UNKNOWN
            if run.epoch != epoch or run.owner is None:
                return Verdict.FENCED
            entry = await work(transaction)
            # If the entry already existed, so did the user's writes, and these are rolled back.
            is_new = not run.includes(entry)
            verdict = self._append(entry)
            if is_new and verdict is Verdict.ACCEPTED:
                transaction.commit()
            return verdict

    def _append(self, entry: Entry) -> Verdict:
        run = self.runs.get(self.prefix + entry.id)
        if run is None:
            return Verdict.UNKNOWN
        if entry.epoch != run.epoch:
            return Verdict.FENCED
        if run.includes(entry):
            return Verdict.ACCEPTED
        if run.owner is None:
            return Verdict.FENCED
        for message_id in entry.consumes:
            run.inbox.pop(message_id, None)
        if entry.rest is None:
            run.journal[entry.epoch, entry.n] = entry.data
        elif entry.rest.delete:
            self.runs.remove(run.id)
        else:
            run.folded = (entry.epoch, entry.n)
            self._rest(run, entry.data, entry.rest)
        return Verdict.ACCEPTED

    def _deliver(self, messages: Sequence[NewMessage]) -> tuple[list[Receipt], list[Run]]:
        """Put messages in inboxes; return also the unowned runs that await one of them."""
        receipts: list[Receipt] = []
        woken_runs: dict[str, Run] = {}
        for message in messages:
            run, receipt = self._find(message.to), self._send(message)
            receipts.append(receipt)
            is_new = receipt.delivery is Delivery.DELIVERED
            if run is not None and is_new and message.name in run.awaits:
                woken_runs[run.id] = run
        return receipts, [*woken_runs.values()]

    def _send(self, message: NewMessage) -> Receipt:
        run = self._find(message.to)
        if run is None:
            return Receipt(Delivery.UNKNOWN)
        if message.dedup_id is not None and message.dedup_id in run.dedup_ids:
            return Receipt(Delivery.DUPLICATE, len(run.inbox))
        if is_over(run.status):
            return Receipt(Delivery.OVER)
        if message.dedup_id is not None:
            run.dedup_ids.add(message.dedup_id)
        id, now = str(next(self.runs.message_ids)), self.clock.now()
        run.inbox[id] = Message(id, message.name, message.payload, now)
        return Receipt(Delivery.DELIVERED, len(run.inbox))

    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        """Replace an unowned run's state; only its inbox and its queue stay."""
        now = run.updated_at = self.clock.now()
        run.snapshot = snapshot
        run.journal.clear()
        run.owner = None
        run.takeovers = 0
        run.status = rest.status
        run.awaits = rest.awaits
        run.version = run.version if rest.version is None else rest.version
        run.tags = run.tags if rest.tags is None else rest.tags
        run.summary = run.summary if rest.summary is None else rest.summary
        awaited_messages = [each for each in run.inbox.values() if each.name in rest.awaits]
        self._wake(run, now if awaited_messages else rest.wake_at)

    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        run = self._find(request.id)
        if run is None:
            if request.create is None:
                return None
            run = self._create(request.id, request.create, now, request)
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
        if run.journal and any(epoch == run.epoch for epoch, _ in run.journal):
            run.takeovers = 0
        elif run.owner is not None and is_abandoned:
            run.takeovers += 1
        run.epoch = next(self.runs.epochs)
        run.owner = owner
        run.status = "running"
        run.awaits = ()
        expires_at = now + ttl
        self._wake(run, expires_at)
        inbox = tuple(islice(run.inbox.values(), INBOX_PAGE)) if run.inbox else ()
        lease = Lease(self._id(run), owner, run.epoch, expires_at, bool(inbox))
        return read_grant(
            lease,
            run.merged_snapshot,
            now,
            inbox,
            run.takeovers,
            created,
            queue=run.queue,
            version=run.version,
        )

    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._find_owned(lease)
        if run is None:
            return None
        self._wake(run, expires_at)
        return Lease(lease.id, lease.owner, lease.epoch, expires_at, bool(run.inbox))

    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        if self._find(new.id) is not None:
            return False
        run = self._create(new.id, new.snapshot, now, new)
        run.queue = new.queue
        if new.rest is None:
            run.status = "queued"
            self._wake(run, new.wake_at or now - new.head_start)
        else:
            self._rest(run, new.snapshot, new.rest)
        return True

    def _create(
        self, id: str, snapshot: bytes, now: datetime, header: NewRun | LeaseRequest | None = None
    ) -> Run:
        run = Run(
            id=self.prefix + id,
            snapshot=snapshot,
            updated_at=now,
            created_at=now,
            epoch=next(self.runs.epochs),
        )
        if header is not None:
            run.workflow, run.version = header.workflow, header.version
            run.tags, run.summary = header.tags, header.summary
        self.runs.add(run)
        return run

    def _wake(self, run: Run, at: datetime | None) -> None:
        """Set when the run is due: its wake time, or the end of its owner's lease."""
        run.wake_at = at = None if at is None else as_utc(at)
        self.runs.index.put(run)
        # An orphan is not announced, because a lease expires without any call to the store. Nor is
        # a run in a system queue: a returned permit means no work for a worker.
        is_announced = run.owner is None and not run.queue.startswith("~")
        if is_announced and at is not None and at <= self.clock.now():
            self._notify()

    def _notify(self) -> None:
        for listener in self.runs.listeners:
            listener.set()

    def _find(self, id: str) -> Run | None:
        return self.runs.get(self.prefix + id)

    def _find_owned(self, lease: Lease) -> Run | None:
        """Return the run if the lease is still the current one."""
        run = self._find(lease.id)
        if run is None or run.epoch != lease.epoch or run.owner != lease.owner:
            return None
        return run

    def _mine(self) -> Iterator[Run]:
        """Yield the runs of this store, without the engine's own."""
        system = self.prefix + "~"
        runs = (run for run in self.runs if run.id.startswith(self.prefix))
        return (run for run in runs if not run.id.startswith(system))

    def _summaries(self) -> Iterator[RunSummary]:
        return (run.to_summary(self.prefix) for run in self.runs if run.id.startswith(self.prefix))

    def _id(self, run: Run) -> str:
        return run.id[len(self.prefix) :]


def _count_run(queue: QueueStats, run: Run, now: datetime) -> QueueStats:
    """Return the statistics of a queue with one more run counted."""
    assert run.wake_at is not None, "the run has a wake time"
    if run.wake_at > now:
        return QueueStats(queue.due, queue.leased + (run.owner is not None), queue.oldest_due)
    oldest = min(queue.oldest_due or run.wake_at, run.wake_at)
    return QueueStats(queue.due + 1, queue.leased, oldest)
