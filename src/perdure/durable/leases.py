"""The leases that this process holds on runs and permits, which it renews together."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.durable.in_flight import StepInFlight
from perdure.durable.store_errors import store_errors
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.errors import InvalidArgument, StoreError
from perdure.store import Lease, Store, require_lease

logger = logging.getLogger(__name__)

LEASE_TTL = timedelta(seconds=30)


def check_lease_ttl(lease_ttl: Duration) -> timedelta:
    """Return how long a lease lasts; raise unless it is a positive duration."""
    ttl = parse_duration(lease_ttl, "lease_ttl")
    if not ttl:
        raise InvalidArgument("lease_ttl", lease_ttl, "a positive duration")
    return ttl


class Leased(Protocol):
    """A run or a permit whose lease is renewed, if it has one."""

    @property
    def id(self) -> str: ...
    @property
    def lease(self) -> Lease | None: ...

    def update_lease(self, lease: Lease) -> None:
        """Continue with the lease's new expiry."""
        ...

    def lose(self) -> None:
        """Stop, because another process owns it."""
        ...


class LeasedRun(Leased, Protocol):
    """A run that is active in this process."""

    @property
    def entries(self) -> int: ...

    def message_came(self) -> None:
        """Check the inbox."""
        ...

    def steps_in_flight(self) -> Sequence[StepInFlight]:
        """Return the steps that are being executed."""
        ...


class HeldLeases:
    """The leases that this process holds in one store, each for `ttl` after it was last renewed."""

    def __init__(self, store: Store, clock: Clock, ttl: timedelta) -> None:
        self._store = store
        self._clock = clock
        self._ttl = ttl
        self._runs: dict[str, LeasedRun] = {}
        self._permits: dict[str, Leased] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._first_renewal: asyncio.TimerHandle | None = None
        self._renewal_lock: asyncio.Lock | None = None
        self._renewed_at = 0.0

    def hold(self, run: LeasedRun) -> None:
        """Renew the lease of this run from now on, if it has one."""
        if run.lease is None:
            return
        self._runs[run.id] = run
        self._start_renewer()

    def drop(self, run: LeasedRun) -> None:
        """Stop renewing the lease of this run."""
        # A host that ends late must not drop its successor: this process may have leased the run
        # again.
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    def hold_permit(self, permit: Leased) -> None:
        """Renew the lease of a permit from now on."""
        self._permits[permit.id] = permit
        self._start_renewer()

    def drop_permit(self, permit: Leased) -> None:
        """Stop renewing the lease of a permit."""
        if self._permits.get(permit.id) is permit:
            del self._permits[permit.id]

    def poke(self, run_id: str) -> None:
        """Make an active run check its inbox."""
        if (run := self._runs.get(run_id)) is not None:
            run.message_came()

    def active_runs(self, run_ids: Iterable[str]) -> list[LeasedRun]:
        """Return the runs among these that are active here."""
        return [run for run_id in run_ids if (run := self._runs.get(run_id)) is not None]

    def entries_of(self, run_id: str) -> int:
        """Return how many entries an active run has written since it was leased."""
        run = self._runs.get(run_id)
        return 0 if run is None else run.entries

    async def catch_up(self) -> None:
        """Renew leases whose renewal is long overdue.

        The event loop may have been blocked, or the store unavailable. A worker does this before it
        looks for orphans, so as not to claim its own runs.
        """
        longest = self._ttl.total_seconds() * 2 / 3
        is_renewing = self._runs or self._permits
        if is_renewing and self._clock.monotonic() - self._renewed_at > longest:
            await self._renew_once()

    def _start_renewer(self) -> None:
        if self._renewer is not None or self._first_renewal is not None:
            return
        self._renewed_at = self._clock.monotonic()
        # A third of the time to live, so that two renewals may fail before a lease is lost.
        pause = self._ttl / 3
        if type(self._clock) is SystemClock:
            # Most calls of `durable.run` end before the first renewal. A timer saves them a task,
            # whose start and end are a sixth of the CPU time of a run with one step.
            loop = asyncio.get_running_loop()
            self._first_renewal = loop.call_later(pause.total_seconds(), self._renew_from_now)
        else:
            self._renewer = detached(self._renew(pause))

    def _renew_from_now(self) -> None:
        self._renewer = detached(self._renew(timedelta(0)))

    async def _renew(self, pause: timedelta) -> None:
        while True:
            await self._clock.sleep(pause)
            try:
                await self._renew_once()
                pause = self._ttl / 3
            except StoreError as error:
                # More often, because the leases have only two thirds of their time left.
                pause = self._ttl / 12
                logger.warning("leases could not be renewed (%s); retrying in %s", error, pause)

    async def _renew_once(self) -> None:
        # Created on first use, because most sessions end before.
        lock = self._renewal_lock = self._renewal_lock or asyncio.Lock()
        # A worker that catches up may meet the renewer: an older reply must not replace a newer
        # lease.
        async with lock:
            start = self._clock.monotonic()
            # A copy, because runs come and go while the store replies. A run that was released in
            # the meantime is reported as lost, which no longer matters.
            holders: list[Leased] = [*self._runs.values(), *self._permits.values()]
            pairs = [(each, each.lease) for each in holders if each.lease is not None]
            leases: Sequence[Lease | None] = ()
            if pairs:
                with store_errors(self._store, f"renew {len(pairs)} leases"):
                    leases = await require_lease(self._store).renew(
                        [lease for _, lease in pairs], self._ttl
                    )
            # The time before the request, because leases count from when the store received it.
            self._renewed_at = start
        for (each, _), lease in zip(pairs, leases, strict=True):
            if lease is None:
                self.drop_permit(each)
                each.lose()
            else:
                each.update_lease(lease)

    async def close(self) -> None:
        """Stop renewing."""
        if self._first_renewal is not None:
            self._first_renewal.cancel()
        if self._renewer is not None:
            await cancel_and_wait([self._renewer])
