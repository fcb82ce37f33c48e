"""A store with four methods (`save`, `load`, `delete`, `due`) and an optional lease, as a `Store`.

This is the interface of visulima's `WorkflowStore`: `save` takes the whole run, and `acquire` takes
a free or expired lease, or renews the caller's own.

    store = runs(my_run_store)
    await durable.run(deps, checkout, id="checkout-1", store=store)
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NotRequired, Protocol, TypedDict

from perdure import codec
from perdure.clock import Clock, SystemClock
from perdure.errors import InvalidArgument, MissingAbility
from perdure.snapshot import RunStatus, Snapshot, awaits_of, rest_status, wake_at_of, workflow_of
from perdure.store import (
    AsyncCloseable,
    Capabilities,
    Grant,
    Lease,
    LeaseRequest,
    Refusal,
    RunSummary,
)
from perdure.stores._timestamps import to_microseconds
from perdure.validation import check_id


class StoredRun(TypedDict):
    """A run as a four-method store keeps it."""

    run_id: str
    definition_id: str | None
    status: RunStatus
    updated_at: datetime
    snapshot: Snapshot
    wake_at: NotRequired[datetime]
    event_name: NotRequired[str]


class RunStore(Protocol):
    """The four methods; `acquire(run_id, token, ttl)` and `release(run_id, token)` are optional."""

    async def save(self, run: StoredRun, /) -> object:
        """Store the run, replacing one with the same id."""
        ...

    async def load(self, run_id: str, /) -> StoredRun | None:
        """Return the run, or `None`."""
        ...

    async def delete(self, run_id: str, /) -> object:
        """Delete the run."""
        ...

    async def due(self, now: datetime, limit: int, /) -> Sequence[str]:
        """Return the ids of runs whose wake time has passed, earliest first."""
        ...


def runs(store: RunStore, *, clock: Clock = SystemClock()) -> "RunsStore":
    """Return a four-method store as a `Store`; its lease is used if it has one."""
    for verb in ("save", "load", "delete", "due"):
        if not callable(getattr(store, verb, None)):
            raise InvalidArgument("store", store, f"a store with the method {verb}")
    acquire: Any = getattr(store, "acquire", None)
    release: Any = getattr(store, "release", None)
    if acquire is not None and release is not None:
        return LeasedRunsStore(store, clock, acquire, release)
    return RunsStore(store, clock)


class RunsStore(AsyncCloseable):
    """Runs in a four-method store without a lease, for one process."""

    capabilities = Capabilities()

    def __init__(self, store: RunStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run with `snapshot`."""
        run: StoredRun = {
            "run_id": check_id(id),
            "definition_id": workflow_of(snapshot),
            "status": rest_status(snapshot),
            "updated_at": self._clock.now(),
            "snapshot": snapshot,
        }
        if (wake_at := wake_at_of(snapshot)) is not None:
            run["wake_at"] = wake_at
        if names := awaits_of(snapshot):
            run["event_name"] = names[0]
        await self._store.save(run)

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the run's snapshot, or `None`."""
        run = await self._store.load(check_id(id))
        return None if run is None else run["snapshot"]

    async def delete(self, id: str, /) -> bool:
        """Delete the run; return whether it existed."""
        existed = await self.load(id) is not None
        await self._store.delete(id)
        return existed

    async def list(self, **_: Any) -> Sequence[RunSummary]:
        """Raise `MissingAbility`: none of the four methods lists runs."""
        raise MissingAbility(self._store, "list", "listing runs")

    async def close(self) -> None:
        """Do nothing: the caller that opened the store closes it."""


class LeasedRunsStore(RunsStore):
    """Runs in a four-method store with a lease, which is best effort: it does not fence writes."""

    capabilities = Capabilities(lease="best_effort")

    def __init__(
        self,
        store: RunStore,
        clock: Clock,
        acquire: Callable[..., Awaitable[bool]],
        release: Callable[..., Awaitable[object]],
    ) -> None:
        super().__init__(store, clock)
        self._acquire = acquire
        self._release = release

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return a lease and the run, or a refusal, for each request.

        The store does not name the owner, so `instead_of` has no effect.
        """
        return [await self._grant(request) for request in requests]

    async def _grant(self, request: LeaseRequest) -> Grant | Refusal:
        existing = await self.load(request.id)
        if existing is not None and not request.existing:
            return Refusal(request.id, "exists")
        if existing is None:
            if request.create is None:
                return Refusal(request.id, "missing")
            # Some of these stores can lease only an existing run.
            await self.save(request.id, codec.loads(request.create))
        if not await self._acquire(request.id, request.owner, request.ttl):
            return Refusal(request.id, "owned")
        now = self._clock.now()
        snapshot = await self.load(request.id)
        if snapshot is None:
            return Refusal(request.id, "missing")
        lease = Lease(request.id, request.owner, to_microseconds(now), now + request.ttl)
        return Grant(lease, snapshot, now, created=existing is None)

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Extend leases; return `None` for each that was lost."""
        return [await self._renew(lease, ttl) for lease in leases]

    async def _renew(self, lease: Lease, ttl: timedelta) -> Lease | None:
        if not await self._acquire(lease.id, lease.owner, ttl):
            return None
        return Lease(lease.id, lease.owner, lease.epoch, self._clock.now() + ttl)

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Release the leases; `wake_at` is ignored, since nothing is scheduled."""
        for lease in leases:
            await self._release(lease.id, lease.owner)
