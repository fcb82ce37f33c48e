"""What the document stores keep of a run. Times are microseconds since 1970."""

from collections.abc import Collection
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus
from perdure.store import Entry, Lease, Message, Verdict
from perdure.stores._timestamps import from_microseconds

# How often a verb starts over when other processes change the run under it.
MAX_ATTEMPTS = 20

# The epoch of a journal entry, and its number in that epoch.
Place: TypeAlias = tuple[int, int]


class Head(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """The state of a run without its snapshot, journal and inbox.

    While the run has an owner, `wake_at` is the end of the lease. `base` is the place of the write
    that stored the snapshot: journal entries count only above it. `consumed` are messages that are
    still in the inbox although they were consumed.
    """

    id: str
    workflow: str | None
    status: RunStatus
    wake_at: int | None
    awaits: tuple[str, ...] = ()
    owner: str | None = None
    epoch: int
    takeovers: int = 0
    released: bool = False
    updated_at: int
    base: Place
    consumed: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether the newest epoch was closed, by a rest or by the release of its lease."""
        return self.released or self.base[0] == self.epoch

    def is_leased(self, now: int) -> bool:
        """Return whether the run has an owner whose lease has not expired."""
        return self.owner is not None and self.wake_at is not None and self.wake_at > now

    def is_held_with(self, lease: Lease) -> bool:
        """Return whether this is the lease under which the run is held."""
        return self.owner == lease.owner and self.epoch == lease.epoch and not self.is_closed


H = TypeVar("H", bound=Head)


class StoredMessage(NamedTuple):
    """A message in a run's inbox; `payload` is JSON."""

    id: str
    name: str
    payload: str
    sent_at: int

    def as_message(self) -> Message:
        """Return the message as the store contract has it."""
        return Message(self.id, self.name, self.payload.encode(), from_microseconds(self.sent_at))


class Wake(NamedTuple):
    """A wake line: the run may need a worker at that time."""

    at: int
    id: str
    workflow: str | None


def verdict(head: Head | None, entry: Entry, written: Collection[Place]) -> Verdict:
    """Return the verdict on an entry; `written` are the journal's places if the run is released."""
    if head is None:
        return Verdict.UNKNOWN
    if entry.epoch != head.epoch:
        return Verdict.FENCED
    place = (entry.epoch, entry.n)
    is_stored = place <= head.base or place in written
    return Verdict.ACCEPTED if is_stored or not head.is_closed else Verdict.FENCED


def too_busy(id: str) -> StoreUnavailable:
    """Return the error for a run that other processes keep changing."""
    return StoreUnavailable(
        f"run {id!r} was changed by other processes {MAX_ATTEMPTS} times; try again"
    )
