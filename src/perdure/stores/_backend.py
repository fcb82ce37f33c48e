"""The protocols that a database must implement for a `StoreShell`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from perdure.snapshot import RunStatus, Snapshot
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
from perdure.stores._keyvalue import KeyValueBackend
from perdure.stores._reading import Granted
from perdure.stores._searching import Position, SearchResult


class Ownership(NamedTuple):
    """The owner of a run and the expiry of its lease; both are `None` for an unowned run."""

    owner: str | None
    expires_at: datetime | None


class PruneRequest(NamedTuple):
    """Which runs to prune. `statuses` is not empty; `workflow` and `tags` restrict further."""

    older_than: timedelta
    statuses: Sequence[RunStatus]
    workflow: str | None
    tags: Sequence[str]
    limit: int
    dry_run: bool


class Backend(Protocol):
    """One database behind a `StoreShell`.

    Ids do not include the store's prefix, which a backend adds to form its keys; queues and tags
    belong to the runs that have the prefix. Times are aware datetimes: arguments are in UTC, fields
    of records (`NewRun`, `Rest`) in any time zone. Batches are not empty, and limits, including
    those of queues, are at least 1. A run that is due at once has the wake time `now - head_start`.
    The docstrings of `perdure.store` define what each method must do.
    """

    @property
    def documents(self) -> KeyValueBackend:
        """The documents beside the runs; their table is created on first use."""
        ...

    async def open(self) -> None:
        """Connect, migrate, and check the server's settings. Called before any other method."""
        ...

    def forget_loop(self) -> None:
        """Drop everything bound to an event loop that has ended; `open` is not called again."""
        ...

    async def close(self) -> None:
        """Close everything that `open` opened. Called once."""
        ...

    async def save(self, id: str, data: bytes, workflow: str | None, rest: Rest) -> None: ...

    async def load(self, id: str) -> Snapshot | None: ...

    async def delete(self, id: str) -> bool: ...

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]: ...

    async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Granted | None]: ...

    async def owners(self, ids: Sequence[str]) -> Sequence[Ownership | None]:
        """Return the ownership of each run; `None` for a missing run."""
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta) -> Sequence[Lease | None]: ...

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None: ...

    async def enqueue(self, runs: Sequence[NewRun]) -> Sequence[bool]: ...

    async def due(
        self,
        now: datetime,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Due]: ...

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        supports: Sequence[SupportedVersions] | None,
        queues: Mapping[str, int],
    ) -> Sequence[Granted]: ...

    async def queues(self, now: datetime, limit: int, low: str, high: str | None) -> Sequence[str]:
        """Return queues with due runs, by name: `low` and above, below `high` if it is given."""
        ...

    async def send(self, messages: Sequence[NewMessage]) -> Sequence[Receipt]: ...

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]: ...

    async def prune(self, request: PruneRequest) -> int: ...

    async def stats(self) -> Stats: ...

    async def search(self, query: Query, limit: int, after: Position | None) -> SearchResult:
        """Find up to `limit` runs; their cursors and revisions stay empty."""
        ...

    async def summaries(self, ids: Sequence[str]) -> Sequence[RunSummary | None]: ...

    async def counts(self, query: Query, cap: int) -> Sequence[Count]:
        """Count runs; the query filters by status and workflow only."""
        ...


class TransactionBackend(Backend, Protocol):
    """A backend that can commit a user's writes and a step's record in one transaction."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]]
    ) -> Verdict: ...


class NotifyBackend(Backend, Protocol):
    """A backend that is notified of runs that become due in other processes."""

    def notifications(self) -> AsyncGenerator[None]: ...
