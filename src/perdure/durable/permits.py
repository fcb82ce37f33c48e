"""Permits: leases on the units of a limit.

A limit of n consists of n system runs, its permits, in a separate queue. A free permit is a due
run: a claim takes it, a release returns it, and the permits of a process that died expire with its
other leases. So there is no counter that could leak, and nothing to repair after a crash. The
permit of a rate is claimed for the period of the rate; once used, it is neither renewed nor
returned.

Beyond 1,000 units, a permit has several units; the process keeps those that it does not need at
once.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice

from perdure import codec
from perdure.clock import Clock
from perdure.durable.leases import HeldLeases
from perdure.errors import StoreError
from perdure.limits import MAX_PERMITS, PermitLimit
from perdure.snapshot import new_snapshot
from perdure.store import (
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    NewRun,
    QueueStore,
    Rest,
    SupportedVersions,
    require_journal,
)

logger = logging.getLogger(__name__)

WORKFLOW = "~permit"
_SUPPORTS = [SupportedVersions(WORKFLOW, 1, 1)]
_BATCH = 500

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds until a claim that found no permit is repeated; the pause doubles each time."""

CREATE_AGAIN, CREATED_FOR = 10.0, 1800.0
"""After how many seconds permits are created again: of a limit of which there were too few, since
another deployment may have declared a lower one; and of any other, since they may be deleted."""

IDLE = timedelta(hours=1)
"""How long the permits of a key are kept after their last use."""

_MOST_POOLS = 10_000


class Hold:
    """Units of permits that a run, or an attempt of a step, uses until `end`.

    If a permit is lost in the meantime, `on_lost` is called, because another process may use it.
    """

    __slots__ = ("on_lost", "parts")

    def __init__(self) -> None:
        self.parts: list[tuple[Permit, int]] = []
        self.on_lost: Callable[[], object] = lambda: None

    def end(self) -> None:
        """Stop using the units, so that others can use them, or they can be returned."""
        for permit, units in self.parts:
            permit.holds.discard(self)
            permit.pool.give_back(permit, units)
        self.parts.clear()


class Permit:
    """A permit that this process holds; `free` of its units are not in use."""

    __slots__ = ("expires", "free", "holds", "id", "is_lost", "is_spent", "lease", "pool", "units")

    def __init__(self, pool: "Pool", lease: Lease, units: int, expires: float) -> None:
        self.id = lease.id
        self.lease = lease
        self.pool = pool
        self.units = self.free = units
        self.expires = expires
        self.holds: set[Hold] = set()
        self.is_lost = self.is_spent = False

    def update_lease(self, lease: Lease) -> None:
        """Continue with the lease's new expiry."""
        self.lease = lease

    def lose(self) -> None:
        """Stop the users of the permit, because another process may have claimed it."""
        if not self.is_lost:
            self.is_lost = True
            self.pool.remove(self)
            for hold in tuple(self.holds):
                hold.on_lost()


class Pool:
    """The permits of one limit that this process holds.

    `free` is how many units are not in use. `look_at` is when to claim again after a claim that
    found too few, by the monotonic clock. `fresh` are permits that have become free since it was
    last cleared.
    """

    def __init__(self, limit: PermitLimit) -> None:
        self.limit = limit
        self.free = 0
        self.look_at = 0.0
        self.created_at: float | None = None
        self.on_free: Callable[[Pool], object] = lambda _: None
        self.surplus: list[Permit] = []
        self.fresh: set[Permit] = set()
        self._open: dict[str, Permit] = {}
        self._pause = 0.0
        # When permits of a rate that were used here can be claimed again.
        self._expiries: deque[float] = deque()

    @property
    def is_used(self) -> bool:
        """Whether the process holds an unused permit, or knows when to claim one."""
        return bool(self._open or self.surplus or self._expiries)

    def change(self, limit: PermitLimit) -> None:
        """Continue with another number of units; units in use are not affected."""
        self.limit = limit
        # The permits that a higher number adds may not exist yet.
        self.created_at, self.look_at = None, 0.0
        for permit in tuple(self._open.values()):
            if not limit.units_of(permit.id):
                self.remove(permit)
                if not permit.is_spent:
                    self.surplus.append(permit)

    def missing(self, units: int) -> int:
        """Return how many permits to claim in order to have `units` free units."""
        return max(-(-(units - self.free) // self.limit.unit), 0)

    def add(self, lease: Lease, expires: float) -> Permit:
        """Add a permit that was claimed."""
        units = self.limit.units_of(lease.id)
        permit = Permit(self, lease, units, expires)
        if units:
            self._open[permit.id] = permit
            self.free += units
        else:
            self.surplus.append(permit)
        return permit

    def take(self, units: int, hold: Hold) -> None:
        """Use some of the free units."""
        while units:
            # The longest-free permit: those that have just become free are kept for the next round.
            permit = next(iter(self._open.values()))
            share = min(units, permit.free)
            self._take(permit, share)
            units -= share
            if self.limit.per is None:
                permit.holds.add(hold)
                hold.parts.append((permit, share))
            elif not permit.is_spent:
                permit.is_spent = True
                self._expiries.append(permit.expires)

    def _take(self, permit: Permit, units: int) -> None:
        permit.free -= units
        self.free -= units
        self.fresh.discard(permit)
        if not permit.free:
            del self._open[permit.id]

    def give_back(self, permit: Permit, units: int) -> None:
        """Make units free again."""
        permit.free += units
        # Another process may have claimed it, so its units are no longer ours to use.
        if permit.is_lost:
            return
        if self.limit.units_of(permit.id):
            self.free += units
            self.look_at = 0.0
            self._open[permit.id] = permit
            self.fresh.add(permit)
        elif permit.free == permit.units:
            self.surplus.append(permit)
        self.on_free(self)

    def remove(self, permit: Permit) -> None:
        """Forget a permit."""
        if self._open.pop(permit.id, None) is not None:
            self.free -= permit.free

    def expire(self, now: float) -> None:
        """Forget the permits of a rate whose period has ended."""
        if self.limit.per is None:
            return
        for permit in tuple(self._open.values()):
            if permit.expires <= now:
                self.remove(permit)
        while self._expiries and self._expiries[0] <= now:
            self._expiries.popleft()
            # The store's period may end a little later, so repeat a claim that is too early soon.
            self._pause = 0.0

    def take_idle(self, keep: Collection[Permit] = ()) -> list[Permit]:
        """Remove and return the permits that are completely unused, except those in `keep`."""
        permits = self._open.values()
        idle = [each for each in permits if each.free == each.units and not each.is_spent]
        unused = [permit for permit in idle if permit not in keep]
        for permit in unused:
            self.remove(permit)
        return unused

    def note_answer(self, is_short: bool, now: float) -> None:
        """Note whether a claim found fewer permits than requested."""
        if not is_short:
            self._pause = self.look_at = 0.0
            return
        shortest = FIRST_PAUSE
        if (per := self.limit.per) is not None:
            shortest = min(max(per.total_seconds() / 100, FIRST_PAUSE / 2), LONGEST_PAUSE)
        self._pause = min(max(self._pause * 2, shortest), LONGEST_PAUSE)
        self.look_at = now + self._pause
        if self._expiries:
            self.look_at = min(self.look_at, max(self._expiries[0], now + shortest))
        if self.created_at is not None and now - self.created_at > CREATE_AGAIN:
            self.created_at = None


class Permits:
    """The permits of one store that one owner in this process holds, by limit."""

    def __init__(
        self, store: QueueStore, leases: HeldLeases, clock: Clock, ttl: timedelta, owner: str
    ) -> None:
        self.store = store
        self.clock = clock
        self.owner = owner
        self._leases = leases
        self._ttl = ttl
        self._pools: dict[str, Pool] = {}
        self._numbers: Mapping[str, int] = {}

    def set_numbers(self, numbers: Mapping[str, int]) -> None:
        """Override the declared numbers of units, by limit."""
        self._numbers = numbers

    def pool(self, limit: PermitLimit) -> Pool:
        """Return the pool of a limit."""
        if (n := self._numbers.get(limit.name)) is not None:
            limit = PermitLimit(limit.name, n, limit.per)
        pool = self._pools.get(limit.name)
        if pool is None:
            # Every key of a queue has a pool, and keys may be as many as customers.
            if len(self._pools) >= _MOST_POOLS:
                self._pools = {name: each for name, each in self._pools.items() if each.is_used}
            pool = self._pools[limit.name] = Pool(limit)
        elif pool.limit != limit:
            pool.change(limit)
        return pool

    def pools_of_key(self, queue: str) -> list[Pool]:
        """Return the existing pools of one key of a queue."""
        names = (f"queue:{queue}", f"rate:{queue}")
        return [self._pools[name] for name in names if name in self._pools]

    async def claim(self, units_by_pool: Mapping[Pool, int]) -> None:
        """Claim permits so that each pool has the wanted free units, as far as possible."""
        now = self.clock.monotonic()
        for pool in units_by_pool:
            pool.expire(now)
        await self._create([pool for pool in units_by_pool if self._is_to_create(pool, now)])
        by_ttl: defaultdict[timedelta, dict[Pool, int]] = defaultdict(dict)
        for pool, units in units_by_pool.items():
            if (missing := pool.missing(units)) and pool.look_at <= now:
                by_ttl[pool.limit.per or self._ttl][pool] = missing
        for ttl, missing_by_pool in by_ttl.items():
            await self._claim(ttl, missing_by_pool)

    async def _claim(self, ttl: timedelta, missing: Mapping[Pool, int]) -> None:
        numbers = {pool.limit.queue: number for pool, number in missing.items()}
        pools = {pool.limit.queue: pool for pool in missing}
        # The time before the call: the store counts from a later time, and a permit that is used
        # after its period would overlap with the next grant of the same permit.
        expiry = self.clock.monotonic() + ttl.total_seconds()
        grants = await self.store.claim(
            self.owner, ttl, sum(numbers.values()), supports=_SUPPORTS, queues=numbers
        )
        for grant in grants:
            numbers[grant.queue] -= 1
            pool = pools[grant.queue]
            is_rate = pool.limit.per is not None
            permit = pool.add(grant.lease, expiry if is_rate else float("inf"))
            if not is_rate:
                self._leases.hold_permit(permit)
        now = self.clock.monotonic()
        for name, pool in pools.items():
            pool.note_answer(numbers[name] > 0, now)

    def _is_to_create(self, pool: Pool, now: float) -> bool:
        return pool.created_at is None or now - pool.created_at > CREATED_FOR

    async def _create(self, pools: Collection[Pool]) -> None:
        """Create the permits that do not exist yet."""
        if not pools:
            return
        snapshot = codec.dumps(new_snapshot(WORKFLOW, now=self.clock.now()))
        new = (
            NewRun(id, WORKFLOW, snapshot, queue=pool.limit.queue)
            for pool in pools
            for id in pool.limit.ids()
        )
        # Permits that exist, even leased ones, are not changed: `enqueue` skips their ids.
        while batch := list(islice(new, _BATCH)):
            await self.store.enqueue(batch)
        for pool in pools:
            pool.created_at = self.clock.monotonic()

    async def return_idle(self, pools: Iterable[Pool], *, keep_fresh: bool = False) -> None:
        """Return unused permits, and delete those that no longer belong to a changed limit.

        With `keep_fresh`, permits that have just become free are kept for the next run.
        """
        idle: list[Permit] = []
        surplus: list[Permit] = []
        for pool in pools:
            idle += pool.take_idle(pool.fresh if keep_fresh else ())
            surplus += pool.surplus
            pool.surplus.clear()
        # Before the release: a renewal that finds a released lease would report the permit as lost.
        for permit in (*idle, *surplus):
            self._leases.drop_permit(permit)
        try:
            if idle:
                await self.store.release([permit.lease for permit in idle])
            if surplus:
                await self._delete([permit.lease for permit in surplus])
        except StoreError as error:
            logger.warning("permits were not returned (%s); they will expire", error)

    async def _delete(self, leases: Iterable[Lease]) -> None:
        rest = Rest("completed", delete=True)
        entries = [Entry(lease.id, lease.epoch, 1, b"", rest=rest) for lease in leases]
        await require_journal(self.store).append(entries)

    async def delete_unused(self, queue: str, now: datetime) -> None:
        """Delete the permits of the queue's keys that no process has used for an hour."""
        last_use = now - IDLE
        for kind in ("queue", "rate"):
            prefix = f"~permit:{kind}:{queue}/"
            while names := await self.store.queues(last_use, 100, prefix=prefix):
                limits = dict.fromkeys(names, MAX_PERMITS)
                unused_permits = await self.store.due(
                    last_use, _BATCH, supports=_SUPPORTS, queues=limits
                )
                if not await self._delete_free([run.id for run in unused_permits]):
                    break

    async def _delete_free(self, ids: Sequence[str]) -> bool:
        """Delete permits, except those that were claimed since they were found."""
        # Leased before they are deleted, so that no other process can claim one in between.
        requests = [LeaseRequest(id, self.owner, self._ttl) for id in ids]
        answers = await self.store.acquire(requests) if requests else ()
        leases = [answer.lease for answer in answers if isinstance(answer, Grant)]
        if leases:
            await self._delete(leases)
        for id in ids:
            name = id.rpartition("#")[0].removeprefix("~permit:")
            if (pool := self._pools.get(name)) is not None:
                pool.created_at = None
        return bool(leases)
