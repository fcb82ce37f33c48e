"""Take runs from queues, in turn and within the limits of their queue.

A round asks which keys of a queue have due runs, and how many; claims permits for them; claims as
many runs as it has permits; and returns the remaining permits. Permits come first: a worker that
claimed runs first would take the first runs of saturated keys again and again.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

import msgspec

from perdure.durable.permits import FIRST_PAUSE, Hold, Permits, Pool
from perdure.errors import StoreError
from perdure.limits import Queue, queue_limits
from perdure.store import Grant, SupportedVersions

logger = logging.getLogger(__name__)

KEYS = 100
"""The maximum number of keys of a queue that a round looks at."""

FEWEST_KEYS = 16
"""The minimum number, even if there is room for fewer runs: some keys may be saturated."""

MOST_SERVED = 10 * KEYS
"""The maximum number of keys whose last turn is remembered."""

SHORTEST_PAUSE = 0.001

LATER = timedelta(seconds=1)
"""When a run is claimed again that observes the limits of a queue without being in it."""

CLEANUP_INTERVAL = 600.0
"""How often, in seconds, permits of unused keys are cleaned up."""

Claim: TypeAlias = Callable[[int, Mapping[str, int]], Awaitable[Sequence[Grant]]]


class Turn(msgspec.Struct, frozen=True):
    """A run that may be executed, and the permits that it needs in the meantime."""

    grant: Grant
    hold: Hold | None = None

    def end(self) -> None:
        """Return the permits to their pools, because the run is no longer executed."""
        if self.hold is not None:
            self.hold.end()


class RoundRequest(NamedTuple):
    """The request of a round: up to `room` runs that are due at `now`, leased by `claim`."""

    room: int
    versions: Sequence[SupportedVersions]
    claim: Claim
    now: datetime


class ServedQueue:
    """One queue, whose keys take turns.

    `pause` is after how many seconds another round may find more runs, or `None` if there are none.
    `next_names` are the keys with due runs for which the last round had no room.
    """

    def __init__(self, queue: Queue, permits: Permits, touched_pools: set[Pool]) -> None:
        self.queue = queue
        self.pause: float | None = None
        self._permits = permits
        self._touched_pools = touched_pools
        self.next_names: Sequence[str] = ()
        self._last = ""
        self._has_many = self._was_empty = False
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    async def take(self, request: RoundRequest) -> list[Turn]:
        """Return runs with their permits."""
        names = await self._due_names(request.now)
        if not names:
            return []
        pools = {name: self._pools(name) for name in names}
        shared_pools = self._shared_pools(pools)
        if blocked_pools := self._blocked_pools(shared_pools):
            self._wait_for(blocked_pools)
            return []
        names_in_turn = self._in_turn(pools, request.room)
        pools = {name: pools[name] for name in names_in_turn}
        if any(pools.values()):
            limits = await self._claim_permits(pools, request)
        else:
            limits = self._spread(dict.fromkeys(names_in_turn, request.room), request.room)
        if limits or all(pool.free for pool in shared_pools):
            # The shared permits were not the bottleneck, so the next keys get their turn.
            self._last = names[-1]
        turns: list[Turn] = []
        if limits:
            grants = await request.claim(min(request.room, sum(limits.values())), limits)
            turns = await self._turns(grants, pools)
            self._was_empty = not turns
        if turns:
            self.pause = 0.0
        elif self.next_names or self._has_many:
            self._look_again_in(FIRST_PAUSE)
        return turns

    async def permit(self, name: str, grant: Grant) -> Turn | None:
        """Return a run in no queue with permits of this queue, or release it."""
        pools = self._pools(name)
        self._touched_pools.update(pools)
        await self._permits.claim(dict.fromkeys(pools, 1))
        if all(pool.free for pool in pools):
            return Turn(grant, _hold_of(pools))
        await self._permits.store.release([grant.lease], wake_at=grant.now + LATER)
        return None

    async def _turns(
        self, grants: Sequence[Grant], pools: Mapping[str, Sequence[Pool]]
    ) -> list[Turn]:
        """Return runs with their permits, except those that lost a permit in the meantime."""
        turns: list[Turn] = []
        for grant in grants:
            needed_pools = pools[grant.queue]
            if all(pool.free for pool in needed_pools):
                turns.append(Turn(grant, _hold_of(needed_pools)))
            else:
                await self._permits.store.release([grant.lease])
        return turns

    def _in_turn(self, pools: Mapping[str, Sequence[Pool]], room: int) -> list[str]:
        """Return the keys to look at: the least recently served ones that need not wait.

        Not simply the next ones by name: a key with long runs would often be passed over.
        """
        blocked_pools = {
            name: self._blocked_pools(needed_pools) for name, needed_pools in pools.items()
        }
        ready = [name for name in pools if not blocked_pools[name]]
        if len(ready) < room:
            # Otherwise the remaining keys have to wait for their turn anyway.
            self._wait_for(pool for each in blocked_pools.values() for pool in each)
        if not self.queue.fair:
            return ready
        if len(self._last_turns) > MOST_SERVED:
            self._last_turns = {name: n for name, n in self._last_turns.items() if name in pools}
        ready.sort(key=lambda name: self._last_turns.get(name, 0))
        count = max(room, FEWEST_KEYS)
        self.next_names = ready[count:]
        return ready[:count]

    async def _due_names(self, now: datetime) -> list[str]:
        """Return keys that have due runs, beginning after the last key."""
        name = self.queue.name
        after = self._last if self._has_many else ""
        store = self._permits.store
        page = [*await store.queues(now, KEYS + 1, prefix=name, after=after)]
        if after and len(page) <= KEYS:
            # Continue at the beginning of the list: otherwise the last keys would share all the
            # room.
            first = await store.queues(now, KEYS + 1 - len(page), prefix=name)
            page += (each for each in first if each <= after)
        self._has_many = len(page) > KEYS
        page = page[:KEYS]
        own = [each for each in page if each == name or each.startswith(f"{name}/")]
        if page and not own:
            # These are other queues whose names have the same beginning; the next round starts
            # after them.
            self._last = page[-1]
        next_names = [each for each in own if each > self._last]
        return next_names + [each for each in own if each <= self._last]

    def _pools(self, name: str) -> list[Pool]:
        pools = [self._permits.pool(limit) for limit in queue_limits(self.queue, name)]
        for pool in pools:
            pool.on_free = self._touched_pools.add
        return pools

    async def _claim_permits(
        self, pools: Mapping[str, Sequence[Pool]], request: RoundRequest
    ) -> Mapping[str, int]:
        """Claim permits; return how many runs of each key may be claimed."""
        due_runs = request.room
        if self._must_count(pools, request.room):
            due_runs = await self._count_due(list(pools), request)
            if not due_runs:
                return {}
        # The permits that all keys need come first: without one of these, a permit of a key would
        # only keep other workers waiting.
        shared_pools = self._shared_pools(pools)
        await self._claim_units(dict.fromkeys(shared_pools, due_runs))
        most = min([due_runs, *(pool.free for pool in shared_pools)])
        limits = await self._claim_for_keys(pools, most)
        spread = self._spread(limits, min(most, request.room))
        if sum(spread.values()) < due_runs:
            self._wait_for({pool for needed_pools in pools.values() for pool in needed_pools})
        return spread

    async def _claim_for_keys(
        self, pools: Mapping[str, Sequence[Pool]], most: int
    ) -> dict[str, int]:
        """Claim the permits that only one key needs; return how many runs of each may begin."""
        shared_pools = self._shared_pools(pools)
        names = list(pools)
        limits: dict[str, int] = {}
        size = most if self.queue.fair else len(names)
        while names and (missing := most - sum(limits.values())) > 0:
            part, names = names[:size], names[size:]
            each = -(-missing // len(part)) if self.queue.fair else missing
            own_pools = {name: [p for p in pools[name] if p not in shared_pools] for name in part}
            await self._claim_units({pool: each for own in own_pools.values() for pool in own})
            for name, own in own_pools.items():
                limits[name] = min([each, *(pool.free for pool in own)])
            # Other workers may hold the permits of these keys, and of many more.
            size *= 2
        return limits

    async def _claim_units(self, units_by_pool: Mapping[Pool, int]) -> None:
        self._touched_pools.update(units_by_pool)
        await self._permits.claim(units_by_pool)

    def _blocked_pools(self, pools: Iterable[Pool]) -> list[Pool]:
        """Return the pools for which runs must wait, because a claim just found no permit there."""
        now = self._permits.clock.monotonic()
        return [pool for pool in pools if not pool.free and pool.look_at > now]

    def _wait_for(self, pools: Iterable[Pool]) -> None:
        now = self._permits.clock.monotonic()
        for pool in pools:
            # Even if that time has passed since the claim: runs still wait for these permits, and
            # without a pause the queue would count as empty.
            if not pool.free and pool.look_at:
                self._look_again_in(pool.look_at - now)

    def _look_again_in(self, seconds: float) -> None:
        # Never shorter than the resolution of clocks.
        seconds = max(seconds, SHORTEST_PAUSE)
        self.pause = seconds if self.pause is None else min(self.pause, seconds)

    def _must_count(self, pools: Mapping[str, Sequence[Pool]], room: int) -> bool:
        """Return whether more permits might be claimed than there are runs.

        That cannot happen if there is room for only one run per key, or if ended runs left enough
        permits. Keys may have no run that can be executed here.
        """
        has_enough = all(pool.free >= room for each in pools.values() for pool in each)
        return self._was_empty or not (has_enough or len(pools) >= room)

    async def _count_due(self, names: Sequence[str], request: RoundRequest) -> int:
        """Return how many runs could be claimed if there were enough permits."""
        room = request.room
        limits = dict.fromkeys(names, -(-room // len(names)) if self.queue.fair else room)
        store = self._permits.store
        return len(await store.due(request.now, room, supports=request.versions, queues=limits))

    def _shared_pools(self, pools: Mapping[str, Sequence[Pool]]) -> set[Pool]:
        """Return the pools that all keys need."""
        count = len(queue_limits(self.queue, self.queue.name))
        return {pool for needed_pools in pools.values() for pool in needed_pools[:count]}

    def _spread(self, limits: Mapping[str, int], total: int) -> dict[str, int]:
        """Distribute runs over keys, in turn, up to the limit of each.

        Without fairness, each key gets its limit, and the claim takes the earliest runs of all.
        """
        if not self.queue.fair:
            return {name: min(n, total) for name, n in limits.items() if n and total}
        spread = dict.fromkeys(limits, 0)
        names = [name for name in limits if limits[name]]
        while total and names:
            share = max(total // len(names), 1)
            for name in names[:total]:
                number = min(share, limits[name] - spread[name])
                spread[name] += number
                total -= number
            names = [name for name in names if spread[name] < limits[name]]
        runs_by_name = {name: n for name, n in spread.items() if n}
        # Each key gets its own number: keys of one round would otherwise be sorted by name next
        # time, and names that come first would get more than their share.
        for name in runs_by_name:
            self._turn += 1
            self._last_turns[name] = self._turn
        return runs_by_name


def _hold_of(pools: Sequence[Pool]) -> Hold | None:
    if not pools:
        return None
    hold = Hold()
    for pool in pools:
        pool.take(1, hold)
    return hold


class Rounds:
    """Takes runs from the queues that a process serves; the queues also take turns."""

    def __init__(self, permits: Permits) -> None:
        self.paused: frozenset[str] = frozenset()
        self._permits = permits
        self._clock = permits.clock
        self._touched_pools: set[Pool] = set()
        self._queues: list[ServedQueue] = []
        self._ahead = timedelta(0)
        self._cleaned_at = self._clock.monotonic()

    @property
    def pause(self) -> float | None:
        """After how many seconds another round may find more runs, or `None` if there are none."""
        return min((each.pause for each in self._queues if each.pause is not None), default=None)

    def serve(self, queues: Iterable[Queue]) -> None:
        """Take runs from these queues from now on, with these limits."""
        queue_by_name = {each.queue.name: each for each in self._queues}
        for queue in queues:
            if queue.name in queue_by_name:
                queue_by_name[queue.name].queue = queue
            else:
                self._queues.append(ServedQueue(queue, self._permits, self._touched_pools))

    def begin(self) -> None:
        """Begin a round; permits that become free from now on are for the next one."""
        for pool in self._touched_pools:
            pool.fresh.clear()

    async def take(
        self,
        room: int,
        versions: Sequence[SupportedVersions],
        claim: Claim,
        now: datetime | None = None,
    ) -> list[Turn]:
        """Return up to `room` runs with their permits; `claim` leases them.

        They are due at `now`, by default the store's time as estimated from its grants.
        """
        at = now or self._clock.now() + self._ahead
        turns: list[Turn] = []

        async def timed_claim(limit: int, queues: Mapping[str, int]) -> Sequence[Grant]:
            # The time before the call: with a later one, a stalled process would conclude that the
            # store's clock is behind, and miss the runs that have just become due.
            asked_at = self._clock.now()
            grants = await claim(limit, queues)
            if grants:
                self._ahead = grants[0].now - asked_at
            return grants

        self._queues.append(self._queues.pop(0))
        try:
            for number, each in enumerate(self._queues):
                # Room that one queue does not need goes to the next.
                share = -(-(room - len(turns)) // (len(self._queues) - number))
                each.pause, each.next_names = None, ()
                if share and each.queue.name not in self.paused:
                    turns += await each.take(RoundRequest(share, versions, timed_claim, at))
        except StoreError as error:
            if not turns:
                raise
            logger.warning("taking runs from queues failed (%s); retrying", error)
        return turns

    async def permit(self, queue: Queue, name: str, grant: Grant) -> Turn | None:
        """Return a run with the permits of a queue; release it if there are none."""
        served_queue = ServedQueue(queue, self._permits, self._touched_pools)
        return await served_queue.permit(name, grant)

    async def return_idle(self) -> None:
        """Return the permits that no run uses."""
        touched_pools = tuple(self._touched_pools)
        self._touched_pools.clear()
        await self._permits.return_idle(touched_pools)

    async def return_unneeded(self) -> None:
        """Return the unused permits, except those that the next round needs.

        It needs the permits of runs that ended during this round, and those of keys that are next
        in turn.
        """
        names = (name for each in self._queues for name in each.next_names)
        kept_pools = {
            pool for name in names for pool in self._permits.pools_of_key(name) if pool.free
        }
        touched_pools = tuple(self._touched_pools - kept_pools)
        self._touched_pools -= {pool for pool in touched_pools if not pool.fresh}
        await self._permits.return_idle(touched_pools, keep_fresh=True)

    async def clean_up(self) -> None:
        """Occasionally delete the permits of unused keys."""
        if self._clock.monotonic() - self._cleaned_at < CLEANUP_INTERVAL:
            return
        self._cleaned_at = self._clock.monotonic()
        now = self._clock.now() + self._ahead
        for each in self._queues:
            if each.queue.per_key:
                await self._permits.delete_unused(each.queue.name, now)
