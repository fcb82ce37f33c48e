"""The store contract: what a store of runs must do, in small protocols.

A *run* is a snapshot plus the journal of what happened since; `load` returns
`merge_snapshots(snapshot, *journal)`. Five methods make a store (`Store`). Each further ability is
a protocol of its own, and a store declares which of them it has in one `Capabilities` value. The
engine reads the declaration and never guesses. The docstrings here are the law; each sentence has a
check in `perdure.testing.conformance`.

Ids are non-empty strings of up to 512 characters without NUL. Times are aware UTC datetimes of the
store's own clock: the database's, if there is one.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Literal, Protocol, Self, TypeGuard, TypeVar, cast

import msgspec

from perdure.clock import as_utc
from perdure.errors import InvalidArgument, MissingAbility, ValueTooLarge
from perdure.snapshot import RunStatus, Snapshot, awaits_of, rest_status, wake_at_of
from perdure.validation import check_int

MAX_VALUE_SIZE = 16 * 1024 * 1024


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do. Declared once, read by the engine, checked by the conformance kit."""

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
    """One run as `list` returns it. `updated_at` is ISO 8601 in UTC with milliseconds and `Z`.

    `owner` has the run's lease, which may have expired.
    """

    id: str
    updated_at: str
    status: RunStatus = "running"
    workflow: str | None = None
    cursor: str = ""
    owner: str | None = None


class Lease(msgspec.Struct, frozen=True):
    """The right to write a run, until `expires_at` or until another owner takes the run over.

    `epoch` is the fencing token of its writes; the next owner's is higher. `has_messages` is
    whether there were unconsumed messages in the run's inbox when the lease was granted or renewed.
    """

    id: str
    owner: str
    epoch: int
    expires_at: datetime
    has_messages: bool = False


class Message(msgspec.Struct, frozen=True):
    """One event in a run's inbox that was not consumed yet. `payload` is JSON."""

    id: str
    name: str
    payload: bytes
    sent_at: datetime


class Rest(msgspec.Struct, frozen=True):
    """The state of a run that no process owns.

    `wake_at` is when the run should be claimed (`None`: never by time). `awaits` are the names of
    the events that wake it sooner. A run with the status paused has no `wake_at`: only an event in
    its `awaits` wakes it, or an owner that acquires it. With `delete` nothing is left of the run:
    it is deleted, as by `delete`, in the same fenced write.
    """

    status: RunStatus
    wake_at: datetime | None = None
    awaits: tuple[str, ...] = ()
    delete: bool = False


def rest_of(snapshot: Snapshot) -> Rest:
    """Return the state of an unowned run with this snapshot."""
    return Rest(rest_status(snapshot), wake_at_of(snapshot), awaits_of(snapshot))


class LeaseRequest(msgspec.Struct, frozen=True):
    """A request for the lease of a run.

    `create` is the JSON of a first snapshot: a missing run is created with it. Without it, a
    missing run is not granted. With `existing=False` only a new run is granted, and an existing one
    stays unchanged. `workflow` names a new run's workflow for `list` and `claim`. `instead_of` is
    an owner whose process is known to be gone: its lease is taken over although it is unexpired.
    """

    id: str
    owner: str
    ttl: timedelta
    create: bytes | None = None
    workflow: str | None = None
    existing: bool = True
    instead_of: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Why a lease was not granted: another owner has it, the run is missing, or it exists.

    `owner` and `expires_at` are those of the unexpired lease, as far as it still exists.
    """

    id: str
    reason: Literal["owned", "missing", "exists"]
    owner: str | None = None
    expires_at: datetime | None = None


class NewRun(msgspec.Struct, frozen=True):
    """A run to be created unowned: `snapshot` is JSON; without `wake_at` the run is due at once."""

    id: str
    workflow: str
    snapshot: bytes
    wake_at: datetime | None = None


class Grant(msgspec.Struct, frozen=True):
    """A lease together with everything its owner needs to continue, read under that lease.

    `now` is the store's time of the grant. `takeovers` counts consecutive owners that lost their
    lease without writing an entry: it expired, or was taken over. Any accepted entry resets it to
    zero, and so does a rest; a release without an entry neither counts nor resets.
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
    write, the run is stored as `rest` says, the lease is given up and the epoch is closed.
    `consumes` are the ids of inbox messages that this write consumes.
    """

    id: str
    epoch: int
    n: int
    data: bytes
    consumes: tuple[str, ...] = ()
    rest: Rest | None = None
    step: str = ""


class Verdict(Enum):
    """The outcome of one entry: written, refused because its epoch is stale, or no such run."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class Delivery(Enum):
    """The outcome of one message: in the inbox, a duplicate, no such run, or the run is over."""

    DELIVERED = "delivered"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    OVER = "over"


class Due(msgspec.Struct, frozen=True):
    """A run whose wake time has passed."""

    id: str
    wake_at: datetime


class Stats(msgspec.Struct, frozen=True):
    """The number of runs by status, and the oldest wake time among runs that are due."""

    by_status: Mapping[str, int] = msgspec.field(default_factory=dict)
    oldest_due: datetime | None = None


class Store(Protocol):
    """The five methods of every store.

    A store with more abilities also has an attribute `capabilities`; one without it is assumed to
    have these five and nothing else.
    """

    async def save(self, id: str, snapshot: Snapshot, /) -> None:
        """Replace the whole run by `snapshot`: its previous state, journal included, is gone.

        On a store with a journal the run's lease ends and its epoch increases, so that the previous
        owner is fenced out.
        """
        ...

    async def load(self, id: str, /) -> Snapshot | None:
        """Return the merged snapshot, its steps in the order they were recorded, or `None`."""
        ...

    async def delete(self, id: str, /) -> object:
        """Delete the run with its journal, lease and inbox; a missing run is not an error.

        The stores of this package return whether the run existed. An epoch of a deleted run stays
        stale forever, even when the id is used again.
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
        """Return up to `limit` runs, the most recently updated first; 0 returns nothing.

        `prefix` is exact and case-sensitive. `after` is the `cursor` of the last run of the
        previous page: no run that stays unchanged is skipped or repeated.
        """
        ...

    async def close(self) -> None:
        """Close what the store opened itself; a client that was passed in stays open.

        A second call does nothing.
        """
        ...


class JournalStore(Store, Protocol):
    """A store that accepts small fenced writes of many runs at once."""

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        """Write the entries in one transaction or pipeline; return a verdict on each, in order.

        An entry is accepted when its epoch is the run's newest and is open, fenced when its epoch
        is older or closed, unknown when there is no such run; a refused entry does not affect the
        others. A rest closes its epoch, and so does the release of its lease. An expired lease
        closes nothing until another owner takes over the run. Accepted means durable as
        `capabilities.survives` says. While its epoch is the newest, open or closed, an entry sent
        again (same id, epoch and n) is accepted and changes nothing, and so is one whose `n` is not
        above that of the rest. Afterwards, `load` returns the merge of everything appended, in
        order.
        """
        ...


class LeaseStore(Store, Protocol):
    """A store that grants a run to one owner at a time."""

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        """Return for each request its lease and the run read under it, or the reason why not.

        A request is not granted when another owner's lease is unexpired, or when the run is missing
        and the request has no `create`. A lease that the same owner already holds is granted again,
        so that a request can be repeated after its answer was lost. A refusal names the owner of an
        unexpired lease and its expiry.

        The epoch increases with each acquisition and is never used twice for one id, even after
        `delete`. An unexpired lease is never stolen, unless the request names exactly its owner in
        `instead_of`; an expired one can be taken over. From the moment of the grant every entry of
        an older epoch is refused or ignored. A granted run has the status running until its next
        rest. A run that cannot be read raises `StoreCorrupted`, which names it, and is not leased.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: timedelta, /) -> Sequence[Lease | None]:
        """Move the expiry of all leases to `ttl` from now; return `None` for each that was lost.

        All are renewed in one statement. An expired lease is renewed until another owner takes over
        the run; a lease that was taken over never is.
        """
        ...

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        """Release the leases without a rest, so that the runs can be claimed at `wake_at`.

        Without `wake_at` they can be claimed at once. The journal is kept, and the epoch is closed.
        Releasing a lease that is not the run's current one does nothing.
        """
        ...


class ScheduleStore(LeaseStore, Protocol):
    """A store that finds the runs that need a worker, by an index and never by a scan."""

    async def enqueue(self, runs: Sequence[NewRun], /) -> Sequence[bool]:
        """Create runs that wait for a claim, all in one write.

        Return `False` for each id that existed already; that run stays unchanged.
        """
        ...

    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        """Return up to `limit` runs whose wake time is at or before `now`, earliest first.

        A run with an unexpired lease is not due. `workflows` restricts the result to runs of these
        names.
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

        Each run goes to one claimant only. A run is orphaned when its owner's lease has expired.
        `workflows` restricts the claim to runs of these names. A run that cannot be read is logged
        and left out: another takes its place, and it is not claimed again within the next hour.
        """
        ...


class InboxStore(LeaseStore, Protocol):
    """A store that keeps messages for runs until they are consumed."""

    async def send(
        self, id: str, name: str, payload: bytes, /, *, dedup_id: str | None = None
    ) -> Delivery:
        """Put a message in the run's inbox.

        A `dedup_id` that was used before for this run is a duplicate, even after the first message
        was consumed. An unowned run that awaits `name` becomes due at once; a run whose rest awaits
        the name of an unconsumed message in its inbox is due at once.
        """
        ...

    async def inbox(self, id: str, /) -> Sequence[Message]:
        """Return the run's unconsumed messages in the order they were sent.

        A message is consumed by the entry that names it in `consumes`, in the same write.
        """
        ...


class TransactionStore(JournalStore, Protocol):
    """A store whose own transaction can hold a user's writes beside a step's record."""

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Call `work` with the store's connection in a transaction that is fenced by the epoch.

        The entry that `work` returns is written in the same transaction: all is committed, or
        nothing. With an epoch that is older or closed, `work` is not called. An exception from
        `work` rolls back and is raised unchanged, unless the connection was lost while `work` used
        it: then `StoreUnavailable` is raised from it, whatever it is, because the work itself has
        not failed.
        """
        ...


class NotifyStore(ScheduleStore, Protocol):
    """A store that sends notifications of due runs. Notifications may be lost or duplicated."""

    def notifications(self) -> AsyncIterator[None]:
        """Yield whenever a run may have become due, in any process."""
        ...


class MaintenanceStore(Store, Protocol):
    """A store that can delete old runs and count the others."""

    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        """Delete up to `limit` runs that are over; return how many were deleted.

        These are runs that are completed, failed or cancelled (or only those with `status`) and
        were last updated longer ago than `older_than`. A run that is not over is never pruned.
        """
        ...

    async def stats(self) -> Stats:
        """Count the runs by status and find the oldest due one."""
        ...


BASE = Capabilities()

S = TypeVar("S", bound=Store)


def capabilities(store: Store) -> Capabilities:
    """Return what a store declares; only the five methods if it declares nothing."""
    declared = getattr(store, "capabilities", BASE)
    if not isinstance(declared, Capabilities):
        raise InvalidArgument("store.capabilities", declared, "a perdure.store.Capabilities value")
    return declared


def can_journal(store: Store) -> TypeGuard[JournalStore]:
    """Return whether the store accepts small fenced writes."""
    return capabilities(store).journal


def can_lease(store: Store) -> TypeGuard[LeaseStore]:
    """Return whether the store grants leases, atomic or best effort."""
    return capabilities(store).lease != "none"


def can_schedule(store: Store) -> TypeGuard[ScheduleStore]:
    """Return whether the store finds due runs."""
    return capabilities(store).schedule


def can_inbox(store: Store) -> TypeGuard[InboxStore]:
    """Return whether the store keeps messages."""
    return capabilities(store).inbox


def can_transact(store: Store) -> TypeGuard[TransactionStore]:
    """Return whether a step's record can share the user's transaction."""
    return capabilities(store).transaction


def can_notify(store: Store) -> TypeGuard[NotifyStore]:
    """Return whether the store sends notifications of due runs."""
    return capabilities(store).notify


def can_maintain(store: Store) -> TypeGuard[MaintenanceStore]:
    """Return whether the store prunes and counts runs."""
    return capabilities(store).maintenance


def require_journal(store: Store, needed_for: str = "") -> JournalStore:
    """Return the store as a `JournalStore`, or raise `MissingAbility`."""
    return _require(store, can_journal, "journal", needed_for)


def require_lease(store: Store, needed_for: str = "") -> LeaseStore:
    """Return the store as a `LeaseStore`, or raise `MissingAbility`."""
    return _require(store, can_lease, "lease", needed_for)


def require_schedule(store: Store, needed_for: str = "") -> ScheduleStore:
    """Return the store as a `ScheduleStore`, or raise `MissingAbility`."""
    return _require(store, can_schedule, "schedule", needed_for)


def require_inbox(store: Store, needed_for: str = "") -> InboxStore:
    """Return the store as an `InboxStore`, or raise `MissingAbility`."""
    return _require(store, can_inbox, "inbox", needed_for)


def require_transaction(store: Store, needed_for: str = "") -> TransactionStore:
    """Return the store as a `TransactionStore`, or raise `MissingAbility`."""
    return _require(store, can_transact, "transaction", needed_for)


def require_maintenance(store: Store, needed_for: str = "") -> MaintenanceStore:
    """Return the store as a `MaintenanceStore`, or raise `MissingAbility`."""
    return _require(store, can_maintain, "maintenance", needed_for)


def _require(
    store: Store, can: Callable[[Store], TypeGuard[S]], ability: str, needed_for: str
) -> S:
    if can(store):
        return store
    raise MissingAbility(store, ability, needed_for)


def check_store(store: object, parameter: str = "store") -> Store:
    """Return the store, which must be an object with the five methods."""
    methods = (getattr(store, name, None) for name in ("save", "load", "delete", "list", "close"))
    if isinstance(store, type) or not all(map(callable, methods)):
        expected = "a store: an object with save, load, delete, list and close"
        hint = "perdure.stores.open_store(url) opens one" if isinstance(store, str) else ""
        raise InvalidArgument(parameter, store, expected, hint)
    return cast(Store, store)


def check_entries(entries: Sequence[Entry], limit: int) -> None:
    """Raise `ValueTooLarge`, naming the step, if an entry has more than `limit` bytes.

    A naive wake time is `InvalidArgument`.
    """
    for entry in entries:
        if entry.rest is not None and entry.rest.wake_at is not None:
            as_utc(entry.rest.wake_at, "wake_at")
        if len(entry.data) > limit:
            what = f"the record of step {entry.step!r}" if entry.step else "the snapshot"
            raise ValueTooLarge(f"{what} of run {entry.id!r}", len(entry.data), limit)


class AsyncCloseable(ABC):
    """Makes a store usable with `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close what the store opened itself."""
