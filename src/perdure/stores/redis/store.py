"""The store in Redis, one server or a cluster: each write of a run is one atomic script."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from perdure.clock import Clock
from perdure.errors import StoreUnavailable
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
from perdure.stores._checks import number_after
from perdure.stores._durability import Durability, check_durability, survives
from perdure.stores._handoff import Claimant, HandoffShell
from perdure.stores._keyvalue import scope_of
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult
from perdure.stores._shell import NotifyShell
from perdure.stores._timestamps import to_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item
from perdure.stores.redis.claims import Claims
from perdure.stores.redis.documents import RedisDocuments
from perdure.stores.redis.durability import DurabilityReport, durability_report, require_durability
from perdure.stores.redis.keys import Keys
from perdure.stores.redis.layout import ensure_layout
from perdure.stores.redis.node import Value
from perdure.stores.redis.replies import (
    CreatedRun,
    as_due,
    created_grant,
    entry_arguments,
    existing_grant,
    header_arguments,
    read_acquired,
    read_handoff,
    read_messages,
    read_ownership,
    read_receipts,
    read_snapshot,
    renewed_lease,
    rest_argument,
    time_argument,
    to_json,
    version_ranges,
    workflow_argument,
)
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.search import Searches
from perdure.stores.redis.server import Server
from perdure.stores.redis.statistics import Statistics
from perdure.validation import check_prefix

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)
_VERDICTS = {b"A"[0]: Verdict.ACCEPTED, b"F"[0]: Verdict.FENCED, b"U"[0]: Verdict.UNKNOWN}


class _Backend:
    """Runs in Redis whose stored ids start with `prefix`."""

    def __init__(
        self, server: Server, keys: Keys, prefix: str, durability: Durability, clock: Clock
    ) -> None:
        self.server = server
        self.documents = RedisDocuments(server, keys, scope_of(prefix))
        self._prefix = prefix
        self._keys = keys
        self._runs = Runs(server, keys, prefix)
        self._claims = Claims(self._runs)
        self._searches = Searches(self._runs)
        self._statistics = Statistics(self._runs, self._searches)
        self._durability = durability
        self._clock = clock

    async def open(self) -> None:
        await self._runs.check_permissions()
        if self._durability == "full":
            await require_durability(self.server)
        await ensure_layout(self.server, self._keys)

    def forget_loop(self) -> None:
        self.server.forget_loop()

    async def close(self) -> None:
        await self.server.close()

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None:
        state = rest_argument(rest)
        await self._runs.one(scripts.SAVE, id, workflow_argument(workflow), state, data)

    async def load(self, id: str) -> Snapshot | None:
        content = await self._runs.one(scripts.LOAD, id)
        return content and read_snapshot(id, content)

    async def delete(self, id: str) -> bool:
        return bool(await self._runs.one(scripts.DELETE, id))

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
        # On a cluster there is one script per shard, whose different times would change the order
        # of the runs.
        several = self._runs.is_sharded and len(runs) > 1
        now = await self._runs.now() if several else ""
        head = (self.server.name, now)
        with self.server.announcing():
            answers = await self._runs.each(scripts.ENQUEUE, items, *head, repeatable=False)
        return [answer == 1 for answer in answers]

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]:
        due = await self._claims.due(to_microseconds(now), limit, supports, queues)
        return [as_due(run, self._prefix) for run in due]

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]:
        runs = await self._claims.claim(owner, ttl // _MICROSECOND, limit, supports, queues)
        return [existing_grant(run.reply, self._prefix, owner) for run in runs]

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        return await self._claims.queues(to_microseconds(now), limit, low, high)

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]:
        items = [_message_item(message) for message in messages]
        with self.server.announcing():
            return await self._runs.each(
                scripts.SEND, items, self.server.name, repeatable=False, read=read_receipts
            )

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        items = [_message_item(message) for message in messages]
        head = (self.server.name, *_claimant_arguments(claimant))
        with self.server.announcing_failure():
            reply = await self._runs.together(scripts.SEND_AND_CLAIM, items, *head)
        if reply is None:
            # If one of several scripts failed, the call would fail, and the runs that another one
            # had leased would not be executed until their leases expire.
            return await self.send(messages), ()
        receipts, grants, made_due = read_handoff(reply)
        if made_due:
            self.server.announce()
        return receipts, [existing_grant(each, self._prefix, claimant.owner) for each in grants]

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        number_after(after)
        return read_messages(await self._runs.inbox(id, after, limit))

    async def prune(self, request: PruneRequest) -> int:
        return await self._statistics.prune(request)

    async def stats(self) -> Stats:
        return await self._statistics.stats()

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        return await self._searches.search(query, limit, after)

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]:
        return await self._searches.summaries(ids)

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        return await self._statistics.counts(query, cap)

    async def notifications(self) -> AsyncGenerator[None]:
        while not self.server.is_closed:
            try:
                async with self.server.listen(self._keys.channel) as listener:
                    # For runs that became due before, or while the connection was lost.
                    yield
                    while await listener.next():
                        yield
            except StoreUnavailable as error:
                logger.warning("no notifications for now: %s", error)
                await self._clock.sleep(1)

    def _grant(self, answer: Any, request: LeaseRequest) -> Granted:
        if isinstance(answer, CreatedRun):
            return created_grant(answer, request)
        return existing_grant(answer, self._prefix, request.owner)


class RedisStore(NotifyShell[_Backend], HandoffShell[_Backend]):
    """Keeps runs in Redis; see `redis`.

    Up to a thousand entries, requests, messages or new runs, 8 MiB in total, are one script; on a
    cluster, one per shard. Messages that need several scripts are sent without leasing their runs.
    Notifications use a separate connection, which is reopened if it is lost.
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
            queues=True,
            inbox=True,
            handoff=True,
            notify=True,
            maintenance=True,
            search=True,
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
        request.instead_of or "",
        workflow_argument(request.workflow),
        *header_arguments(request),
        snapshot,
    )
    return Item(request.id, values, len(snapshot))


def _new_run_item(run: NewRun) -> Item:
    values = (
        workflow_argument(run.workflow),
        time_argument(run.wake_at),
        run.head_start // _MICROSECOND,
        run.queue,
        *header_arguments(run),
        b"" if run.rest is None else rest_argument(run.rest),
        run.snapshot,
    )
    return Item(run.id, values, len(run.snapshot))


def _message_item(message: NewMessage) -> Item:
    dedup = "" if message.dedup_id is None else "=" + message.dedup_id
    return Item(message.to, (message.name, message.payload, dedup), len(message.payload))


def _claimant_arguments(claimant: Claimant) -> Sequence[Value]:
    owner, ttl, limit, supports = claimant
    return owner, ttl // _MICROSECOND, limit, to_json(version_ranges(supports))
