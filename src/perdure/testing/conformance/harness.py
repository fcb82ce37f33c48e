"""The hooks of a store's test class, and helpers for the checks."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, cast

import pytest

from perdure.clock import SystemClock
from perdure.snapshot import Snapshot
from perdure.store import (
    Capabilities,
    Delivery,
    Entry,
    Grant,
    HandoffStore,
    InboxStore,
    JournalStore,
    LeaseRequest,
    LeaseStore,
    MaintenanceStore,
    NewMessage,
    NotifyStore,
    QueueStore,
    Refusal,
    Rest,
    RunSummary,
    ScheduleStore,
    SearchStore,
    Store,
    SupportedVersions,
    TransactionalEnqueueStore,
    TransactionStore,
    Verdict,
    capabilities,
)
from perdure.testing.clock import TestClock
from perdure.testing.conformance.samples import as_json, delta, snapshot

LONG = timedelta(hours=1)
TICK = timedelta(milliseconds=5)

T = TypeVar("T")


class JournaledStore(JournalStore, LeaseStore, Protocol):
    """A store with journal and lease."""


class ScheduledStore(JournaledStore, ScheduleStore, Protocol):
    """A store with journal, lease and schedule."""


class MessagingStore(ScheduledStore, InboxStore, Protocol):
    """A store with journal, lease, schedule and inbox."""


class HandingOffStore(MessagingStore, HandoffStore, Protocol):
    """A store with journal, lease, schedule, inbox and handoff."""


class QueueingStore(MessagingStore, QueueStore, Protocol):
    """A store with journal, lease, schedule, queues and inbox."""


class SearchableStore(QueueingStore, SearchStore, Protocol):
    """A store with journal, lease, schedule, queues, inbox and search."""


class FullStore(SearchableStore, MaintenanceStore, Protocol):
    """A store with all abilities except transactions and notifications."""


class NotifyingStore(ScheduledStore, NotifyStore, Protocol):
    """A store with journal, lease, schedule and notifications."""


class TransactingStore(TransactionStore, LeaseStore, Protocol):
    """A store with journal, lease and transaction."""


class JoiningStore(ScheduledStore, TransactionalEnqueueStore, Protocol):
    """A store with journal, lease, schedule and transactional enqueue."""


class MaintainedStore(JournaledStore, MaintenanceStore, Protocol):
    """A store with journal, lease and maintenance."""


class Harness:
    """The hooks of a store's test class. The fixture `store` is required, the rest is optional.

    `clock` is the store's clock if a test can advance it. Without it, the checks wait in real time,
    and `short` is the duration of the leases that they let expire. `url` (or a `"module:function"`
    that returns the store) lets other processes open the same runs. `examples` is the number of
    random cases to try. With `shrink`, a failing random sequence of calls is made as short as
    possible, which may take minutes.
    """

    clock: TestClock | None = None
    short: timedelta = timedelta(milliseconds=150)
    url: str | None = None
    examples: int = 25
    shrink: bool = False

    async def reopen(self, store: Store, *, prefix: str = "") -> Store | None:
        """Return another instance on the same runs, with this prefix; the check closes it."""
        return None

    async def crashing(self, store: Store, writes: int) -> Store | None:
        """Return an instance on the same runs that crashes after this many inner writes.

        Every later write raises. Return `None` if each write of the store is atomic.
        """
        return None

    async def user_write(self, connection: Any, note: str) -> None:
        """Write a note through the connection that `transact` passes to the user."""
        raise NotImplementedError

    async def user_notes(self, store: Store) -> Sequence[str]:
        """Return the notes that were committed."""
        raise NotImplementedError

    def user_transaction(self, store: Store) -> AbstractAsyncContextManager[Any]:
        """Open a user's connection to the store's database, with an open transaction.

        The transaction is committed at the end of the block, and rolled back by an exception.
        """
        raise NotImplementedError

    async def pass_time(self, span: timedelta) -> None:
        """Let this much time pass on the store's clock: advance it, or wait in real time."""
        if self.clock is None:
            await SystemClock().sleep(span)
        else:
            await self.clock.advance(span)

    async def expire(self) -> None:
        """Wait until a lease of `short` has expired."""
        await self.pass_time(self.short * 1.4)

    async def open_another(self, store: Store, prefix: str = "") -> Store:
        """Return another instance, or skip the check with the reason."""
        another = await self.reopen(store, prefix=prefix)
        if another is None:
            pytest.skip(f"{type(self).__name__} has no reopen(): a second instance is not checked")
        return another


def need(store: Store, *abilities: str) -> None:
    """Skip the check, with the reason, if the store does not declare an ability."""
    declared = capabilities(store)
    missing = [name for name in abilities if getattr(declared, name) in {False, "none"}]
    if missing:
        pytest.skip(f"{type(store).__name__} does not declare: {', '.join(missing)}")


def need_lease(store: Store) -> LeaseStore:
    """Return the store as one with leases, or skip."""
    need(store, "lease")
    return cast(LeaseStore, store)


def need_journal(store: Store) -> JournaledStore:
    """Return the store as one with a journal, or skip."""
    need(store, "journal", "lease")
    return cast(JournaledStore, store)


def need_schedule(store: Store) -> ScheduledStore:
    """Return the store as one with a schedule, or skip."""
    need(store, "schedule", "journal", "lease")
    return cast(ScheduledStore, store)


def need_notify(store: Store) -> NotifyingStore:
    """Return the store as one with notifications, or skip."""
    need(store, "notify", "schedule", "journal", "lease")
    return cast(NotifyingStore, store)


def need_inbox(store: Store) -> MessagingStore:
    """Return the store as one with an inbox, or skip."""
    need(store, "inbox", "schedule", "journal", "lease")
    return cast(MessagingStore, store)


def need_handoff(store: Store) -> HandingOffStore:
    """Return the store as one with handoff, or skip."""
    need(store, "handoff", "inbox", "schedule", "journal", "lease")
    return cast(HandingOffStore, store)


def need_queues(store: Store) -> QueueingStore:
    """Return the store as one with queues, or skip."""
    need(store, "queues", "inbox", "schedule", "journal", "lease")
    return cast(QueueingStore, store)


def need_search(store: Store) -> SearchableStore:
    """Return the store as one with search, or skip."""
    need(store, "search", "queues", "inbox", "schedule", "journal", "lease")
    return cast(SearchableStore, store)


def need_maintenance(store: Store) -> MaintainedStore:
    """Return the store as one with maintenance, or skip."""
    need(store, "maintenance")
    return cast(MaintainedStore, store)


def need_everything(store: Store) -> FullStore:
    """Return the store as one with everything but transactions and notifications, or skip."""
    need(store, "maintenance", "search", "queues", "inbox", "schedule", "journal", "lease")
    return cast(FullStore, store)


def need_transaction(store: Store) -> TransactingStore:
    """Return the store as one with transactions, or skip."""
    need(store, "transaction", "journal", "lease")
    return cast(TransactingStore, store)


def need_transactional_enqueue(store: Store) -> JoiningStore:
    """Return the store as one that creates runs in the user's transaction, or skip."""
    need(store, "transactional_enqueue", "schedule", "journal", "lease")
    return cast(JoiningStore, store)


def need_atomic_lease(store: Store) -> Capabilities:
    """Skip if the store's leases are best effort, because a race may then go wrong."""
    declared = capabilities(store)
    if declared.lease != "atomic":
        pytest.skip(f"{type(store).__name__} does not declare: atomic leases")
    return declared


async def acquire_run(
    store: LeaseStore,
    id: str = "run",
    owner: str = "ana",
    ttl: timedelta = LONG,
    create: Snapshot | None = None,
    workflow: str | None = None,
) -> Grant:
    """Acquire a run, creating it if it is missing, and return the grant."""
    first = as_json(snapshot() if create is None else create)
    (grant,) = await store.acquire([LeaseRequest(id, owner, ttl, create=first, workflow=workflow)])
    assert isinstance(grant, Grant), f"the run {id!r} was free but was not granted: {grant}"
    return grant


async def request_run(
    store: LeaseStore, id: str = "run", owner: str = "bob", ttl: timedelta = LONG
) -> Grant | None:
    """Request the lease of an existing run; return the grant, or `None` if it was refused."""
    (answer,) = await store.acquire([LeaseRequest(id, owner, ttl)])
    return answer if isinstance(answer, Grant) else None


async def refused(store: LeaseStore, request: LeaseRequest) -> Refusal:
    """Make a request that must be refused, and return the refusal."""
    (refusal,) = await store.acquire([request])
    assert isinstance(refusal, Refusal), f"{request} was granted"
    assert refusal.id == request.id
    return refusal


def supports(*workflows: str) -> list[SupportedVersions]:
    """Return the `supports` of a worker that knows every version of these workflows."""
    return [SupportedVersions(workflow, 1, 1_000_000) for workflow in workflows]


async def append_entries(store: JournalStore, *entries: Entry) -> list[Verdict]:
    """Append the entries and return the verdicts."""
    return list(await store.append(entries))


async def write_rest(
    store: JournalStore, grant: Grant, rest: Rest, *steps: str, n: int = 1_000
) -> Verdict:
    """Append a rest with these steps in its snapshot and return the verdict."""
    data = as_json(snapshot(*steps, status=rest.status))
    (verdict,) = await store.append([Entry(grant.lease.id, grant.lease.epoch, n, data, rest=rest)])
    return verdict


async def send_one(
    store: InboxStore, to: str, name: str, payload: bytes, *, dedup_id: str | None = None
) -> Delivery:
    """Send one message and return its delivery."""
    (receipt,) = await store.send([NewMessage(to, name, payload, dedup_id)])
    return receipt.delivery


def step(grant: Grant, n: int, *keys: str, consumes: tuple[str, ...] = ()) -> Entry:
    """Return the entry that records these steps as the grant's n-th write."""
    name = keys[0] if keys else ""
    return Entry(grant.lease.id, grant.lease.epoch, n, delta(*keys), consumes=consumes, step=name)


async def store_time(store: LeaseStore) -> datetime:
    """Return the store's time, truncated to milliseconds, which every store supports."""
    grant = await acquire_run(store, "clock", "clock")
    await store.delete("clock")
    return grant.now.replace(microsecond=grant.now.microsecond // 1000 * 1000)


async def steps_of(store: Store, id: str = "run") -> list[str]:
    """Return the keys of a run's steps, in order."""
    loaded = await store.load(id)
    assert loaded is not None, f"the run {id!r} does not exist"
    return list(loaded["steps"])


async def summary_of(store: Store, id: str = "run") -> RunSummary:
    """Return the summary of one run."""
    runs = [run for run in await store.list(prefix=id) if run.id == id]
    assert len(runs) == 1, f"the run {id!r} is listed {len(runs)} times"
    return runs[0]


async def within(seconds: float, work: "asyncio.Future[T]") -> T:
    """Return the result of the task, or fail if it takes longer."""
    await asyncio.wait([work], timeout=seconds)
    if not work.done():
        work.cancel()
        pytest.fail(f"no result within {seconds:g}s")
    return work.result()
