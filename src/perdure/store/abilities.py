"""What a store can do, according to its declared `capabilities`."""

from collections.abc import Callable
from typing import TypeGuard, TypeVar

from perdure.errors import InvalidArgument, MissingAbility
from perdure.store.contract import (
    HandoffStore,
    InboxStore,
    JournalStore,
    LeaseStore,
    MaintenanceStore,
    NotifyStore,
    QueueStore,
    ScheduleStore,
    SearchStore,
    Store,
    TransactionalEnqueueStore,
    TransactionStore,
)
from perdure.store.records import Capabilities

BASE = Capabilities()

S = TypeVar("S", bound=Store)


def capabilities(store: Store) -> Capabilities:
    """Return the declared capabilities; a store that declares none has only the five methods."""
    declaration = getattr(store, "capabilities", BASE)
    if not isinstance(declaration, Capabilities):
        raise InvalidArgument(
            "store.capabilities", declaration, "a perdure.store.Capabilities value"
        )
    return declaration


def can_journal(store: Store) -> TypeGuard[JournalStore]:
    """Return whether the store accepts small fenced writes."""
    return capabilities(store).journal


def can_lease(store: Store) -> TypeGuard[LeaseStore]:
    """Return whether the store grants leases, atomic or best effort."""
    return capabilities(store).lease != "none"


def can_schedule(store: Store) -> TypeGuard[ScheduleStore]:
    """Return whether the store finds due runs."""
    return capabilities(store).schedule


def can_queue(store: Store) -> TypeGuard[QueueStore]:
    """Return whether the store supports queues."""
    return capabilities(store).queues


def can_inbox(store: Store) -> TypeGuard[InboxStore]:
    """Return whether the store keeps messages."""
    return capabilities(store).inbox


def can_hand_off(store: Store) -> TypeGuard[HandoffStore]:
    """Return whether the store can lease a run with the message that makes it due."""
    return capabilities(store).handoff


def can_transact(store: Store) -> TypeGuard[TransactionStore]:
    """Return whether a step's record can share the user's transaction."""
    return capabilities(store).transaction


def can_enqueue_in_transaction(store: Store) -> TypeGuard[TransactionalEnqueueStore]:
    """Return whether runs can be created in the caller's transaction."""
    return capabilities(store).transactional_enqueue


def can_notify(store: Store) -> TypeGuard[NotifyStore]:
    """Return whether the store sends notifications of due runs."""
    return capabilities(store).notify


def can_maintain(store: Store) -> TypeGuard[MaintenanceStore]:
    """Return whether the store prunes and counts runs."""
    return capabilities(store).maintenance


def can_search(store: Store) -> TypeGuard[SearchStore]:
    """Return whether the store finds runs by their headers."""
    return capabilities(store).search


def require_journal(store: Store, needed_for: str = "") -> JournalStore:
    """Return the store as a `JournalStore`, or raise `MissingAbility`."""
    return _require(store, can_journal, "journal", needed_for)


def require_lease(store: Store, needed_for: str = "") -> LeaseStore:
    """Return the store as a `LeaseStore`, or raise `MissingAbility`."""
    return _require(store, can_lease, "lease", needed_for)


def require_schedule(store: Store, needed_for: str = "") -> ScheduleStore:
    """Return the store as a `ScheduleStore`, or raise `MissingAbility`."""
    return _require(store, can_schedule, "schedule", needed_for)


def require_queues(store: Store, needed_for: str = "") -> QueueStore:
    """Return the store as a `QueueStore`, or raise `MissingAbility`."""
    return _require(store, can_queue, "queues", needed_for)


def require_inbox(store: Store, needed_for: str = "") -> InboxStore:
    """Return the store as an `InboxStore`, or raise `MissingAbility`."""
    return _require(store, can_inbox, "inbox", needed_for)


def require_transaction(store: Store, needed_for: str = "") -> TransactionStore:
    """Return the store as a `TransactionStore`, or raise `MissingAbility`."""
    return _require(store, can_transact, "transaction", needed_for)


def require_transactional_enqueue(store: Store, needed_for: str = "") -> TransactionalEnqueueStore:
    """Return the store as a `TransactionalEnqueueStore`, or raise `MissingAbility`."""
    return _require(store, can_enqueue_in_transaction, "transactional_enqueue", needed_for)


def require_maintenance(store: Store, needed_for: str = "") -> MaintenanceStore:
    """Return the store as a `MaintenanceStore`, or raise `MissingAbility`."""
    return _require(store, can_maintain, "maintenance", needed_for)


def require_search(store: Store, needed_for: str = "") -> SearchStore:
    """Return the store as a `SearchStore`, or raise `MissingAbility`."""
    return _require(store, can_search, "search", needed_for)


def _require(
    store: Store, can: Callable[[Store], TypeGuard[S]], ability: str, needed_for: str
) -> S:
    if can(store):
        return store
    raise MissingAbility(store, ability, needed_for)
