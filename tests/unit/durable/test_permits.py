"""Permits of a rate: how long a process may use them, and when it claims again."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from perdure.durable.leases import HeldLeases, Leased
from perdure.durable.permits import Hold, Permits, Pool
from perdure.limits import PermitLimit
from perdure.store import Grant, QueueStore
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

SECOND = timedelta(seconds=1)
# Permits of two units each, of which one can be used, and permits of one.
LARGE, SMALL = PermitLimit("rate:large", 2000, SECOND), PermitLimit("rate:small", 2, SECOND)
LATENCY = 0.2


class SlowClaims(MemoryStore):
    """A store whose answer to a claim takes a while to arrive."""

    def __init__(self, clock: TestClock) -> None:
        super().__init__(clock=clock)
        self._test_clock = clock

    async def claim(self, *arguments: Any, **options: Any) -> Sequence[Grant]:
        grants = await super().claim(*arguments, **options)
        await self._test_clock.advance(LATENCY)
        return grants


class NoRenewals(HeldLeases):
    """Permits of a rate are never renewed."""

    def hold_permit(self, permit: Leased) -> None:
        raise AssertionError(permit)


def permits_of(limit: PermitLimit, clock: TestClock) -> tuple[Permits, Pool]:
    permits = permits_for("owner", SlowClaims(clock), clock)
    return permits, permits.pool(limit)


def permits_for(owner: str, store: QueueStore, clock: TestClock) -> Permits:
    return Permits(store, NoRenewals(store, clock, SECOND), clock, SECOND, owner)


async def test_what_is_left_of_a_permit_ends_with_the_period_of_the_store() -> None:
    permits, pool = permits_of(LARGE, clock := TestClock())
    await permits.claim({pool: 2})
    pool.take(1, Hold())
    # From now on, the store grants the permit again.
    await clock.advance(1 - LATENCY)
    pool.expire(clock.monotonic())
    assert pool.free == 0


async def test_after_a_period_a_claim_that_finds_nothing_is_repeated_soon() -> None:
    permits, pool = permits_of(SMALL, clock := TestClock())
    await permits.claim({pool: 2})
    pool.take(2, Hold())
    for _ in range(10):
        pool.note_answer(True, clock.monotonic())
    await clock.advance(1 - LATENCY)
    pool.expire(now := clock.monotonic())
    pool.note_answer(True, now)
    assert pool.look_at - now < 0.05


async def test_a_permit_that_was_used_in_part_is_not_returned() -> None:
    """Another process would use all of its units in the same period."""
    permits, pool = permits_of(LARGE, clock := TestClock())
    await permits.claim({pool: 2})
    pool.take(1, Hold())
    await permits.return_idle([pool])
    other = permits_for("other", permits.store, clock)
    other_pool = other.pool(LARGE)
    await other.claim({other_pool: LARGE.n})
    assert other_pool.free == LARGE.n - LARGE.unit
