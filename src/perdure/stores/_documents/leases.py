"""Leases and creation of runs that are stored as documents."""

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from itertools import compress
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.store import INBOX_PAGE, Grant, Lease, LeaseRequest, NewRun
from perdure.stores._backend import Ownership
from perdure.stores._documents.records import MAX_ATTEMPTS, H, Head, Wake, too_busy
from perdure.stores._documents.runs import DocumentRuns, unconsumed_messages
from perdure.stores._documents.storage import StoredRun
from perdure.stores._reading import Granted, Unreadable, reading
from perdure.stores._timestamps import from_microseconds, to_microseconds


class HasId(Protocol):
    """Anything with the id of a run."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)
R = TypeVar("R")

_MICROSECOND = timedelta(microseconds=1)


class DocumentLeases(DocumentRuns[H]):
    """Runs with leases and wake times."""

    async def acquire(self, requests: Sequence[LeaseRequest], now: int) -> list[Granted | None]:
        """Return a lease and the run read under it, or `None`, for each request."""
        async with self.wakes.gate():
            heads = await self.heads([request.id for request in requests])
            is_available = [
                _is_available(head, request, now)
                for request, head in zip(requests, heads, strict=True)
            ]
            wakes = [
                self._lease_end(head, request, now)
                for request, head in compress(zip(requests, heads, strict=True), is_available)
            ]
            # A run whose owner dies is found by its wake line, so the line precedes the lease.
            await self.wakes.add(wakes, now)
            candidates = [*compress(requests, is_available)]
            wake_lines = {*wakes}
            grants = iter(
                await self._each(
                    lambda request: self._acquire(request, wake_lines, now), candidates
                )
            )
        return [
            next(grants) if each else self._unreadable(request, head, now)
            for request, head, each in zip(requests, heads, is_available, strict=True)
        ]

    async def _acquire(
        self, request: LeaseRequest, wake_lines: set[Wake], now: int
    ) -> Granted | None:
        run = self.run(request.id)
        async with run.lock():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if not _is_available(head, request, now):
                    return None
                # Another process may have created the run in the meantime, in a queue.
                wake = self._lease_end(head, request, now)
                if wake not in wake_lines:
                    await self.wakes.add([wake], now)
                if head is not None:
                    grant = await self._grant(
                        run, head, request.owner, request.ttl, now, request.instead_of
                    )
                else:
                    grant = await self._create_owned(run, request, now)
                if grant is not None:
                    return grant
        raise too_busy(request.id)

    def _lease_end(self, head: H | StoreCorrupted | None, request: LeaseRequest, now: int) -> Wake:
        end = after(now, request.ttl)
        if isinstance(head, Head):
            return head.wake(end)
        return Wake(end, self.prefix + request.id, request.workflow, version=request.version)

    def _unreadable(
        self, request: LeaseRequest, head: H | StoreCorrupted | None, now: int
    ) -> Unreadable | None:
        if not isinstance(head, StoreCorrupted):
            return None
        time = from_microseconds(now)
        return Unreadable(Lease(request.id, request.owner, 0, time), time, head)

    async def _create_owned(
        self, run: StoredRun[H], request: LeaseRequest, now: int
    ) -> Granted | None:
        await run.prepare()
        head = Head(
            id=run.id,
            workflow=request.workflow,
            version=request.version,
            tags=request.tags,
            summary=request.summary,
            created_at=now,
            status="running",
            wake_at=after(now, request.ttl),
            owner=request.owner,
            epoch=await run.next_epoch(None, now),
            updated_at=now,
            base=(0, 0),
        )
        stored_head = await run.settle(None, head, request.create or b"")
        return (
            None
            if stored_head is None
            else await self._read_grant(run, stored_head, now, created=True)
        )

    async def owners(self, ids: Sequence[str]) -> list[Ownership | None]:
        """Return the owner of each run."""
        return [None if head is None else _ownership(head) for head in await self.heads(ids)]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, now: int) -> list[Lease | None]:
        """Extend leases; return `None` for each that was lost."""
        end = after(now, ttl)
        async with self.wakes.gate():
            return await self._each(lambda lease: self._renew(lease, end, now), leases)

    async def _renew(self, lease: Lease, end: int, now: int) -> Lease | None:
        run = self.run(lease.id)
        async with run.lock():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None or not head.is_held_with(lease):
                    return None
                # For a later end, the old line suffices: it is read earlier and leads to the head.
                if end < (head.wake_at or 0):
                    await self.wakes.add([head.wake(end)], now)
                if await run.renew(head, replace(head, wake_at=end)):
                    messages = await unconsumed_messages(run, head)
                    return replace(
                        lease, expires_at=from_microseconds(end), has_messages=bool(messages)
                    )
        raise too_busy(lease.id)

    async def release(self, leases: Sequence[Lease], wake_at: int, now: int) -> None:
        """Release leases without a rest; a run whose head cannot be read has no lease."""
        async with self.wakes.gate():
            heads = await self.readable_heads([lease.id for lease in leases])
            # Before the leases are released: a run without a line would never be claimed.
            await self.wakes.add([head.wake(wake_at) for head in heads.values()], now)
            readable = [lease for lease in leases if lease.id in heads]
            await self._each(lambda lease: self._release(lease, wake_at), readable)

    async def _release(self, lease: Lease, wake_at: int) -> None:
        run = self.run(lease.id)
        async with run.lock():
            for _ in range(MAX_ATTEMPTS):
                head = await run.head()
                if head is None or not head.is_held_with(lease):
                    return
                new_head = replace(head, owner=None, wake_at=wake_at, released=True)
                if await run.release(head, new_head):
                    return
        raise too_busy(lease.id)

    async def enqueue(self, runs: Sequence[NewRun], now: int) -> list[bool]:
        """Create runs that wait for a claim, or are at rest."""
        async with self.wakes.gate():
            heads = await self.heads([run.id for run in runs])
            new = [run for run, head in zip(runs, heads, strict=True) if head is None]
            first_heads = (self._first_head(run, 0, now) for run in new)
            await self.wakes.add(
                [head.wake(head.wake_at) for head in first_heads if head.wake_at is not None], now
            )
            created = iter(await self._each(lambda run: self._enqueue(run, now), new))
        return [head is None and next(created) for head in heads]

    async def _enqueue(self, new: NewRun, now: int) -> bool:
        run = self.run(new.id)
        async with run.lock():
            if await run.head() is not None:
                return False
            await run.prepare()
            head = self._first_head(new, await run.next_epoch(None, now), now)
            return await run.settle(None, head, new.snapshot) is not None

    def _first_head(self, new: NewRun, epoch: int, now: int) -> Head:
        head = Head(
            id=self.prefix + new.id,
            workflow=new.workflow,
            queue=new.queue,
            version=new.version,
            tags=new.tags,
            summary=new.summary,
            created_at=now,
            status="queued",
            wake_at=_wake_at(new, now),
            epoch=epoch,
            updated_at=now,
            base=(epoch, 0),
        )
        return head if new.rest is None else head.at_rest(new.rest, head.base, now)

    async def _grant(
        self,
        run: StoredRun[H],
        head: H,
        owner: str,
        ttl: timedelta,
        now: int,
        instead_of: str | None = None,
    ) -> Granted | None:
        """Lease and read a run; return `None` if another process was faster."""
        is_lost = head.owner is not None and (not head.is_leased(now) or head.owner == instead_of)
        new = replace(
            head,
            owner=owner,
            epoch=await run.next_epoch(head, now),
            status="running",
            awaits=(),
            wake_at=after(now, ttl),
            takeovers=head.takeovers + is_lost,
            released=False,
        )
        leased_head = await run.take(head, new)
        if leased_head is None:
            return None
        grant = await self._read_grant(run, leased_head, now)
        # This process may have been paused while another one took over the run. What it could not
        # read, or read without its journal, may have been removed by the next owner.
        return grant if await run.is_held(leased_head) else None

    async def _read_grant(
        self, run: StoredRun[H], head: H, now: int, *, created: bool = False
    ) -> Granted | None:
        lease = Lease(
            self.public_id(run.id),
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
                messages = (await unconsumed_messages(run, head))[:INBOX_PAGE]
        except StoreCorrupted as error:
            return Unreadable(lease, from_microseconds(now), error)
        return Grant(
            replace(lease, has_messages=bool(messages)),
            snapshot,
            from_microseconds(now),
            tuple(message.as_message() for message in messages),
            head.takeovers,
            created,
            head.queue,
            head.version,
        )

    async def _each(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]
    ) -> list[R]:
        async def work_on(group: list[T]) -> list[R]:
            return [await work(item) for item in group]

        return await self.by_run(work_on, items, lambda item: item.id)


def after(now: int, ttl: timedelta) -> int:
    """Return when a lease ends."""
    return now + ttl // _MICROSECOND


def _is_available(head: Head | StoreCorrupted | None, request: LeaseRequest, now: int) -> bool:
    if isinstance(head, StoreCorrupted):
        return False
    if head is None:
        return request.create is not None
    is_ours = head.owner is not None and head.owner in (request.owner, request.instead_of)
    return request.existing and (is_ours or not head.is_leased(now))


def _ownership(head: Head | StoreCorrupted) -> Ownership:
    if isinstance(head, StoreCorrupted) or head.owner is None or head.wake_at is None:
        return Ownership(None, None)
    return Ownership(head.owner, from_microseconds(head.wake_at))


def _wake_at(run: NewRun, now: int) -> int:
    if run.wake_at is None:
        return now - run.head_start // _MICROSECOND
    return to_microseconds(run.wake_at, "wake_at")
