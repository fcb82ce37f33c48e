"""The contract's verbs for a database with the SQLite schema, however it is reached."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from perdure import codec
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, workflow_of
from perdure.store import (
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
    RunSummary,
    Stats,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._awaitly import as_snapshot
from perdure.stores._reading import (
    Granted,
    acquire_readable,
    claim_readable,
    merged,
    read_grant,
    reading,
)
from perdure.stores.sqlite.leases import Leased, LeaseVerbs
from perdure.stores.sqlite.runs import RunVerbs, Verb
from perdure.stores.sqlite.statements import Tables
from perdure.stores.sqlite.transaction import Session, Transaction
from perdure.validation import check_id, check_limit, check_prefix

T = TypeVar("T")

_SMALL = 64 * 1024


class SqliteSchemaStore(AsyncCloseable):
    """Checks what comes in, hands a verb on, and makes records of what comes back."""

    def __init__(
        self,
        tables: Tables,
        prefix: str,
        capabilities: Capabilities,
        now: Callable[[], int | None],
    ) -> None:
        self.capabilities = capabilities
        self._runs = RunVerbs(tables, check_prefix(prefix), now)
        self._leases = LeaseVerbs(tables, prefix, now)

    @abstractmethod
    async def _write(
        self, verb: Callable[[], Verb[T]], *, repeatable: bool = False, lone: bool = False
    ) -> T:
        """Give what the verb gives once it is committed.

        One that is `repeatable` may be done again: it is fenced or numbered, and harms nobody. A
        `lone` one is small, and no other goes with it.
        """

    @abstractmethod
    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        """Give what the verb gives of all that is committed."""

    @abstractmethod
    async def _session(self) -> Session:
        """Give a transaction that has not begun."""

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {id!r}", data)
        workflow, rest = workflow_of(snapshot), rest_of(snapshot)
        await self._write(partial(self._runs.save, check_id(id), data, workflow, rest))

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None; awaitly's resume states come as snapshots."""
        found = await self._read(partial(self._runs.load, check_id(id)))
        return None if found is None else _read_run(id, *found)

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        return await self._write(partial(self._runs.delete, check_id(id)))

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
        check_prefix(prefix)
        check_limit(limit)
        return await self._read(partial(self._runs.page, prefix, limit, status, workflow, after))

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction and give a verdict for each, in order."""
        check_entries(entries, self.capabilities.max_value_size)
        lone = len(entries) == 1 and len(entries[0].data) < _SMALL
        return await self._write(partial(self._runs.append, entries), repeatable=True, lone=lone)

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            check_id(request.id)
            self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
        lone = len(requests) == 1 and len(requests[0].create or b"") < _SMALL
        leased = await self._write(partial(self._leases.acquire, requests), lone=lone)
        return await acquire_readable([one and _grant(one) for one in leased], self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        return await self._write(partial(self._leases.renew, leases, ttl), repeatable=True)

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        await self._write(partial(self._leases.release, leases, wake_at), repeatable=True)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        for run in runs:
            check_id(run.id)
            self._check_size(f"the snapshot of run {run.id!r}", run.snapshot)
        return await self._write(partial(self._leases.enqueue, runs))

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose time has come by `now`, earliest first."""
        return await self._read(partial(self._leases.due, now, check_limit(limit), workflows))

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
        return await claim_readable(
            lambda left: self._claim(owner, ttl, left, workflows), check_limit(limit), self.release
        )

    async def _claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]:
        leased = await self._write(partial(self._leases.claim, owner, ttl, limit, workflows))
        return [_grant(one) for one in leased]

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        return await self._write(partial(self._runs.send, check_id(id), name, payload, dedup_id))

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        return await self._read(partial(self._runs.inbox, check_id(id)))

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Commit what `work` writes through its `Transaction` together with the entry it returns.

        Other writes of this store wait until it is done, so `work` must not call the store.
        """
        session = await self._session()
        try:
            verdict = await session.begin(partial(self._runs.fence, check_id(id), epoch))
            if verdict is not Verdict.ACCEPTED:
                return verdict
            entry = await session.enter(work, Transaction(session))
            if (entry.id, entry.epoch) != (id, epoch):
                expected = f"a function that gives an entry of run {id!r} and epoch {epoch}"
                raise InvalidArgument("work", entry, expected)
            check_entries([entry], self.capabilities.max_value_size)
            # An entry that was there before means that the user's writes were, too.
            await session.finish(partial(self._runs.record, entry))
            return Verdict.ACCEPTED
        finally:
            await session.end()

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        return await self._write(partial(self._runs.prune, older_than, status, check_limit(limit)))

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        return await self._read(self._runs.stats)

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)


def _read_run(id: str, parts: Sequence[bytes], updated_at: datetime) -> Snapshot:
    with reading(id):
        deltas: Any = codec.loads(b"[%s]" % b",".join(parts[1:]))
        return merged(as_snapshot(codec.loads(parts[0]), updated_at), *deltas)


def _grant(leased: Leased) -> Granted:
    lease, now = leased.lease, leased.now
    read = partial(_read_run, lease.id, leased.parts, now)
    return read_grant(lease, read, now, leased.inbox, leased.takeovers, leased.created)
