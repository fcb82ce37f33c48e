"""The public verbs of a store, written once for all backends.

`StoreShell` checks arguments, measures sizes, sets the backend up when it is first used, reads and
writes cursors, and skips runs that cannot be read. A `Backend` does what is special about one
database and may rely on checked arguments.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from perdure import codec
from perdure.clock import as_utc, isoformat, parse_iso
from perdure.errors import InvalidArgument, ValueTooLarge
from perdure.keyvalue import Documents
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
    Refusal,
    Rest,
    RunSummary,
    Stats,
    Verdict,
    check_entries,
    rest_of,
)
from perdure.stores._keyvalue import KeyValueBackend, StoreDocuments
from perdure.stores._lifecycle import Lifecycle
from perdure.stores._reading import Granted, acquire_readable, claim_readable
from perdure.validation import check_id, check_limit, check_prefix

OVER: tuple[RunStatus, ...] = ("completed", "failed", "cancelled")


class Query(NamedTuple):
    """The arguments of `list`; `after` is the last update and the id of a listed run."""

    prefix: str
    limit: int
    status: RunStatus | None
    workflow: str | None
    after: tuple[datetime, str] | None


class Ownership(NamedTuple):
    """The owner of a run and the expiry of its lease; both are `None` for an unowned run."""

    owner: str | None
    expires_at: datetime | None


class Row(NamedTuple):
    """One listed run, as a backend reads it."""

    id: str
    updated_at: datetime
    status: RunStatus
    workflow: str | None
    owner: str | None


class Backend(Protocol):
    """One database behind a `StoreShell`.

    Ids do not include the store's prefix, which a backend adds to form its keys. Times are aware
    datetimes: those of arguments in UTC, those in records (`NewRun`, `Rest`) in any time zone.
    Batches are not empty, and limits are at least 1. The docstrings of `perdure.store` define what
    each verb must do.
    """

    @property
    def documents(self) -> KeyValueBackend:
        """The documents beside the runs; their table is created when they are first used."""
        ...

    async def open(self) -> None:
        """Set the database up: connect, migrate, check its settings. Called before any verb."""
        ...

    def forget_loop(self) -> None:
        """Drop what was bound to an event loop that has ended; `open` is not called again."""
        ...

    async def close(self) -> None:
        """Close what `open` opened; called once."""
        ...

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None: ...

    async def load(self, id: str) -> Snapshot | None: ...

    async def delete(self, id: str) -> bool: ...

    async def list(self, query: Query) -> Sequence[Row]: ...

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]: ...

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]: ...

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Return the ownership of each run; `None` for a missing run."""
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]: ...

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None: ...

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]: ...

    async def due(
        self, now: datetime, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Due]: ...

    async def claim(
        self, owner: str, ttl: timedelta, limit: int, workflows: Sequence[str] | None
    ) -> Sequence[Granted]: ...

    async def send(self, id: str, name: str, payload: bytes, dedup_id: str | None) -> Delivery: ...

    async def inbox(self, id: str) -> Sequence[Message]: ...

    async def prune(
        self, older_than: timedelta, statuses: Sequence[RunStatus], limit: int
    ) -> int: ...

    async def stats(self) -> Stats: ...


class TransactionBackend(Backend, Protocol):
    """A backend whose transaction can hold a user's writes beside a step's record."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict: ...


class NotifyBackend(Backend, Protocol):
    """A backend that is notified of runs that become due in other processes."""

    def notifications(self) -> AsyncGenerator[None]: ...


B = TypeVar("B", bound=Backend)
TB = TypeVar("TB", bound=TransactionBackend)
NB = TypeVar("NB", bound=NotifyBackend)


class StoreShell(AsyncCloseable, Generic[B]):
    """A store: a backend, and what all stores have in common around it.

    `name` is the name of the database in error messages. A store whose connections belong to an
    event loop cannot be used in a second one, unless `any_loop` is set.
    """

    def __init__(
        self, backend: B, name: str, capabilities: Capabilities, *, any_loop: bool = False
    ) -> None:
        self.capabilities = capabilities
        self._backend = backend
        self._life = Lifecycle(name, backend.open, on_move=backend.forget_loop, any_loop=any_loop)
        self._documents_life = Lifecycle(name, backend.documents.set_up, any_loop=True)

    @property
    def documents(self) -> Documents:
        """Strings under keys in the same database, with compare-and-set and times to live.

        They open and close with the store, and no store with another prefix sees them. A key is a
        non-empty string of at most 512 characters, a value is as large as a snapshot may be;
        neither contains NUL.
        """
        # Not cached: a reference to the store inside itself would delay its collection.
        return StoreDocuments(self._backend.documents, self._documents_ready, self._check_size)

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`; the run's previous owner is fenced out."""
        check_id(id)
        data, rest = codec.dumps(snapshot), rest_of(snapshot)
        workflow = _check_workflow(workflow_of(snapshot))
        await self._life.ready()
        self._check_size(f"the snapshot of run {id!r}", data)
        await self._backend.save(id, data, workflow, rest)

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the merged snapshot, or `None` if there is no such run."""
        check_id(id)
        await self._life.ready()
        return await self._backend.load(id)

    async def delete(self, id: str, /) -> bool:
        """Delete the run with its journal, lease and inbox; return whether it existed."""
        check_id(id)
        await self._life.ready()
        return await self._backend.delete(id)

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Return up to `limit` runs, the most recently updated first."""
        place = None if after is None else _read_cursor(after)
        query = Query(check_prefix(prefix), check_limit(limit), status, workflow, place)
        await self._life.ready()
        return [_summary(row) for row in await self._backend.list(query)] if limit else []

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open."""
        if self._life.close():
            await self._backend.close()

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries together and return a verdict on each, in order."""
        await self._life.ready()
        check_entries(entries, self._max_value_size)
        return await self._backend.append(entries) if entries else []

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return for each request its lease and the run read under it, or the reason why not."""
        await self._life.ready()
        for request in requests:
            check_id(request.id)
            check_id(request.owner, "owner")
            _check_workflow(request.workflow)
            self._check_size(f"the snapshot of run {request.id!r}", request.create or b"")
            if request.instead_of is not None:
                check_id(request.instead_of, "instead_of")
        if not requests:
            return []
        granted = await acquire_readable(await self._backend.acquire(requests), self.release)
        refused = [
            request for request, grant in zip(requests, granted, strict=True) if grant is None
        ]
        # Asked only after a refusal, which is rare. The owner may have changed since then: what is
        # taken over by `instead_of` is compared with the owner again.
        owners = await self._backend.owners([request.id for request in refused]) if refused else ()
        refusals = map(_refusal, refused, owners)
        return [next(refusals) if grant is None else grant for grant in granted]

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Extend all leases to `ttl` from now; return `None` for each that was lost."""
        await self._life.ready()
        return await self._backend.renew(leases, ttl) if leases else []

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Release the leases without a rest, so that the runs can be claimed at `wake_at`."""
        at = None if wake_at is None else as_utc(wake_at, "wake_at")
        await self._life.ready()
        if leases:
            await self._backend.release(leases, at)

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim; return `False` for each id that existed already."""
        await self._life.ready()
        for run in runs:
            check_id(run.id)
            _check_workflow(run.workflow)
            if run.wake_at is not None:
                as_utc(run.wake_at, "wake_at")
            self._check_size(f"the snapshot of run {run.id!r}", run.snapshot)
        return await self._backend.enqueue(runs) if runs else []

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Return up to `limit` runs whose wake time is at or before `now`, earliest first."""
        at = as_utc(now, "now")
        nothing = check_limit(limit) == 0 or _is_empty(workflows)
        await self._life.ready()
        return [] if nothing else await self._backend.due(at, limit, workflows)

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due or orphaned, earliest first."""
        check_id(owner, "owner")
        nothing = check_limit(limit) == 0 or _is_empty(workflows)
        await self._life.ready()
        if nothing:
            return []
        return await claim_readable(
            lambda left: self._backend.claim(owner, ttl, left, workflows), limit, self.release
        )

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put a message in the run's inbox; an unowned run that awaits it becomes due."""
        check_id(id)
        await self._life.ready()
        self._check_size(f"the event {name!r} for run {id!r}", payload)
        return await self._backend.send(id, name, payload, dedup_id)

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Return the run's unconsumed messages in the order they were sent."""
        check_id(id)
        await self._life.ready()
        return await self._backend.inbox(id)

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over and older than `older_than`; return how many."""
        statuses = OVER if status is None else (status,) if is_over(status) else ()
        nothing = check_limit(limit) == 0 or not statuses
        await self._life.ready()
        return 0 if nothing else await self._backend.prune(older_than, statuses, limit)

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        await self._life.ready()
        return await self._backend.stats()

    async def _documents_ready(self) -> None:
        await self._life.ready()
        await self._documents_life.ready()

    @property
    def _max_value_size(self) -> int:
        """The largest value that the backend accepts, known once it is set up."""
        return self.capabilities.max_value_size

    def _check_size(self, what: str, data: bytes) -> None:
        if len(data) > self._max_value_size:
            raise ValueTooLarge(what, len(data), self._max_value_size)


class TransactionShell(StoreShell[TB]):
    """A store with transactions."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Commit what `work` writes on the store's connection together with the entry it returns.

        With an epoch that is older or closed, `work` is not called.
        """
        check_id(id)
        await self._life.ready()

        async def checked(connection: Any) -> Entry:
            entry = await work(connection)
            if (entry.id, entry.epoch) != (id, epoch):
                raise InvalidArgument("work", entry, f"an entry of run {id!r} and epoch {epoch}")
            check_entries([entry], self._max_value_size)
            return entry

        return await self._backend.transact(id, epoch, checked)


class NotifyShell(StoreShell[NB]):
    """A store that sends notifications."""

    async def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process; end when the store closes."""
        await self._life.ready()
        # Closed here, and not by the garbage collector: it may hold a connection.
        async with aclosing(self._backend.notifications()) as notifications:
            async for notification in notifications:
                yield notification


def _check_workflow(workflow: str | None) -> str | None:
    return None if workflow is None else check_id(workflow, "workflow")


def _is_empty(workflows: Sequence[str] | None) -> bool:
    return workflows is not None and not workflows


def _summary(row: Row) -> RunSummary:
    cursor = f"{row.updated_at.isoformat()} {row.id}"
    updated_at = isoformat(row.updated_at)
    return RunSummary(row.id, updated_at, row.status, row.workflow, cursor, row.owner)


def _refusal(request: LeaseRequest, ownership: Ownership | None) -> Refusal:
    if ownership is None:
        return Refusal(request.id, "missing")
    if not request.existing:
        return Refusal(request.id, "exists", *ownership)
    return Refusal(request.id, "owned", *ownership)


def _read_cursor(cursor: str) -> tuple[datetime, str]:
    time, _, id = cursor.partition(" ")
    if not id:
        raise InvalidArgument("after", cursor, "the cursor of a listed run")
    return parse_iso(time, "after"), id
