"""Who gets a run, and when: leases, claims and messages of the key-value store."""

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreCorrupted
from perdure.snapshot import is_over
from perdure.store import Delivery, Due, Grant, Lease, LeaseRequest, Message, NewRun
from perdure.stores._reading import SETBACK, Granted, Unreadable, reading
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.stores.keyvalue.layout import (
    Head,
    Mail,
    RunDocuments,
    head_of,
    head_text,
    inbox_of,
    inbox_text,
    message_of,
)
from perdure.stores.keyvalue.runs import MAX_ATTEMPTS, KeyValueShelf, by_run, too_busy
from perdure.stores.keyvalue.wakes import Found, Wake

logger = logging.getLogger(__name__)

_MICROSECOND = timedelta(microseconds=1)
_CHUNK = 100
# A line is written before its run: one that is not true yet is left alone for so long.
_GRACE = timedelta(minutes=1) // _MICROSECOND


@dataclass(slots=True)
class _Asked:
    """A run with lines up to now, and when it really wants a worker."""

    id: str
    lines: list[Found] = field(default_factory=list)
    workflow: str | None = None
    wake_at: int | None = None


class KeyValueDesk(KeyValueShelf):
    """The runs, and those who ask for them."""

    async def acquire(self, requests: Sequence[LeaseRequest], now: int) -> list[Granted | None]:
        """Give each want its lease and the run read under it, or None."""
        heads = await self.heads([self.prefix + request.id for request in requests])
        likely = [
            _is_free(head, request, now) for head, request in zip(heads, requests, strict=True)
        ]
        # An orphan is found by its wake line, which is therefore there before the lease.
        await self.wakes.add(
            Wake(_end(now, request.ttl), self.prefix + request.id, _workflow(head, request), now)
            for head, request, is_free in zip(heads, requests, likely, strict=True)
            if is_free
        )
        free = [request for request, is_free in zip(requests, likely, strict=True) if is_free]
        grants = iter(await by_run(lambda mine: self._acquire_all(mine, now), free))
        return [next(grants) if is_free else None for is_free in likely]

    async def _acquire_all(
        self, requests: Sequence[LeaseRequest], now: int
    ) -> list[Granted | None]:
        return [await self._acquire(request, now) for request in requests]

    async def _acquire(self, request: LeaseRequest, now: int) -> Granted | None:
        async with self.guarded(request.id) as run:
            for _ in range(MAX_ATTEMPTS):
                found = await run.head()
                if not _is_free(found and found[1], request, now):
                    return None
                if found is not None:
                    grant = await self._grant(run, found, request.owner, request.ttl, now)
                else:
                    grant = await self._create_owned(run, request, now)
                if grant is not None:
                    return grant
        raise too_busy(request.id)

    async def _create_owned(
        self, run: RunDocuments, request: LeaseRequest, now: int
    ) -> Grant | None:
        wake_at = _end(now, request.ttl)
        data = request.create or b""
        head = await self._create(run, data, request.workflow, wake_at, now, owner=request.owner)
        if head is None:
            return None
        return await self._granted(run, head, now, created=True)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, now: int) -> list[Lease | None]:
        """Move the ends of leases, and give None for each that was lost."""
        until = _end(now, ttl)

        async def renew_all(mine: list[Lease]) -> list[Lease | None]:
            return [await self._renew(lease, until, now) for lease in mine]

        return await by_run(renew_all, leases)

    async def _renew(self, lease: Lease, until: int, now: int) -> Lease | None:
        async with self.guarded(lease.id) as run:
            for _ in range(MAX_ATTEMPTS):
                found = await run.head()
                if found is None or not found[1].holds(lease.owner, lease.epoch):
                    return None
                text, head = found
                if until < (head.wake_at or 0):
                    await self.wakes.add([Wake(until, run.id, head.workflow, now)])
                renewed = head_text(replace(head, wake_at=until))
                if await self.documents.swap(run.head_key, text, renewed):
                    mail = bool(await run.mail(head))
                    return Lease(lease.id, lease.owner, lease.epoch, from_microseconds(until), mail)
        raise too_busy(lease.id)

    async def release(self, leases: Sequence[Lease], wake_at: int, now: int) -> None:
        """Give leases up without a rest."""
        await self.announce([(lease.id, wake_at) for lease in leases], now)

        async def release_all(mine: list[Lease]) -> list[None]:
            for lease in mine:
                await self._release(lease, wake_at)
            return [None] * len(mine)

        await by_run(release_all, leases)

    async def _release(self, lease: Lease, wake_at: int) -> None:
        async with self.guarded(lease.id) as run:
            for _ in range(MAX_ATTEMPTS):
                found = await run.head()
                if found is None or not found[1].holds(lease.owner, lease.epoch):
                    return
                text, head = found
                sealed = (*head.sealed, (head.epoch, None))
                released = replace(head, owner=None, wake_at=wake_at, sealed=sealed)
                if await self.documents.swap(run.head_key, text, head_text(released)):
                    self.forget(run)
                    counted = head_text(await self.count_sealed(run, released))
                    await self.documents.swap(run.head_key, head_text(released), counted)
                    return
        raise too_busy(lease.id)

    async def enqueue(self, runs: Sequence[NewRun], now: int) -> list[bool]:
        """Create runs that wait for a claim; those without a time are due at once."""
        heads = await self.heads([self.prefix + run.id for run in runs])
        await self.wakes.add(
            Wake(_wake_at(run, now), self.prefix + run.id, run.workflow, now)
            for run, head in zip(runs, heads, strict=True)
            if head is None
        )

        async def enqueue_all(mine: list[NewRun]) -> list[bool]:
            return [await self._enqueue(run, now) for run in mine]

        return await by_run(enqueue_all, runs)

    async def _enqueue(self, new: NewRun, now: int) -> bool:
        async with self.guarded(new.id) as run:
            if await run.head() is not None:
                return False
            wake_at = _wake_at(new, now)
            return await self._create(run, new.snapshot, new.workflow, wake_at, now) is not None

    async def due(self, now: int, limit: int, workflows: Sequence[str] | None) -> list[Due]:
        """Find the runs that want a worker, earliest first."""
        found: list[tuple[int, str]] = []
        async for asked in self._asked(now, workflows):
            if len(found) == limit:
                break
            if asked.wake_at is not None and asked.wake_at <= now:
                found.append((asked.wake_at, asked.id))
        return [Due(self._id(id), from_microseconds(wake_at)) for wake_at, id in sorted(found)]

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None, now: int
    ) -> list[Granted]:
        """Lease and load the runs that want a worker, earliest first."""
        grants: list[Granted] = []
        chosen: list[_Asked] = []
        idle: list[_Asked] = []
        async for asked in self._asked(now, workflows):
            if asked.wake_at is None or asked.wake_at > now:
                idle.append(asked)
                continue
            if len(grants) + len(chosen) >= limit:
                grants += await self._claim_all(chosen, owner, ttl, now)
                chosen = []
            if len(grants) >= limit:
                break
            chosen.append(asked)
        grants += await self._claim_all(chosen, owner, ttl, now)
        await self._tidy(idle, now)
        return grants

    async def _claim_all(
        self, chosen: Sequence[_Asked], owner: str, ttl: timedelta, now: int
    ) -> list[Granted]:
        if not chosen:
            return []
        await self.wakes.add(Wake(_end(now, ttl), each.id, each.workflow, now) for each in chosen)

        async def claim_all(mine: list[_Asked]) -> list[Granted | None]:
            return [await self._claim(asked, owner, ttl, now) for asked in mine]

        grants = await by_run(claim_all, chosen)
        # What these lines said has come about; whoever wants the run again writes another.
        await self.wakes.drop((line for asked in chosen for line in asked.lines), now)
        return [grant for grant in grants if grant is not None]

    async def _claim(self, asked: _Asked, owner: str, ttl: timedelta, now: int) -> Granted | None:
        async with self.guarded(self._id(asked.id)) as run:
            found = await run.head()
            if found is None:
                return None
            wake_at = await self._wake_of(run, found[1])
            if wake_at is None or wake_at > now:
                return None
            return await self._grant(run, found, owner, ttl, now)

    async def send(
        self, id: str, name: str, payload: bytes, dedup_id: str | None, now: int
    ) -> Delivery:
        """Put an event in a run's inbox, and wake a run at rest that awaits it."""
        async with self.guarded(id) as run:
            before = await run.head()
            if before is None:
                return Delivery.UNKNOWN
            head = before[1]
            if name in head.awaits:
                await self.wakes.add([Wake(now, run.id, head.workflow, now)])
            post = _Post(name, payload.decode(), dedup_id, now, is_over=is_over(head.status))
            await self.documents.change(run.inbox_key, post)
            after = await run.head()
            if after is not None and name in after[1].awaits and name not in head.awaits:
                # Another process put the run to rest meanwhile, and did not see the message.
                await self.wakes.add([Wake(now, run.id, head.workflow, now)])
            return post.delivery

    async def inbox(self, id: str) -> list[Message]:
        """Read a run's messages that were not taken."""
        async with self.guarded(id) as run:
            found = await run.head()
            mail = [] if found is None else await run.mail(found[1])
        return [message_of(each) for each in mail]

    async def _create(
        self,
        run: RunDocuments,
        data: bytes,
        workflow: str | None,
        wake_at: int,
        now: int,
        *,
        owner: str | None = None,
    ) -> Head | None:
        """Create a run, owned at once or at rest; None when another process was quicker."""
        await self.prepare(run)
        epoch = await self.next_epoch(None, now)
        head = Head(
            id=run.id,
            workflow=workflow,
            status="running",
            wake_at=wake_at,
            owner=owner,
            epoch=epoch,
            updated_at=now,
            snapshot=run.snapshot_key(self.mark()),
            folded=(epoch, 0) if owner is None else (0, 0),
        )
        await self.documents.write(head.snapshot, data.decode())
        if await self.documents.swap(run.head_key, None, head_text(head)):
            return head
        await self.documents.remove(head.snapshot)
        return None

    async def _grant(
        self, run: RunDocuments, found: tuple[str, Head], owner: str, ttl: timedelta, now: int
    ) -> Granted | None:
        """Take a run and seal what was written before; None when another was quicker."""
        text, head = found
        if head.litter is not None:
            await run.clear_again(head.litter)
        orphaned = head.owner is not None and not head.is_held(now)
        taken = replace(
            head,
            owner=owner,
            epoch=await self.next_epoch(head, now),
            status="running",
            awaits=(),
            wake_at=_end(now, ttl),
            takeovers=head.takeovers + orphaned,
            sealed=head.sealed if head.is_closed else (*head.sealed, (head.epoch, None)),
            litter=None,
        )
        if not await self.documents.swap(run.head_key, text, head_text(taken)):
            return None
        # From here on an older owner is refused; what it had written until here is counted.
        self.forget(run)
        grant: Granted | None
        try:
            with reading(run.id, msgspec.MsgspecError):
                grant = await self._read_under_lease(run, taken, now)
        except StoreCorrupted as error:
            # What cannot be read may be what the next owner has removed.
            grant = Unreadable(self._lease_of(taken), from_microseconds(now), error)
        last = await run.head()
        return grant if last is not None and last[1].holds(owner, taken.epoch) else None

    async def _read_under_lease(self, run: RunDocuments, taken: Head, now: int) -> Grant | None:
        """Count what earlier owners have written, and read it; None when the lease was lost."""
        counted = await self.count_sealed(run, taken)
        if counted.sealed and counted.sealed[-1][1]:
            counted = replace(counted, takeovers=0)
        if counted != taken and not await self.documents.swap(
            run.head_key, head_text(taken), head_text(counted)
        ):
            return None
        return await self._granted(run, counted, now)

    async def _granted(
        self, run: RunDocuments, head: Head, now: int, *, created: bool = False
    ) -> Grant:
        snapshot = await run.whole(head)
        if snapshot is None:
            raise StoreCorrupted(f"the snapshot of run {run.id!r} is missing in the store")
        mail = tuple(map(message_of, await run.mail(head)))
        lease = self._lease_of(head, mail=bool(mail))
        return Grant(lease, snapshot, from_microseconds(now), mail, head.takeovers, created)

    def _lease_of(self, head: Head, *, mail: bool = False) -> Lease:
        until = from_microseconds(head.wake_at or 0)
        return Lease(self._id(head.id), head.owner or "", head.epoch, until, mail)

    async def _asked(
        self, now: int, workflows: Sequence[str] | None
    ) -> AsyncGenerator[_Asked, None]:
        """Give the runs that have lines up to now, earliest first, and when they want a worker."""
        asked: dict[str, _Asked] = {}
        for line in await self.wakes.until(now):
            id, workflow = line.wake.id, line.wake.workflow
            chosen = workflows is None or workflow in workflows
            if chosen and id.startswith(self.prefix):
                asked.setdefault(id, _Asked(id)).lines.append(line)
        every = list(asked.values())
        for start in range(0, len(every), _CHUNK):
            chunk = every[start : start + _CHUNK]
            runs = [RunDocuments(self.documents, each.id) for each in chunk]
            texts = await self.documents.read_many([run.head_key for run in runs])
            for each, run, text in zip(chunk, runs, texts, strict=True):
                if text is not None:
                    await self._look_at(each, run, text, now)
                if text is None or workflows is None or each.workflow in workflows:
                    yield each

    async def _look_at(self, asked: _Asked, run: RunDocuments, text: str, now: int) -> None:
        """Find out when a run wants a worker; one that cannot be read is put off for an hour."""
        try:
            with reading(run.id, msgspec.MsgspecError):
                head = head_of(run.id, text)
                asked.workflow, asked.wake_at = head.workflow, await self._wake_of(run, head)
        except StoreCorrupted:
            logger.exception("run %r cannot be read; it is put off for an hour", run.id)
            asked.workflow = asked.lines[0].wake.workflow
            asked.wake_at = now + SETBACK // _MICROSECOND

    async def _wake_of(self, run: RunDocuments, head: Head) -> int | None:
        """Give when a run wants a worker: mail that it awaits wakes it sooner."""
        if not head.awaits:
            return head.wake_at
        awaited = (mail.sent_at for mail in await run.mail(head) if mail.name in head.awaits)
        return min(awaited, default=head.wake_at)

    async def _tidy(self, idle: Iterable[_Asked], now: int) -> None:
        """Take out lines of runs that have other plans, and write down those plans."""
        old = [
            asked for asked in idle if all(line.wake.filed + _GRACE < now for line in asked.lines)
        ]
        await self.wakes.add(
            Wake(asked.wake_at, asked.id, asked.workflow, now)
            for asked in old
            if asked.wake_at is not None
        )
        await self.wakes.drop((line for asked in old for line in asked.lines), now)

    def _id(self, stored_id: str) -> str:
        return stored_id[len(self.prefix) :]


class _Post:
    """Puts a message in an inbox unless it is a duplicate or too late, and tells which."""

    def __init__(
        self, name: str, payload: str, dedup_id: str | None, now: int, *, is_over: bool
    ) -> None:
        self._message = (name, payload, now)
        self._dedup_id = dedup_id
        self._is_over = is_over
        self.delivery = Delivery.DELIVERED

    def __call__(self, text: str | None) -> str | None:
        inbox = inbox_of(text)
        if self._dedup_id is not None and self._dedup_id in inbox.known:
            self.delivery = Delivery.DUPLICATE
            return text
        if self._is_over:
            self.delivery = Delivery.OVER
            return text
        self.delivery = Delivery.DELIVERED
        inbox.count += 1
        inbox.messages.append(Mail(str(inbox.count), *self._message))
        if self._dedup_id is not None:
            inbox.known.append(self._dedup_id)
        return inbox_text(inbox)


def _is_free(head: Head | None, request: LeaseRequest, now: int) -> bool:
    if head is None:
        return request.create is not None
    return request.existing and (head.owner == request.owner or not head.is_held(now))


def _workflow(head: Head | None, request: LeaseRequest) -> str | None:
    return request.workflow if head is None else head.workflow


def _end(now: int, ttl: timedelta) -> int:
    return now + ttl // _MICROSECOND


def _wake_at(run: NewRun, now: int) -> int:
    return now if run.wake_at is None else to_microseconds(run.wake_at, "wake_at")
