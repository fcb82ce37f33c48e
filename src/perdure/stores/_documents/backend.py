"""The backend of the stores whose runs are documents."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Generic

from perdure.clock import Clock, check_clock
from perdure.snapshot import Snapshot
from perdure.store import (
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
from perdure.stores._documents.claims import DocumentClaims
from perdure.stores._documents.headers import DocumentHeaders
from perdure.stores._documents.inbox import DocumentInboxes
from perdure.stores._documents.records import H
from perdure.stores._documents.storage import Storage
from perdure.stores._keyvalue import KeyValueBackend
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores._timestamps import to_microseconds

_MICROSECOND = timedelta(microseconds=1)


class DocumentBackend(Generic[H]):
    """A storage and a clock behind a `StoreShell`."""

    def __init__(
        self, storage: Storage[H], documents: KeyValueBackend, prefix: str, clock: Clock
    ) -> None:
        self.documents = documents
        self._storage = storage
        self._execute = storage.execute
        self._runs = DocumentClaims(storage, prefix)
        self._inboxes = DocumentInboxes(storage, prefix)
        self._headers = DocumentHeaders(storage, prefix)
        self._clock = check_clock(clock)

    async def open(self) -> None:
        """Set the storage up, or raise if a newer perdure has written to it."""
        await self._execute(self._storage.open)

    def forget_loop(self) -> None:
        """Do nothing: nothing here is bound to an event loop."""

    async def close(self) -> None:
        await self._storage.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        await self._execute(self._runs.save, id, data, workflow, rest, self._now())

    async def load(self, id: str) -> Snapshot | None:
        return await self._execute(self._runs.load, id)

    async def delete(self, id: str) -> bool:
        return await self._execute(self._runs.delete, id, self._now())

    async def append(self, entries: Sequence[Entry]) -> list[Verdict]:
        return await self._execute(self._runs.append, entries, self._now())

    async def acquire(self, requests: Sequence[LeaseRequest]) -> list[Granted | None]:
        return await self._execute(self._runs.acquire, requests, self._now())

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        return await self._execute(self._runs.owners, ids)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> list[Lease | None]:
        return await self._execute(self._runs.renew, leases, ttl, self._now())

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        now = self._now()
        at = now if wake_at is None else to_microseconds(wake_at)
        await self._execute(self._runs.release, leases, at, now)

    async def enqueue(self, runs: Sequence[NewRun]) -> list[bool]:
        return await self._execute(self._runs.enqueue, runs, self._now())

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Due]:
        at = to_microseconds(now)
        return await self._execute(self._runs.due, at, limit, supports, queues, self._now())

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> list[Granted]:
        return await self._execute(
            self._runs.claim, owner, ttl, limit, supports, queues, self._now()
        )

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> list[str]:
        at = to_microseconds(now)
        return await self._execute(self._runs.queues, at, limit, low, high, self._now())

    async def send(self, messages: Sequence[NewMessage]) -> list[Receipt]:
        return await self._execute(self._inboxes.send, messages, self._now())

    async def inbox(self, id: str, after: str | None, limit: int | None) -> list[Message]:
        return await self._execute(self._inboxes.inbox, id, after, limit)

    async def prune(self, request: PruneRequest) -> int:
        before = self._now() - request.older_than // _MICROSECOND
        ids = await self._execute(self._headers.old, request, before)
        if request.dry_run:
            return len(ids)
        # One by one, because each is checked again: it may have been woken in the meantime.
        return sum([await self._execute(self._headers.prune, id, before) for id in ids])

    async def stats(self) -> Stats:
        return await self._execute(self._headers.stats, self._now())

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await self._execute(self._headers.search, query, limit, after)

    async def summaries(self, ids: Sequence[str]) -> list[RunSummary | None]:
        return await self._execute(self._headers.summaries, ids)

    async def counts(self, query: Query, cap: int) -> list[Count]:
        return await self._execute(self._headers.counts, query, cap)

    def _now(self) -> int:
        return to_microseconds(self._clock.now())
