"""What a store's test class gives the checks, and what the checks ask of a store first."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, cast

import pytest

from perdure.clock import SystemClock
from perdure.snapshot import Snapshot
from perdure.store import (
    Capabilities,
    Entry,
    Grant,
    InboxStore,
    JournalStore,
    LeaseRequest,
    LeaseStore,
    MaintenanceStore,
    NotifyStore,
    Rest,
    RunSummary,
    ScheduleStore,
    Store,
    TransactionStore,
    Verdict,
    capabilities,
)
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, delta, snapshot

LONG = timedelta(hours=1)
TICK = timedelta(milliseconds=5)

T = TypeVar("T")


class Journalled(JournalStore, LeaseStore, Protocol):
    """A store with journal and lease."""


class Scheduled(Journalled, ScheduleStore, Protocol):
    """A store with journal, lease and schedule."""


class Mailed(Scheduled, InboxStore, Protocol):
    """A store with journal, lease, schedule and inbox."""


class Everything(Mailed, MaintenanceStore, Protocol):
    """A store with all abilities but transactions and hints."""


class Hinting(Scheduled, NotifyStore, Protocol):
    """A store with journal, lease, schedule and hints."""


class Transacting(TransactionStore, LeaseStore, Protocol):
    """A store with journal, lease and transaction."""


class Kept(Journalled, MaintenanceStore, Protocol):
    """A store with journal, lease and upkeep."""


class Harness:
    """The hooks of a store's test class. The fixture `store` must be given, the rest may be.

    `clock` is the store's clock when a test can move it; without one the checks really wait, and
    `short` is how long a lease is that they let expire. `url` (or `"module:function"`, which makes
    the store) lets other processes open the same runs. `examples` is how many random cases are
    tried where cases are random. With `shrink` a random sequence of calls that fails is made as
    short as it can be, which may take minutes.
    """

    clock: TestClock | None = None
    short: timedelta = timedelta(milliseconds=150)
    url: str | None = None
    examples: int = 25
    shrink: bool = False

    async def reopen(self, store: Store, *, prefix: str = "") -> Store | None:
        """Give another instance on the same runs, with this prefix; it is closed by the check."""
        return None

    async def crashing(self, store: Store, writes: int) -> Store | None:
        """Give an instance on the same runs that dies after so many inner writes: later ones raise.

        None when each of the store's writes is one atomic write.
        """
        return None

    async def user_write(self, connection: Any, note: str) -> None:
        """Write a note of the user's own through the connection that `transact` gives."""
        raise NotImplementedError

    async def user_notes(self, store: Store) -> Sequence[str]:
        """Give the notes that were written and committed."""
        raise NotImplementedError

    async def let_pass(self, span: timedelta) -> None:
        """Let the store's clock go on: move it, or really wait."""
        if self.clock is None:
            await SystemClock().sleep(span)
        else:
            await self.clock.advance(span)

    async def expire(self) -> None:
        """Let a lease of `short` expire."""
        await self.let_pass(self.short * 1.4)

    async def opened_again(self, store: Store, prefix: str = "") -> Store:
        """Give another instance, or skip the check with the reason."""
        another = await self.reopen(store, prefix=prefix)
        if another is None:
            pytest.skip(
                f"{type(self).__name__} gives no reopen(): a second instance is not checked"
            )
        return another


def need(store: Store, *abilities: str) -> None:
    """Skip the check, and say why, when the store does not declare an ability."""
    declared = capabilities(store)
    missing = [name for name in abilities if getattr(declared, name) in {False, "none"}]
    if missing:
        pytest.skip(f"{type(store).__name__} does not declare: {', '.join(missing)}")


def need_lease(store: Store) -> LeaseStore:
    """Give the store as one with leases, or skip."""
    need(store, "lease")
    return cast(LeaseStore, store)


def need_journal(store: Store) -> Journalled:
    """Give the store as one with a journal, or skip."""
    need(store, "journal", "lease")
    return cast(Journalled, store)


def need_schedule(store: Store) -> Scheduled:
    """Give the store as one with a schedule, or skip."""
    need(store, "schedule", "journal", "lease")
    return cast(Scheduled, store)


def need_hints(store: Store) -> Hinting:
    """Give the store as one with hints, or skip."""
    need(store, "notify", "schedule", "journal", "lease")
    return cast(Hinting, store)


def need_inbox(store: Store) -> Mailed:
    """Give the store as one with an inbox, or skip."""
    need(store, "inbox", "schedule", "journal", "lease")
    return cast(Mailed, store)


def need_upkeep(store: Store) -> Kept:
    """Give the store as one that prunes and counts, or skip."""
    need(store, "maintenance")
    return cast(Kept, store)


def need_everything(store: Store) -> Everything:
    """Give the store as one with all abilities but transactions and hints, or skip."""
    need(store, "maintenance", "inbox", "schedule", "journal", "lease")
    return cast(Everything, store)


def need_transaction(store: Store) -> Transacting:
    """Give the store as one with transactions, or skip."""
    need(store, "transaction", "journal", "lease")
    return cast(Transacting, store)


def need_atomic_lease(store: Store) -> Capabilities:
    """Skip when the store's leases are best effort: such a store may lose a race."""
    declared = capabilities(store)
    if declared.lease != "atomic":
        pytest.skip(f"{type(store).__name__} does not declare: atomic leases")
    return declared


async def granted(
    store: LeaseStore,
    id: str = "run",
    owner: str = "ana",
    ttl: timedelta = LONG,
    create: Snapshot | None = None,
    workflow: str | None = None,
) -> Grant:
    """Give the grant of a run, which is created when it is not there."""
    first = as_json(snapshot() if create is None else create)
    (grant,) = await store.acquire([LeaseRequest(id, owner, ttl, create=first, workflow=workflow)])
    assert grant is not None, f"the run {id!r} was free, and was not granted"
    return grant


async def asked(
    store: LeaseStore, id: str = "run", owner: str = "bob", ttl: timedelta = LONG
) -> Grant | None:
    """Give what a want for a run that is there is answered with."""
    (grant,) = await store.acquire([LeaseRequest(id, owner, ttl)])
    return grant


async def appended(store: JournalStore, *entries: Entry) -> list[Verdict]:
    """Give the verdicts on the entries."""
    return list(await store.append(entries))


async def rested(
    store: JournalStore, grant: Grant, rest: Rest, *steps: str, n: int = 1_000
) -> Verdict:
    """Put a granted run to rest with these steps in its snapshot."""
    data = as_json(snapshot(*steps, status=rest.status))
    (verdict,) = await store.append([Entry(grant.lease.id, grant.lease.epoch, n, data, rest=rest)])
    return verdict


def step(grant: Grant, n: int, *keys: str, consumes: tuple[str, ...] = ()) -> Entry:
    """Give the entry that records these steps as the grant's n-th write."""
    name = keys[0] if keys else ""
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(*keys), consumes=consumes, step=name)


async def store_time(store: LeaseStore) -> datetime:
    """Give the store's time, cut to whole milliseconds, which every store can keep."""
    grant = await granted(store, "what time is it", "the clock")
    await store.delete("what time is it")
    return grant.now.replace(microsecond=grant.now.microsecond // 1000 * 1000)


async def steps_of(store: Store, id: str = "run") -> list[str]:
    """Give the keys of a run's steps, in order."""
    loaded = await store.load(id)
    assert loaded is not None, f"the run {id!r} is not there"
    return list(loaded["steps"])


async def listed(store: Store, id: str = "run") -> RunSummary:
    """Give a run's line in the list."""
    lines = [line for line in await store.list(prefix=id) if line.id == id]
    assert len(lines) == 1, f"the run {id!r} is listed {len(lines)} times"
    return lines[0]


async def within(seconds: float, work: "asyncio.Future[T]") -> T:
    """Give what the task gives, or fail when it takes longer."""
    await asyncio.wait([work], timeout=seconds)
    if not work.done():
        work.cancel()
        pytest.fail(f"nothing came within {seconds:g}s")
    return work.result()
