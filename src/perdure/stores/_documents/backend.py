"""The backend of the stores whose runs are documents."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Generic

from perdure.clock import Clock, check_clock
from perdure.snapshot import RunStatus, Snapshot
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
from perdure.stores._documents.leases import DocumentLeases
from perdure.stores._documents.records import H, Head
from perdure.stores._documents.storage import Storage
from perdure.stores._keyvalue import KeyValueBackend
from perdure.stores._reading import Granted
from perdure.stores._shell import Ownership, Query, Row
from perdure.stores._timestamps import from_microseconds, to_microseconds


class DocumentBackend(Generic[H]):
    """A storage and a clock behind a `StoreShell`. `list`, `prune` and `stats` read all heads."""

    def __init__(
        self, storage: Storage[H], documents: KeyValueBackend, prefix: str, clock: Clock
    ) -> None:
        self.documents = documents
        self._storage = storage
        self._execute = storage.execute
        self._runs = DocumentLeases(storage, prefix)
        self._prefix = prefix
        self._clock = check_clock(clock)

    async def open(self) -> None:
        """Do nothing: a storage sets itself up when it executes its first verb."""

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

    async def due(self, now: datetime, limit: int, workflows: Sequence[str] | None) -> list[Due]:
        return await self._execute(
            self._runs.due, to_microseconds(now), limit, workflows, self._now()
        )

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> list[Granted]:
        return await self._execute(self._runs.claim, owner, ttl, limit, workflows, self._now())

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        return await self._execute(self._runs.send, id, name, payload, dedup_id, self._now())

    async def inbox(self, id: str) -> list[Message]:
        return await self._execute(self._runs.inbox, id)

    async def list(self, query: Query) -> Sequence[Row]:
        after = None
        if query.after is not None:
            after = (to_microseconds(query.after[0]), self._prefix + query.after[1])
        heads = (
            head
            for head in await self._heads(query.prefix)
            if (query.status is None or head.status == query.status)
            and (query.workflow is None or head.workflow == query.workflow)
            and (after is None or _position(head) < after)
        )
        return [
            Row(
                head.id.removeprefix(self._prefix),
                from_microseconds(head.updated_at),
                head.status,
                head.workflow,
                head.owner,
            )
            for head in nlargest(query.limit, heads, key=_position)
        ]

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        before = self._now() - older_than // timedelta(microseconds=1)
        ids = [
            head.id.removeprefix(self._prefix)
            for head in await self._heads()
            if head.status in statuses and head.updated_at < before
        ]
        # One by one: each is checked again, as it may have been woken in the meantime.
        deleted = [await self._execute(self._runs.prune, id, before) for id in ids[:limit]]
        return sum(deleted)

    async def stats(self) -> Stats:
        by_status = Counter[str](head.status for head in await self._heads())
        now = self._now()
        oldest = await self._execute(self._runs.due, now, 1, None, now)
        return Stats(by_status, oldest[0].wake_at if oldest else None)

    async def _heads(self, prefix: str = "") -> Sequence[H]:
        return await self._execute(self._storage.all_heads, self._prefix + prefix)

    def _now(self) -> int:
        return to_microseconds(self._clock.now())


def _position(head: Head) -> tuple[int, str]:
    return head.updated_at, head.id
