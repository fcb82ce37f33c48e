"""The stores in MongoDB: on a standalone server, and on a replica set or a sharded cluster."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta

from perdure.engine.tasks import cancel_and_wait
from perdure.snapshot import Snapshot
from perdure.store import (
    Capabilities,
    Count,
    Due,
    Entry,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Query,
    Receipt,
    Rest,
    RunSummary,
    Stats,
    SupportedVersions,
    Verdict,
)
from perdure.stores._backend import Ownership, PruneRequest
from perdure.stores._handoff import Claimant, HandoffShell
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores._shell import NotifyShell, TransactionShell
from perdure.stores.mongo import inbox
from perdure.stores.mongo.append import Appender
from perdure.stores.mongo.cleanup import Cleanup
from perdure.stores.mongo.connection import Collection, Connection
from perdure.stores.mongo.handoff import Handoffs
from perdure.stores.mongo.journal import Positions, message_name
from perdure.stores.mongo.keyvalue import KeyValueCollection
from perdure.stores.mongo.leases import Epochs, Leases
from perdure.stores.mongo.maintenance import Maintenance
from perdure.stores.mongo.notify import notifications
from perdure.stores.mongo.runs import Runs
from perdure.stores.mongo.schedule import due_queues
from perdure.stores.mongo.schema import Collections
from perdure.stores.mongo.search import Searcher
from perdure.stores.mongo.sending import send
from perdure.stores.mongo.server_clock import ServerClock
from perdure.stores.mongo.transaction import MongoTransaction, transact

logger = logging.getLogger(__name__)

# Seconds that closing waits for work in the background.
_CLOSE_TIMEOUT = 2.0


class _Backend:
    """Runs in MongoDB whose `_id` starts with `prefix`."""

    def __init__(self, connection: Connection[Collections], prefix: str) -> None:
        self._connection = connection
        self._prefix = prefix
        self.documents = KeyValueCollection(connection, _documents, scope_of(prefix))
        self._cleanup = Cleanup(connection)
        positions, epochs = Positions(connection.clock), Epochs()
        self._positions = positions
        self._runs = Runs(prefix, epochs, self._cleanup)
        self._leases = Leases(prefix, positions, epochs, ServerClock(connection.server_time))
        self._handoffs = Handoffs(prefix, positions, epochs)
        self._appender = Appender(prefix, positions, self._cleanup)
        self._maintenance = Maintenance(prefix, epochs, self._cleanup)
        self._searcher = Searcher(prefix)

    async def open(self) -> None:
        await self._connection.open()

    def forget_loop(self) -> None:
        for part in (self._connection, self._cleanup, self._runs.loader, self._appender):
            part.forget_loop()

    async def close(self) -> None:
        await _finish_soon([*self._appender.marking_tasks(), *self._cleanup.start_now()])
        await self._connection.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        with self._connection.use() as db:
            await self._runs.save(db, id, data, workflow, rest)

    async def load(self, id: str) -> Snapshot | None:
        with self._connection.use() as db:
            return await self._runs.load(db, id)

    async def delete(self, id: str) -> bool:
        with self._connection.use() as db:
            return await self._runs.delete(db, id)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        with self._connection.use() as db:
            return await self._appender.append(db, entries)

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        with self._connection.use() as db:
            return await self._leases.acquire(db, requests)

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        with self._connection.use() as db:
            return await self._leases.owners(db, ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        with self._connection.use() as db:
            return await self._leases.renew(db, leases, ttl)

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        with self._connection.use() as db:
            await self._leases.release(db, leases, wake_at)

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        with self._connection.use() as db:
            return await self._leases.enqueue(db, runs)

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        with self._connection.use() as db:
            return await self._leases.due(db, now, limit, supports, queues)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        with self._connection.use() as db:
            return await self._leases.claim(db, owner, ttl, limit, supports, queues)

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        with self._connection.use() as db:
            return await due_queues(db, self._prefix, now, limit, low, high)

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        await self._finish_consuming(messages)
        with self._connection.use() as db:
            return await send(db, self._prefix, messages)

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        await self._finish_consuming(messages)
        with self._connection.use() as db:
            return await self._handoffs.send_and_claim(db, messages, claimant)

    async def _finish_consuming(self, messages: Sequence[NewMessage]) -> None:
        # A receipt must take into account what this process has consumed.
        await self._appender.finish({self._prefix + message.to for message in messages})

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        key = self._prefix + id
        position = self._positions.latest(key)
        with self._connection.use() as db:
            messages = await inbox.inbox(db, key, after, limit)
        if position is not None:
            position.found.update(message_name(message.id) for message in messages)
        return messages

    async def prune(self, request: PruneRequest) -> int:
        with self._connection.use() as db:
            return await self._maintenance.prune(db, request)

    async def stats(self) -> Stats:
        with self._connection.use() as db:
            return await self._maintenance.stats(db)

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        with self._connection.use() as db:
            return await self._searcher.search(db, query, limit, after)

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        with self._connection.use() as db:
            return await self._searcher.summaries(db, ids)

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        with self._connection.use() as db:
            return await self._searcher.counts(db, query, cap)

    async def transact(
        self, id: str, epoch: int, work: Callable[[MongoTransaction], Awaitable[Entry]]
    ) -> Verdict:
        return await transact(self._connection, self._appender, self._prefix + id, epoch, work)

    def notifications(self) -> AsyncGenerator[None]:
        return notifications(self._connection)


class MongoStore(HandoffShell[_Backend]):
    """Keeps runs in MongoDB; see `mongo`."""

    def __init__(
        self, connection: Connection[Collections], prefix: str, capabilities: Capabilities
    ) -> None:
        super().__init__(_Backend(connection, prefix), "MongoDB", capabilities)


class MongoReplicaSetStore(MongoStore, TransactionShell[_Backend], NotifyShell[_Backend]):
    """Keeps runs in a MongoDB with transactions and change streams; see `mongo`.

    `transact` passes a `MongoTransaction` to the work. Work that conflicts with another transaction
    fails with the driver's error, as it would outside perdure, and is not called again.
    """


async def _finish_soon(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for work in the background, and cancel what takes long.

    Nothing depends on it: a message without its mark is consumed by an entry that names it, and
    entries that were merged are ignored.
    """
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT)
    if late:
        logger.warning("closing: leftovers were not deleted within %g s", _CLOSE_TIMEOUT)
        await cancel_and_wait(late)


def _documents(db: Collections) -> Collection:
    return db.database.get_collection(f"{db.runs.name}_documents")
