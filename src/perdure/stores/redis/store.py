"""The store in Redis, one server or a cluster: each write of a run is one atomic script."""

import logging
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime, timedelta
from typing import Any

from perdure.clock import Clock
from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import (
    Capabilities,
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
from perdure.stores._durability import Durability, check_durability, survives
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted
from perdure.stores._shell import NotifyShell, Ownership, Query, Row
from perdure.stores._timestamps import to_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item
from perdure.stores.redis.documents import RedisDocuments
from perdure.stores.redis.durability import DurabilityReport, durability_report, require_durability
from perdure.stores.redis.keys import STATUSES, Keys
from perdure.stores.redis.replies import (
    Created,
    created_grant,
    entry_arguments,
    existing_grant,
    read_acquired,
    read_due,
    read_messages,
    read_ownership,
    read_row,
    read_snapshot,
    renewed_lease,
    rest_argument,
    time_argument,
    to_json,
    workflow_argument,
)
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.server import Server
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)
_VERDICTS = {b"A"[0]: Verdict.ACCEPTED, b"F"[0]: Verdict.FENCED, b"U"[0]: Verdict.UNKNOWN}
_DELIVERIES = {
    b"D": Delivery.DELIVERED,
    b"K": Delivery.DUPLICATE,
    b"U": Delivery.UNKNOWN,
    b"O": Delivery.OVER,
}


class _Backend:
    """Runs in Redis whose stored ids start with `prefix`."""

    def __init__(
        self, server: Server, keys: Keys, prefix: str, durability: Durability, clock: Clock
    ) -> None:
        self.server = server
        self.documents = RedisDocuments(server, keys, scope_of(prefix))
        self._prefix = prefix
        self._runs = Runs(server, keys, prefix)
        self._channel = keys.channel
        self._durability = durability
        self._clock = clock

    async def open(self) -> None:
        await self._runs.check_permissions()
        if self._durability == "full":
            await require_durability(self.server)

    def forget_loop(self) -> None:
        self.server.link.forget_loop()

    async def close(self) -> None:
        await self.server.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        state = to_json(rest_argument(rest))
        await self._runs.one(scripts.SAVE, id, workflow_argument(workflow), state, data)

    async def load(self, id: str) -> Snapshot | None:
        content = await self._runs.one(scripts.LOAD, id)
        return content and read_snapshot(id, content)

    async def delete(self, id: str) -> bool:
        return bool(await self._runs.one(scripts.DELETE, id))

    async def list(self, query: Query) -> Sequence[Row]:
        statuses = STATUSES if query.status is None else (query.status,)
        lines = await self._runs.list(query, statuses)
        return [read_row(line, self._prefix, statuses) for line in lines]

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        items = [Item(entry.id, entry_arguments(entry), len(entry.data)) for entry in entries]
        return [_VERDICTS[letter] for letter in await self._runs.each(scripts.APPEND, items)]

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]:
        items = [_request_item(request) for request in requests]
        answers = await self._runs.each(scripts.ACQUIRE, items, read=read_acquired)
        return [
            answer and self._grant(answer, request)
            for request, answer in zip(requests, answers, strict=True)
        ]

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        items = [Item(id, ()) for id in ids]
        return [read_ownership(reply) for reply in await self._runs.each(scripts.OWNERS, items)]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]:
        answers = await self._runs.each(scripts.RENEW, _lease_items(leases), ttl // _MICROSECOND)
        return [
            answer and renewed_lease(answer, lease)
            for lease, answer in zip(leases, answers, strict=True)
        ]

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        await self._runs.each(scripts.RELEASE, _lease_items(leases), time_argument(wake_at))

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]:
        items = [_new_run_item(run) for run in runs]
        answers = await self._runs.each(scripts.ENQUEUE, items, repeatable=False)
        return [answer == 1 for answer in answers]

    async def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Due]:
        lines = await self._runs.due(to_microseconds(now), limit, workflows)
        return [read_due(line, self._prefix) for line in lines]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]:
        replies = await self._runs.claim(owner, ttl // _MICROSECOND, limit, workflows)
        return [existing_grant(reply, self._prefix, owner) for reply in replies]

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery:
        dedup = "" if dedup_id is None else "=" + dedup_id
        letter = await self._runs.one(scripts.SEND, id, name, payload, dedup, repeatable=False)
        return _DELIVERIES[letter]

    async def inbox(self, id: str) -> Sequence[Message]:
        return read_messages(await self._runs.inbox(id))

    async def prune(self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int) -> int:
        return await self._runs.prune(older_than // _MICROSECOND, statuses, limit)

    async def stats(self) -> Stats:
        counts = await self._runs.count()
        oldest = await self._runs.due(None, 1, None)
        return Stats(counts, read_due(oldest[0], self._prefix).wake_at if oldest else None)

    async def notifications(self) -> AsyncGenerator[None]:
        while not self.server.is_closed:
            try:
                async with self.server.listen(self._channel) as listener:
                    # For what happened before, or while the connection was lost.
                    yield
                    while await listener.next():
                        yield
            except StoreUnavailable as error:
                logger.warning("no notifications for now: %s", error)
                await self._clock.sleep(1)

    def _grant(self, answer: Any, request: LeaseRequest) -> Granted:
        if isinstance(answer, Created):
            return created_grant(answer, request)
        return existing_grant(answer, self._prefix, request.owner)


class RedisStore(NotifyShell[_Backend]):
    """Keeps runs in Redis; see `redis`.

    Up to a thousand entries, requests or new runs, of 8 MiB together, are one script; on a cluster
    one for each shard. Notifications use a connection of their own, which is opened again after it
    was lost.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        prefix: str,
        durability: Durability,
        clock: Clock,
        max_value_size: int,
    ) -> None:
        check_durability(durability)
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            notify=True,
            maintenance=True,
            shared="network",
            survives=survives(durability),
            max_value_size=max_value_size,
        )
        backend = _Backend(server, keys, check_prefix(prefix), durability, clock)
        super().__init__(backend, "Redis", capabilities)

    async def durability_report(self) -> DurabilityReport:
        """Return what the server's settings do and do not guarantee; `print` shows all of it."""
        self._life.check_open()
        return await durability_report(self._backend.server)


def _lease_items(leases: Sequence[Lease]) -> Sequence[Item]:
    return [Item(lease.id, (lease.epoch, lease.owner)) for lease in leases]


def _request_item(request: LeaseRequest) -> Item:
    snapshot = request.create or b""
    values = (
        request.owner,
        request.ttl // _MICROSECOND,
        int(request.existing),
        workflow_argument(request.workflow),
        request.instead_of or "",
        snapshot,
    )
    return Item(request.id, values, len(snapshot))


def _new_run_item(run: NewRun) -> Item:
    values = (workflow_argument(run.workflow), time_argument(run.wake_at), run.snapshot)
    return Item(run.id, values, len(run.snapshot))
