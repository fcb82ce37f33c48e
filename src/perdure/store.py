"""The store contract: what a place that keeps runs must do, in small segments.

A *run* is a snapshot plus the journal of what happened since; `load` gives
`merge_snapshots(snapshot, *journal)`. Five methods make a store (`Store`). Each further ability is
a Protocol of its own, and a store declares which of them it has in one `Capabilities` value. The
engine asks the declaration and never guesses. The docstrings here are the law; each sentence has a
check in `perdure.testing.conformance`.

Ids are any non-empty text up to 512 characters without NUL. Times are aware UTC datetimes in the
store's own clock: the database's where there is one.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Literal, Protocol, Self, TypeGuard, cast

import msgspec

from perdure.errors import InvalidArgument, MissingAbility, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, awaits_of, rest_status, wake_at_of
from perdure.validation import check_int

MAX_VALUE_SIZE = 16 * 1024 * 1024


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do. Declared once, asked by the engine, checked by the conformance kit."""

    journal: bool = False
    lease: Literal["none", "best_effort", "atomic"] = "none"
    schedule: bool = False
    inbox: bool = False
    transaction: bool = False
    notify: bool = False
    maintenance: bool = False
    shared: Literal["process", "machine", "network"] = "process"
    survives: Literal["nothing", "process_crash", "power_loss"] = "nothing"
    max_value_size: int = MAX_VALUE_SIZE

    def __post_init__(self) -> None:
        check_int(self.max_value_size, "max_value_size")


class RunSummary(msgspec.Struct, frozen=True):
    """One line of `list`. `updated_at` is ISO 8601 in UTC with milliseconds and `Z`."""

    id: str
    updated_at: str
    status: RunStatus = "running"
    workflow: str | None = None
    cursor: str = ""


class Lease(msgspec.Struct, frozen=True):
    """The right to write a run: until `expires_at`, or until somebody takes it with a higher epoch.

    `has_messages` says whether untaken messages lay in the run's inbox when the lease was given or
    renewed.
    """

    id: str
    owner: str
    epoch: int
    expires_at: datetime
    has_messages: bool = False


class Message(msgspec.Struct, frozen=True):
    """One event in a run's inbox, not yet taken. `payload` is JSON."""

    id: str
    name: str
    payload: bytes
    sent_at: datetime


class Rest(msgspec.Struct, frozen=True):
    """How a run lies in the store when nobody works on it.

    `wake_at` is when it should be claimed (None: never by time). `awaits` are the names of the
    events that would wake it sooner. A run with the status paused has no `wake_at`: only an event
    in its `awaits` wakes it, or an owner that acquires it. With `delete` nothing is left of the
    run: it is deleted, as by `delete`, in the same fenced write.
    """

    status: RunStatus
    wake_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    delete: bool = False


def rest_of(snapshot: Snapshot) -> Rest:
    """Give how a run with this snapshot lies in the store."""
    return Rest(rest_status(snapshot), wake_at_of(snapshot), awaits_of(snapshot))


class LeaseRequest(msgspec.Struct, frozen=True):
    """A request for the lease of a run.

    `create` is the JSON of a first snapshot: a run that is not there is created with it. Without
    it, a missing run is not granted. With `existing=False` only a new run is granted, and one that
    is there stays untouched. `workflow` names a new run's workflow for `list` and `claim`.
    """

    id: str
    owner: str
    ttl: timedelta
    create: bytes | None = None
    workflow: str | None = None
    existing: bool = True


class NewRun(msgspec.Struct, frozen=True):
    """A run to be created at rest: `snapshot` is JSON, and `wake_at` None means due at once."""

    id: str
    workflow: str
    snapshot: bytes
    wake_at: datetime | None = None


class Grant(msgspec.Struct, frozen=True):
    """A lease together with all that its owner needs to go on, read under that lease.

    `now` is the store's time of the grant. `takeovers` counts consecutive owners that let their
    lease expire without writing an entry. Any accepted entry sets it to zero, and so does a rest; a
    release without an entry neither counts nor resets.
    """

    lease: Lease
    snapshot: Snapshot
    now: datetime
    inbox: tuple[Message, ...] = ()
    takeovers: int = 0
    created: bool = False


class Entry(msgspec.Struct, frozen=True):
    """One write of a run's owner, fenced by its epoch.

    Without `rest`, `data` is a snapshot delta that is added to the journal as entry `n` of the
    epoch. With `rest`, `data` is the whole snapshot: it replaces snapshot and journal in one atomic
    write, the run lies as `rest` says, the lease is given up and the epoch is closed. `consumes`
    are ids of inbox messages that this write consumes.
    """

    id: str
    epoch: int
    n: int
    data: bytes
    consumes: tuple[str, ...] = ()
    rest: Rest | None = None
    step: str = ""


class Verdict(Enum):
    """What became of one entry: written, refused because its epoch is stale, or no such run."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class Delivery(Enum):
    """What became of one event: put in the inbox, known already, no such run, or the run is
    over.
    """

    DELIVERED = "delivered"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    OVER = "over"


class Due(msgspec.Struct, frozen=True):
    """A run whose time has come."""

    id: str
    wake_at: datetime


class Stats(msgspec.Struct, frozen=True):
    """Counts for people: runs by status, and the oldest wake time among runs that are due."""

    by_status: Mapping[str, int] = msgspec.field(default_factory=dict)
    oldest_due: datetime | None = None


class Store(Protocol):
    """The five methods of every store.

    A store with more abilities also has an attribute `capabilities`; one without it is taken to
    have these five and nothing else.
    """

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`: what was there before, journal and all, is gone.

        On a store with a journal the run's lease ends and its epoch grows, so that an owner of
        before is fenced out.
        """
        ...

    async def load(self, id: str, /) -> Snapshot | None:
        """Give the merged snapshot, its steps in the order they were recorded, or None."""
        ...

    async def delete(self, id: str, /) -> object:
        """Remove the run with its journal, lease and inbox; a missing run is no error.

        The stores in the box answer whether there was one. An epoch of the deleted run stays
        stale for ever, also when the id is used again.
        """
        ...

    async def list(
        self,
        *,
        prefix: str = "",
        limit: int = 100,
        status: RunStatus | None = None,
        workflow: str | None = None,
        after: str | None = None,
    ) -> Sequence[RunSummary]:
        """Give runs newest first, at most `limit`; 0 gives nothing.

        `prefix` is exact and case-sensitive. `after` is the `cursor` of the last line of the page
        before: no run that stays as it is is skipped or shown twice.
        """
        ...

    async def close(self) -> None:
        """Let go of what the store opened itself; a client that was passed in stays open. A second
        call does nothing."""
        ...


class JournalStore(Store, Protocol):
    """A store that takes small fenced writes of many runs at once."""

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction or pipeline and give a verdict for each, in order.

        An entry is accepted when its epoch is the run's newest and is open, fenced when its epoch
        is older or closed, unknown when there is no such run; one entry's refusal harms no other.
        A rest closes its epoch, and so does the release of its lease. An expired lease closes
        nothing until another owner takes the run. Accepted means durable as
        `capabilities.survives` says. While its epoch is the newest, open or closed, an entry sent
        again (same id, epoch and n) is accepted and changes nothing, and so is one whose `n` is
        not above that of the rest. After it, `load` gives the merge of everything appended, in
        order.
        """
        ...


class LeaseStore(Store, Protocol):
    """A store that lets one owner at a time have a run."""

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | None]:
        """Give each want its lease and the run read under it, or None when another owner's lease is
        unexpired, or when the run is missing and nothing was given to create it. A lease that the
        same owner holds already is given again, so that a lost answer can be asked for twice.

        The epoch grows at each acquisition and never comes twice for one id, also after `delete`.
        An unexpired lease is never stolen, and an expired one is there for the taking. From the
        moment of the grant every entry of an older epoch is refused or ignored. A granted run has
        the status running until its next rest. A run that cannot be read raises `StoreCorrupted`,
        which names it, and is not leased.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases in one statement to `ttl` from now; None for each that was
        lost. A lease that expired and that nobody has taken is renewed; a taken one never is."""
        ...

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Give the leases up without a rest, so that the runs can be claimed at `wake_at` (None: at
        once).

        The journal stays, and the epoch is closed. Releasing a lease that is not one's own does
        nothing.
        """
        ...


class ScheduleStore(LeaseStore, Protocol):
    """A store that knows which runs want a worker, by an index and never by a scan."""

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim, all in one write; False for each id that was there
        already, which stays untouched.
        """
        ...

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Give the runs without a live lease whose wake time is at or before `now`, earliest
        first.
        """
        ...

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        """Lease and load up to `limit` runs that are due, runnable or orphaned, earliest first.

        Each goes to one claimant only. A run is orphaned when its owner's lease has expired.
        `workflows` keeps to runs of these names. A run that cannot be read is logged and left out:
        another takes its place, and it is not claimed again within the next hour.
        """
        ...


class InboxStore(LeaseStore, Protocol):
    """A store that keeps events for runs until they are taken."""

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put an event in the run's inbox; a `dedup_id` that was used before for this run is a
        duplicate, also after the first one was taken. A run at rest that awaits `name` becomes
        due at once; a run that goes to rest awaiting a name that lies untaken in its inbox is
        due at once.
        """
        ...

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Give the run's messages that were not taken, in the order they were sent. A message is
        taken by the entry that names it in `consumes`, in the same write.
        """
        ...


class TransactionStore(JournalStore, Protocol):
    """A store whose own transaction can hold a user's writes beside the step's record."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Open a transaction, fence it by the epoch, call `work` with the store's connection, write
        the entry it returns and commit, all or nothing. With an epoch that is older or closed,
        `work` is not called. An exception from `work` rolls back and comes out as it is, unless the
        connection was lost while `work` used it: then `StoreUnavailable` is raised from it,
        whatever it is, for the work itself has not failed."""
        ...


class NotifyStore(ScheduleStore, Protocol):
    """A store that can hint that something became due. Hints may be lost or doubled."""

    def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process."""
        ...


class MaintenanceStore(Store, Protocol):
    """A store that can be kept small and asked how it is."""

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over (completed, failed, cancelled; or only
        `status`) and were last updated longer ago than `older_than`; give how many. A run that
        is not over is never pruned.
        """
        ...

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        ...


BASE = Capabilities()


def capabilities(store: Store) -> Capabilities:
    """Give what a store declares; the five methods alone when it declares nothing."""
    declared = getattr(store, "capabilities", BASE)
    if not isinstance(declared, Capabilities):
        raise InvalidArgument("store.capabilities", declared, "a perdure.store.Capabilities value")
    return declared


def can_journal(store: Store) -> TypeGuard[JournalStore]:
    """Tell whether the store takes small fenced writes."""
    return capabilities(store).journal


def can_lease(store: Store) -> TypeGuard[LeaseStore]:
    """Tell whether the store gives leases, atomic or best effort."""
    return capabilities(store).lease != "none"


def can_schedule(store: Store) -> TypeGuard[ScheduleStore]:
    """Tell whether the store finds due runs."""
    return capabilities(store).schedule


def can_inbox(store: Store) -> TypeGuard[InboxStore]:
    """Tell whether the store keeps events."""
    return capabilities(store).inbox


def can_transact(store: Store) -> TypeGuard[TransactionStore]:
    """Tell whether a step's record can share the user's transaction."""
    return capabilities(store).transaction


def can_notify(store: Store) -> TypeGuard[NotifyStore]:
    """Tell whether the store hints at due runs."""
    return capabilities(store).notify


def can_maintain(store: Store) -> TypeGuard[MaintenanceStore]:
    """Tell whether the store prunes and counts."""
    return capabilities(store).maintenance


def require_journal(store: Store, needed_for: str = "") -> JournalStore:
    """Give the store as a journal, or raise `MissingAbility`."""
    if can_journal(store):
        return store
    raise MissingAbility(store, "journal", needed_for)


def require_lease(store: Store, needed_for: str = "") -> LeaseStore:
    """Give the store as a lease store, or raise `MissingAbility`."""
    if can_lease(store):
        return store
    raise MissingAbility(store, "lease", needed_for)


def require_schedule(store: Store, needed_for: str = "") -> ScheduleStore:
    """Give the store as a schedule, or raise `MissingAbility`."""
    if can_schedule(store):
        return store
    raise MissingAbility(store, "schedule", needed_for)


def require_inbox(store: Store, needed_for: str = "") -> InboxStore:
    """Give the store as an inbox, or raise `MissingAbility`."""
    if can_inbox(store):
        return store
    raise MissingAbility(store, "inbox", needed_for)


def require_transaction(store: Store, needed_for: str = "") -> TransactionStore:
    """Give the store as a transaction store, or raise `MissingAbility`."""
    if can_transact(store):
        return store
    raise MissingAbility(store, "transaction", needed_for)


def require_maintenance(store: Store, needed_for: str = "") -> MaintenanceStore:
    """Give the store as one that prunes and counts, or raise `MissingAbility`."""
    if can_maintain(store):
        return store
    raise MissingAbility(store, "maintenance", needed_for)


def check_store(store: object, parameter: str = "store") -> Store:
    """Give the store back, or raise: an object with the five methods."""
    verbs = (getattr(store, verb, None) for verb in ("save", "load", "delete", "list", "close"))
    if isinstance(store, type) or not all(map(callable, verbs)):
        expected = "a store: an object with save, load, delete, list and close"
        hint = "perdure.stores.open_store(url) opens one" if isinstance(store, str) else ""
        raise InvalidArgument(parameter, store, expected, hint)
    return cast(Store, store)


def check_entries(entries: Sequence[Entry], limit: int) -> None:
    """Raise `ValueTooLarge`, naming the step, when an entry holds more than `limit` bytes."""
    for entry in entries:
        if len(entry.data) > limit:
            what = f"the record of step {entry.step!r}" if entry.step else "the snapshot"
            raise ValueTooLarge(f"{what} of run {entry.id!r}", len(entry.data), limit)


class AsyncCloseable(ABC):
    """Gives a store `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Let go of what the store opened itself."""
