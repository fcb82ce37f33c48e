"""The contract's verbs for stores that keep their own clock: checked, timed, and put to a desk."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from heapq import nlargest
from typing import NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from perdure import codec
from perdure.clock import Clock, check_clock, isoformat
from perdure.errors import InvalidArgument, StoreClosed, ValueTooLarge
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
    Rest,
    RunSummary,
    Stats,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._reading import Granted, acquire_readable, claim_readable
from perdure.stores._timestamps import from_microseconds, to_microseconds
from perdure.validation import check_id, check_limit, check_prefix

P = ParamSpec("P")
T = TypeVar("T")
Answer: TypeAlias = T | Awaitable[T]


class Line(NamedTuple):
    """A run as a list shows it; `id` has the store's prefix."""

    updated_at: int
    id: str
    status: RunStatus
    workflow: str | None


class Desk(Protocol):
    """What keeps the runs. Times are microseconds since 1970, ids are without the prefix."""

    prefix: str

    def save(
        self, id: str, data: bytes, workflow: str | None, rest: Rest, now: int
    ) -> Answer[None]: ...

    def load(self, id: str) -> Answer[Snapshot | None]: ...

    def delete(self, id: str) -> Answer[bool]: ...

    def prune(self, id: str, before: int) -> Answer[bool]: ...

    def lines(self, prefix: str) -> Answer[list[Line]]: ...

    def append(self, entries: Sequence[Entry], now: int) -> Answer[list[Verdict]]: ...

    def acquire(
        self, requests: Sequence[LeaseRequest], now: int
    ) -> Answer[list[Granted | None]]: ...

    def renew(
        self, leases: Sequence[Lease], ttl: timedelta, now: int
    ) -> Answer[list[Lease | None]]: ...

    def release(self, leases: Sequence[Lease], wake_at: int, now: int) -> Answer[None]: ...

    def enqueue(self, runs: Sequence[NewRun], now: int) -> Answer[list[bool]]: ...

    def due(self, now: int, limit: int, workflows: Sequence[str] | None) -> Answer[list[Due]]: ...

    def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None, now: int
    ) -> Answer[list[Granted]]: ...

    def send(
        self, id: str, name: str, payload: bytes, dedup_id: str | None, now: int
    ) -> Answer[Delivery]: ...

    def inbox(self, id: str) -> Answer[list[Message]]: ...


class EmbeddedStore(AsyncCloseable):
    """A store that is a desk and a clock."""

    def __init__(self, desk: Desk, clock: Clock, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._desk = desk
        self._clock = check_clock(clock)
        self._closed = False

    @abstractmethod
    async def _call(self, verb: Callable[P, Answer[T]], /, *args: P.args, **options: P.kwargs) -> T:
        """Give what the desk answers."""

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; an owner of before is fenced out."""
        data = codec.dumps(snapshot)
        self._check_size(f"the snapshot of run {check_id(id)!r}", data)
        workflow, rest = workflow_of(snapshot), rest_of(snapshot)
        await self._call(self._desk.save, id, data, workflow, rest, self._now())

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, or None."""
        self._check_open()
        return await self._call(self._desk.load, check_id(id))

    async def delete(self, id: str, /) -> bool:
        """Remove the run and all that belongs to it; tell whether there was one."""
        self._check_open()
        return await self._call(self._desk.delete, check_id(id))

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Give runs newest first, at most `limit`; every run is looked at."""
        mark = None if after is None else _mark(after, self._desk.prefix)
        check_limit(limit)
        chosen = (
            line
            for line in await self._lines(check_prefix(prefix))
            if (status is None or line.status == status)
            and (workflow is None or line.workflow == workflow)
            and (mark is None or _place(line) < mark)
        )
        return [self._listed(line) for line in nlargest(limit, chosen, key=_place)]

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries and give a verdict for each, in order."""
        check_entries(entries, self.capabilities.max_value_size)
        return await self._call(self._desk.append, entries, self._now())

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None."""
        for request in requests:
            self._check_size(f"the snapshot of run {check_id(request.id)!r}", request.create or b"")
        granted = await self._call(self._desk.acquire, requests, self._now())
        return await acquire_readable(granted, self.release)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; None for each that was lost."""
        return await self._call(self._desk.renew, leases, ttl, self._now())

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at`."""
        now = self._now()
        at = now if wake_at is None else to_microseconds(wake_at, "wake_at")
        await self._call(self._desk.release, leases, at, now)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; False for each id that was there already."""
        for run in runs:
            self._check_size(f"the snapshot of run {check_id(run.id)!r}", run.snapshot)
        return await self._call(self._desk.enqueue, runs, self._now())

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time has come at `now`, earliest first."""
        self._check_open()
        return await self._call(
            self._desk.due, to_microseconds(now, "now"), check_limit(limit), workflows
        )

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
        now = self._now()
        return await claim_readable(
            lambda left: self._call(self._desk.claim, owner, ttl, left, workflows, now),
            check_limit(limit),
            self.release,
        )

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox, and wake a run at rest that awaits it."""
        self._check_size(f"the event {name!r} for run {check_id(id)!r}", payload)
        return await self._call(self._desk.send, id, name, payload, dedup_id, self._now())

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent."""
        self._check_open()
        return await self._call(self._desk.inbox, check_id(id))

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and were last updated longer ago than that."""
        before = self._now() - older_than // timedelta(microseconds=1)
        old = [
            line.id[len(self._desk.prefix) :]
            for line in await self._lines()
            if is_over(line.status)
            and (status is None or line.status == status)
            and line.updated_at < before
        ]
        # One by one: each is looked at again, as somebody may have woken it meanwhile.
        return sum(
            [await self._call(self._desk.prune, id, before) for id in old[: check_limit(limit)]]
        )

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        by_status = Counter[str](line.status for line in await self._lines())
        oldest = await self.due(from_microseconds(self._now()), 1)
        return Stats(by_status, oldest[0].wake_at if oldest else None)

    async def _lines(self, prefix: str = "") -> Sequence[Line]:
        self._check_open()
        return await self._call(self._desk.lines, self._desk.prefix + prefix)

    def _listed(self, line: Line) -> RunSummary:
        id = line.id[len(self._desk.prefix) :]
        updated_at = isoformat(from_microseconds(line.updated_at))
        return RunSummary(id, updated_at, line.status, line.workflow, f"{line.updated_at} {id}")

    def _now(self) -> int:
        self._check_open()
        return to_microseconds(self._clock.now())

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {type(self).__name__} was closed; its runs are still there")

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self.capabilities.max_value_size:
            raise ValueTooLarge(what, len(data), self.capabilities.max_value_size)


def _place(line: Line) -> tuple[int, str]:
    return line.updated_at, line.id


def _mark(cursor: str, prefix: str) -> tuple[int, str]:
    updated_at, _, id = cursor.partition(" ")
    if not updated_at.isdecimal() or not id:
        raise InvalidArgument("after", cursor, "the cursor of a listed run")
    return int(updated_at), prefix + id
