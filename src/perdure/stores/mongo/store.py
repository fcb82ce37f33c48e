"""Runs in MongoDB: on a server that is alone, a replica set or a sharded cluster."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from perdure import codec
from perdure.errors import ValueTooLarge
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
from perdure.stores._reading import Granted, acquire_readable, claim_readable
from perdure.stores.mongo.append import Appender
from perdure.stores.mongo.cleanup import Sweeper
from perdure.stores.mongo.connection import (
    Connection,
)
from perdure.stores.mongo.inbox import inbox, send
from perdure.stores.mongo.journal import Positions
from perdure.stores.mongo.leases import Epochs, Leases
from perdure.stores.mongo.notify import notifications
from perdure.stores.mongo.runs import Runs
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.transaction import MongoTransaction, Transactor
from perdure.validation import check_id, check_limit, check_prefix


class MongoStore(AsyncCloseable):
    """Keeps runs in MongoDB; see `mongo`."""

    def __init__(
        self, connection: Connection[Collections], *, prefix: str, capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self._connection = connection
        self._prefix = prefix
        self._sweeper = Sweeper(connection)
        positions, epochs = Positions(connection.clock), Epochs()
        self._runs = Runs(prefix, epochs, self._sweeper)
        self._leases = Leases(prefix, positions, epochs, connection.server_clock)
        self._appender = Appender(prefix, positions, self._sweeper)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {id!r}", data)
        workflow, rest = workflow_of(snapshot), rest_of(snapshot)
        async with self._connection.use() as db:
            await self._runs.save(db, check_id(id), data, workflow, rest)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        async with self._connection.use() as db:
            return await self._runs.load(db, check_id(id))

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        async with self._connection.use() as db:
            return await self._runs.delete(db, check_id(id))

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
        async with self._connection.use() as db:
            return await self._runs.page(db, prefix, limit, status, workflow, after)

    async def close(self) -> None:
        """Finish what is under way, and close the client if it is the store's own."""
        await self._sweeper.close()
        await self._connection.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one round trip and give a verdict for each, in order."""
        check_entries(entries, self.capabilities.max_value_size)
        async with self._connection.use() as db:
            return await self._appender.append(db, entries)

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            check_id(request.id)
            self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
        async with self._connection.use() as db:
            granted = await self._leases.acquire(db, requests)
        return await acquire_readable(granted, self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        async with self._connection.use() as db:
            return await self._leases.renew(db, leases, ttl)

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        async with self._connection.use() as db:
            await self._leases.release(db, leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        for run in runs:
            check_id(run.id)
            self._check_size(f"the snapshot of run {run.id!r}", run.snapshot)
        async with self._connection.use() as db:
            return await self._leases.enqueue(db, runs)

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose time has come by `now`, earliest first."""
        check_limit(limit)
        async with self._connection.use() as db:
            return await self._leases.due(db, now, limit, workflows)

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

        async def claim(left: int) -> list[Granted]:
            async with self._connection.use() as db:
                return await self._leases.claim(db, owner, ttl, left, workflows)

        return await claim_readable(claim, check_limit(limit), self.release)

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        async with self._connection.use() as db:
            return await send(db, self._prefix + check_id(id), name, payload, dedup_id)

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        async with self._connection.use() as db:
            return await inbox(db, self._prefix + check_id(id))

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        check_limit(limit)
        async with self._connection.use() as db:
            return await self._runs.prune(db, older_than, status, limit)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        async with self._connection.use() as db:
            return await self._runs.stats(db)

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)


class MongoReplicaSetStore(MongoStore):
    """Keeps runs in MongoDB that has transactions and change streams; see `mongo`."""

    def __init__(
        self, connection: Connection[Collections], *, prefix: str, capabilities: Capabilities
    ) -> None:
        super().__init__(connection, prefix=prefix, capabilities=capabilities)
        self._transactor = Transactor(connection, prefix, self._appender)

    async def transact(
        self, id: str, epoch: int, work: Callable[[MongoTransaction], Awaitable[Entry]], /
    ) -> Verdict:
        """Commit what `work` writes with its `MongoTransaction` together with the entry it returns.

        Work that meets another transaction on the same documents fails with the driver's error, as
        it would outside of perdure; it is not called twice.
        """
        limit = self.capabilities.max_value_size
        return await self._transactor.transact(
            check_id(id), epoch, work, lambda entry: check_entries([entry], limit)
        )

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process."""
        async with self._connection.use() as db:
            async for hint in notifications(db):
                yield hint
