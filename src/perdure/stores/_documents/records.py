"""The records of the document stores. Times are microseconds since 1970."""

from collections.abc import Collection
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from perdure.errors import StoreUnavailable
from perdure.snapshot import RunStatus
from perdure.store import Entry, Lease, Message, Rest, RunSummary, Verdict
from perdure.stores._timestamps import from_microseconds, to_microseconds

# How often an operation starts over when other processes change the run in the meantime.
MAX_ATTEMPTS = 20

# The epoch of a journal entry, and its number in that epoch.
Place: TypeAlias = tuple[int, int]


class Wake(NamedTuple):
    """A wake line: the run may need a worker at time `at`.

    Lines of layout 1 end with the workflow.
    """

    at: int
    id: str
    workflow: str | None
    queue: str = ""
    version: int = 0


class Head(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """The state of a run without its snapshot, journal and inbox.

    While the run has an owner, `wake_at` is the end of the lease. `base` is the place of the write
    that stored the snapshot: journal entries count only above it. `consumed` are messages that are
    still in the inbox although they were consumed. Heads of layout 1 have no `created_at`.
    """

    id: str
    workflow: str | None
    queue: str = ""
    version: int = 0
    tags: tuple[str, ...] = ()
    summary: bytes = b""
    created_at: int | None = None
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
        """Return whether this is the run's current lease."""
        return self.owner == lease.owner and self.epoch == lease.epoch and not self.is_closed

    def wake(self, at: int) -> Wake:
        """Return the line that makes the run discoverable at a given time."""
        return Wake(at, self.id, self.workflow, self.queue, self.version)

    def at_rest(self, rest: Rest, place: Place, now: int) -> "Head":
        """Return the head of the run at rest; `place` is the place of the write."""
        return Head(
            id=self.id,
            workflow=self.workflow,
            queue=self.queue,
            version=self.version if rest.version is None else rest.version,
            tags=self.tags if rest.tags is None else rest.tags,
            summary=self.summary if rest.summary is None else rest.summary,
            created_at=self.created_at,
            status=rest.status,
            wake_at=None if rest.wake_at is None else to_microseconds(rest.wake_at),
            awaits=rest.awaits,
            epoch=place[0],
            updated_at=now,
            base=place,
        )

    def to_summary(self, prefix: str) -> RunSummary:
        """Return the run's summary; its id does not include the prefix."""
        return RunSummary(
            id=self.id.removeprefix(prefix),
            updated_at=from_microseconds(self.updated_at),
            status=self.status,
            workflow=self.workflow,
            owner=self.owner,
            version=self.version,
            queue=self.queue,
            tags=self.tags,
            summary=self.summary,
            created_at=None if self.created_at is None else from_microseconds(self.created_at),
            wake_at=None if self.wake_at is None else from_microseconds(self.wake_at),
            awaits=self.awaits,
            takeovers=self.takeovers,
        )


H = TypeVar("H", bound=Head)


class StoredMessage(NamedTuple):
    """A message in a run's inbox; `payload` is JSON."""

    id: str
    name: str
    payload: str
    sent_at: int

    def as_message(self) -> Message:
        """Return the message as a record of the store contract."""
        return Message(self.id, self.name, self.payload.encode(), from_microseconds(self.sent_at))


def verdict(head: Head | None, entry: Entry, journal_places: Collection[Place]) -> Verdict:
    """Return the verdict on an entry; `journal_places` is needed only if the epoch is closed."""
    if head is None:
        return Verdict.UNKNOWN
    if entry.epoch != head.epoch:
        return Verdict.FENCED
    place = (entry.epoch, entry.n)
    is_stored = place <= head.base or place in journal_places
    return Verdict.ACCEPTED if is_stored or not head.is_closed else Verdict.FENCED


def too_busy(id: str) -> StoreUnavailable:
    """Return the error to raise when other processes keep changing a run."""
    return StoreUnavailable(
        f"run {id!r} was changed by other processes {MAX_ATTEMPTS} times; try again"
    )
