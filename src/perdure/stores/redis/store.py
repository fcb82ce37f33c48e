"""Runs in Redis, one server or a cluster: each write of a run is one atomic script."""

import logging
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

from perdure import codec
from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreUnavailable, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, is_over, workflow_of
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
from perdure.stores._lifecycle import Lifecycle
from perdure.stores._reading import Granted, acquire_readable, claim_readable
from perdure.stores._timestamps import to_microseconds
from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Row
from perdure.stores.redis.durability import DurabilityReport, durability_report, require_durability
from perdure.stores.redis.keys import STATUSES, Keys
from perdure.stores.redis.replies import (
    Created,
    acquired_of,
    due_of,
    entry_values,
    grant_of,
    listed_of,
    mark_of,
    messages_of,
    new_grant,
    renewed_of,
    rest_argument,
    snapshot_of,
    time_argument,
    to_json,
    workflow_argument,
)
from perdure.stores.redis.runs import Runs
from perdure.stores.redis.server import Server
from perdure.validation import check_id, check_limit, check_prefix

Durability: TypeAlias = Literal["full", "normal"]

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)
_VERDICTS = {b"A"[0]: Verdict.ACCEPTED, b"F"[0]: Verdict.FENCED, b"U"[0]: Verdict.UNKNOWN}
_DELIVERIES = {
    b"D": Delivery.DELIVERED,
    b"K": Delivery.DUPLICATE,
    b"U": Delivery.UNKNOWN,
    b"O": Delivery.OVER,
}


class RedisStore(AsyncCloseable):
    """Keeps runs in Redis; see `redis`."""

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
        if durability not in ("full", "normal"):
            raise InvalidArgument("durability", durability, '"full" or "normal"')
        self.capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            inbox=True,
            notify=True,
            maintenance=True,
            shared="network",
            survives="power_loss" if durability == "full" else "process_crash",
            max_value_size=max_value_size,
        )
        self._prefix = check_prefix(prefix)
        self._server = server
        self._runs = Runs(server, keys, prefix)
        self._channel = keys.channel
        self._durability = durability
        self._clock = clock
        self._life = Lifecycle("Redis", self._set_up)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        await self._life.ready()
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {id!r}", data)
        rest = to_json(rest_argument(rest_of(snapshot)))
        workflow = workflow_argument(workflow_of(snapshot))
        await self._runs.one(scripts.SAVE, check_id(id), workflow, rest, data)

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        await self._life.ready()
        content = await self._runs.one(scripts.LOAD, check_id(id))
        return content and snapshot_of(id, content)

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        await self._life.ready()
        return bool(await self._runs.one(scripts.DELETE, check_id(id)))

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
        await self._life.ready()
        statuses = STATUSES if status is None else (status,)
        mark = mark_of(after, self._prefix)
        lines = await self._runs.page(
            statuses, check_prefix(prefix), check_limit(limit), workflow, mark
        )
        return [listed_of(line, self._prefix, statuses) for line in lines]

    async def close(self) -> None:
        """Close the connections that were opened here, and end the hints."""
        if self._life.close():
            await self._server.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one script; on a cluster in one for each shard that has some."""
        await self._life.ready()
        check_entries(entries, self.capabilities.max_value_size)
        rows = [Row(entry.id, entry_values(entry), len(entry.data)) for entry in entries]
        return [_VERDICTS[letter] for letter in await self._runs.each(scripts.APPEND, rows)]

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        await self._life.ready()
        rows = [self._row_of(request) for request in requests]
        answers = await self._runs.each(scripts.ACQUIRE, rows, read=acquired_of)
        grants = [
            answer and self._grant_of(answer, request)
            for request, answer in zip(requests, answers, strict=True)
        ]
        return await acquire_readable(grants, self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        await self._life.ready()
        rows = [Row(lease.id, (lease.epoch, lease.owner)) for lease in leases]
        answers = await self._runs.each(scripts.RENEW, rows, ttl // _MICROSECOND)
        return [
            answer and renewed_of(answer, lease)
            for lease, answer in zip(leases, answers, strict=True)
        ]

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        await self._life.ready()
        rows = [Row(lease.id, (lease.epoch, lease.owner)) for lease in leases]
        await self._runs.each(scripts.RELEASE, rows, time_argument(wake_at, "wake_at"))

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already.

        Up to a thousand runs, of 8 MiB together, are one write; on a cluster those of each shard.
        """
        await self._life.ready()
        rows = [self._new_row_of(run) for run in runs]
        answers = await self._runs.each(scripts.ENQUEUE, rows, repeatable=False)
        return [answer == 1 for answer in answers]

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose time has come by `now`, earliest first."""
        await self._life.ready()
        lines = await self._runs.due(to_microseconds(now, "now"), check_limit(limit), workflows)
        return [due_of(line, self._prefix) for line in lines]

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
        await self._life.ready()

        async def claim(left: int) -> list[Granted]:
            replies = await self._runs.claim(owner, ttl // _MICROSECOND, left, workflows)
            return [grant_of(reply, self._prefix, owner) for reply in replies]

        return await claim_readable(claim, check_limit(limit), self.release)

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        await self._life.ready()
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        known = "" if dedup_id is None else "=" + dedup_id
        letter = await self._runs.one(
            scripts.SEND, check_id(id), name, payload, known, repeatable=False
        )
        return _DELIVERIES[letter]

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        await self._life.ready()
        return messages_of(await self._runs.mail(check_id(id)))

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        await self._life.ready()
        expected: Sequence[RunStatus] = STATUSES if status is None else [status]
        statuses: Sequence[RunStatus] = [one for one in expected if is_over(one)]
        return await self._runs.prune(older_than // _MICROSECOND, statuses, check_limit(limit))

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        await self._life.ready()
        counts = await self._runs.count()
        oldest = await self._runs.due(None, 1, None)
        return Stats(counts, due_of(oldest[0], self._prefix).wake_at if oldest else None)

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process; ends when the store is closed.

        A connection of its own listens. When that is lost, a new one is made, and a hint comes for
        what may have happened meanwhile.
        """
        await self._life.ready()
        while not self._life.is_closed:
            try:
                async with self._server.listening(self._channel) as ear:
                    yield
                    while await ear.hears():
                        yield
            except StoreUnavailable as error:
                logger.warning("no hints for now: %s", error)
                await self._clock.sleep(1)

    async def durability_report(self) -> DurabilityReport:
        """Tell what the server's settings do and do not promise; `print` shows it all."""
        self._life.check_open()
        return await durability_report(self._server)

    async def _set_up(self) -> None:
        await self._runs.try_rights()
        if self._durability == "full":
            await require_durability(self._server)

    def _grant_of(self, answer: Any, request: LeaseRequest) -> Granted:
        if isinstance(answer, Created):
            return new_grant(answer, request)
        return grant_of(answer, self._prefix, request.owner)

    def _row_of(self, request: LeaseRequest) -> Row:
        self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
        workflow = workflow_argument(request.workflow)
        ttl, existing = request.ttl // _MICROSECOND, int(request.existing)
        first = request.create or b""
        return Row(
            check_id(request.id), (request.owner, ttl, existing, workflow, first), len(first)
        )

    def _new_row_of(self, run: NewRun) -> Row:
        self._check_size(f"the snapshot of run {run.id!r}", run.snapshot)
        at = time_argument(run.wake_at, "wake_at")
        values = (workflow_argument(run.workflow), at, run.snapshot)
        return Row(check_id(run.id), values, len(run.snapshot))

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)
