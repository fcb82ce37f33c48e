"""Leases, claims and messages of runs that are documents."""

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from itertools import compress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.snapshot import is_over
from perdure.store import Delivery, Due, Grant, Lease, LeaseRequest, Message, NewRun
from perdure.stores._documents.due import DueSearch, plan_of, wake_time
from perdure.stores._documents.records import MAX_ATTEMPTS, H, Head, Wake, too_busy
from perdure.stores._documents.runs import DocumentRuns, HasId, unconsumed
from perdure.stores._documents.storage import StoredRun
from perdure.stores._reading import Granted, Unreadable, reading
from perdure.stores._shell import Ownership
from perdure.stores._timestamps import from_microseconds, to_microseconds

T = TypeVar("T", bound=HasId)
R = TypeVar("R")

_MICROSECOND = timedelta(microseconds=1)


class DocumentLeases(DocumentRuns[H]):
    """Runs with leases, wake times and inboxes."""

    async def acquire(self, requests: Sequence[LeaseRequest], now: int) -> list[Granted | None]:
        """Return for each request its lease and the run read under it, or `None`."""
        async with self.wakes.gate():
            heads = await self.heads([request.id for request in requests])
            is_available = [
                _is_available(head, request, now)
                for request, head in zip(requests, heads, strict=True)
            ]
            available = [*compress(zip(requests, heads, strict=True), is_available)]
            # A run whose owner dies is found by its wake line, so the line precedes the lease.
            await self.wakes.add(
                [
                    Wake(
                        _after(now, request.ttl),
                        self.prefix + request.id,
                        request.workflow if head is None else head.workflow,
                    )
                    for request, head in available
                ],
                now,
            )
            wanted = [request for request, _ in available]
            grants = iter(await self._each(lambda request: self._acquire(request, now), wanted))
        return [next(grants) if each else None for each in is_available]

    async def _acquire(self, request: LeaseRequest, now: int) -> Granted | None:
        run = self.run(request.id)
        async with run.locked():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if not _is_available(head, request, now):
                    return None
                if head is not None:
                    grant = await self._grant(
                        run, head, request.owner, request.ttl, now, request.instead_of
                    )
                else:
                    grant = await self._create_owned(run, request, now)
                if grant is not None:
                    return grant
        raise too_busy(request.id)

    async def _create_owned(
        self, run: StoredRun[H], request: LeaseRequest, now: int
    ) -> Granted | None:
        end = _after(now, request.ttl)
        data = request.create or b""
        head = await self._create(run, data, request.workflow, end, now, owner=request.owner)
        return None if head is None else await self._read_grant(run, head, now, created=True)

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        """Return who has the lease of each run."""
        return [None if head is None else _ownership(head) for head in await self.heads(ids)]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, now: int) -> list[Lease | None]:
        """Move the ends of leases; return `None` for each that was lost."""
        end = _after(now, ttl)
        async with self.wakes.gate():
            return await self._each(lambda lease: self._renew(lease, end, now), leases)

    async def _renew(self, lease: Lease, end: int, now: int) -> Lease | None:
        run = self.run(lease.id)
        async with run.locked():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None or not head.is_held_with(lease):
                    return None
                if end < (head.wake_at or 0):
                    await self.wakes.add([Wake(end, run.id, head.workflow)], now)
                if await run.renew(head, replace(head, wake_at=end)):
                    messages = await unconsumed(run, head)
                    return replace(
                        lease, expires_at=from_microseconds(end), has_messages=bool(messages)
                    )
        raise too_busy(lease.id)

    async def release(self, leases: Sequence[Lease], wake_at: int, now: int) -> None:
        """Release leases without a rest."""
        async with self.wakes.gate():
            await self.announce([(lease.id, wake_at) for lease in leases], now)
            await self._each(lambda lease: self._release(lease, wake_at), leases)

    async def _release(self, lease: Lease, wake_at: int) -> None:
        run = self.run(lease.id)
        async with run.locked():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None or not head.is_held_with(lease):
                    return
                released = replace(head, owner=None, wake_at=wake_at, released=True)
                if await run.release(head, released):
                    return
        raise too_busy(lease.id)

    async def enqueue(self, runs: Sequence[NewRun], now: int) -> list[bool]:
        """Create runs that wait for a claim; those without a time are due at once."""
        async with self.wakes.gate():
            heads = await self.heads([run.id for run in runs])
            new = [run for run, head in zip(runs, heads, strict=True) if head is None]
            await self.wakes.add(
                [Wake(_wake_at(run, now), self.prefix + run.id, run.workflow) for run in new], now
            )
            created = iter(await self._each(lambda run: self._enqueue(run, now), new))
        return [head is None and next(created) for head in heads]

    async def _enqueue(self, new: NewRun, now: int) -> bool:
        run = self.run(new.id)
        async with run.locked():
            if await run.head() is not None:
                return False
            wake_at = _wake_at(new, now)
            return await self._create(run, new.snapshot, new.workflow, wake_at, now) is not None

    async def due(
        self, at: int, limit: int, workflows: Sequence[str] | None, now: int
    ) -> list[Due]:
        """Return the runs that need a worker at a time, earliest first."""
        search = DueSearch(self.storage, self.prefix, workflows, at, now)
        wakes = await search.next(limit)
        return [Due(self._public_id(wake.id), from_microseconds(wake.at)) for wake in sorted(wakes)]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None, now: int
    ) -> list[Granted]:
        """Lease and load runs that need a worker, earliest first."""
        search = DueSearch(self.storage, self.prefix, workflows, now, now)
        end = _after(now, ttl)
        grants: list[Granted] = []
        async with self.wakes.gate():
            while wakes := await search.next(limit - len(grants)):
                await self.wakes.add([wake._replace(at=end) for wake in wakes], now)
                answers = await self._each(lambda wake: self._claim(wake, owner, ttl, now), wakes)
                grants += [grant for grant in answers if grant is not None]
                for wake in wakes:
                    search.scan.claimed(wake.id)
        await search.scan.tidy(lambda wake: plan_of(self.storage, wake, now), now)
        return grants

    async def _claim(self, wake: Wake, owner: str, ttl: timedelta, now: int) -> Granted | None:
        run = self.storage.run(wake.id)
        async with run.locked():
            head = await run.head()
            if head is None:
                return None
            wake_at = await wake_time(run, head)
            if wake_at is None or wake_at > now:
                return None
            return await self._grant(run, head, owner, ttl, now)

    async def send(
        self, id: str, name: str, payload: bytes, dedup_id: str | None, now: int
    ) -> Delivery:
        """Put a message in a run's inbox, and wake a suspended run that awaits it."""
        run = self.run(id)
        async with self.wakes.gate(), run.locked():
            head = await run.head()
            if head is None:
                return Delivery.UNKNOWN
            wake = Wake(now, run.id, head.workflow)
            if name in head.awaits:
                await self.wakes.add([wake], now)
            delivery = await run.deliver(
                name, payload.decode(), dedup_id, now, is_over=is_over(head.status)
            )
            after = await run.head()
            # Another process may have suspended the run in the meantime without seeing the message.
            if after is not None and name in after.awaits and name not in head.awaits:
                await self.wakes.add([wake], now)
        return delivery

    async def inbox(self, id: str) -> list[Message]:
        """Return a run's messages that were not consumed."""
        run = self.run(id)
        async with run.locked(shared=True):
            head = await run.head()
            messages = [] if head is None else await unconsumed(run, head)
        return [message.as_message() for message in messages]

    async def _create(
        self,
        run: StoredRun[H],
        data: bytes,
        workflow: str | None,
        wake_at: int,
        now: int,
        *,
        owner: str | None = None,
    ) -> H | None:
        """Create a run, owned or waiting for a claim; `None` if another process was quicker."""
        await run.prepare()
        epoch = await run.next_epoch(None, now)
        head = Head(
            id=run.id,
            workflow=workflow,
            status="running",
            wake_at=wake_at,
            owner=owner,
            epoch=epoch,
            updated_at=now,
            base=(epoch, 0) if owner is None else (0, 0),
        )
        return await run.settle(None, head, data)

    async def _grant(
        self,
        run: StoredRun[H],
        head: H,
        owner: str,
        ttl: timedelta,
        now: int,
        instead_of: str | None = None,
    ) -> Granted | None:
        """Lease and read a run; `None` if another process was quicker."""
        is_lost = head.owner is not None and (not head.is_leased(now) or head.owner == instead_of)
        new = replace(
            head,
            owner=owner,
            epoch=await run.next_epoch(head, now),
            status="running",
            awaits=(),
            wake_at=_after(now, ttl),
            takeovers=head.takeovers + is_lost,
            released=False,
        )
        leased = await run.take(head, new)
        if leased is None:
            return None
        grant = await self._read_grant(run, leased, now)
        # A reader that was paused may have been overtaken: what it could not read, or read without
        # its journal, may be what the next owner has removed.
        return grant if await run.is_held(leased) else None

    async def _read_grant(
        self, run: StoredRun[H], head: H, now: int, *, created: bool = False
    ) -> Granted | None:
        lease = Lease(
            self._public_id(run.id),
            head.owner or "",
            head.epoch,
            from_microseconds(head.wake_at or 0),
        )
        try:
            with reading(run.id, msgspec.MsgspecError):
                contents = await run.read(head)
                if contents is None:
                    return None
                head, snapshot = contents
                messages = [message.as_message() for message in await unconsumed(run, head)]
        except StoreCorrupted as error:
            return Unreadable(lease, from_microseconds(now), error)
        lease = replace(lease, has_messages=bool(messages))
        return Grant(
            lease, snapshot, from_microseconds(now), tuple(messages), head.takeovers, created
        )

    async def _each(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]
    ) -> list[R]:
        async def work_on(group: list[T]) -> list[R]:
            return [await work(item) for item in group]

        return await self.by_run(work_on, items)

    def _public_id(self, stored_id: str) -> str:
        return stored_id[len(self.prefix) :]


def _is_available(head: Head | None, request: LeaseRequest, now: int) -> bool:
    if head is None:
        return request.create is not None
    is_ours = head.owner is not None and head.owner in (request.owner, request.instead_of)
    return request.existing and (is_ours or not head.is_leased(now))


def _ownership(head: Head) -> Ownership:
    if head.owner is None or head.wake_at is None:
        return Ownership(head.owner, None)
    return Ownership(head.owner, from_microseconds(head.wake_at))


def _after(now: int, ttl: timedelta) -> int:
    return now + ttl // _MICROSECOND


def _wake_at(run: NewRun, now: int) -> int:
    return now if run.wake_at is None else to_microseconds(run.wake_at, "wake_at")
