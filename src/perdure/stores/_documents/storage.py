"""The protocols that a storage of documents must implement."""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from perdure.errors import StoreCorrupted
from perdure.snapshot import Snapshot
from perdure.store import Entry, NewMessage, Receipt
from perdure.stores._documents.records import H, Head, Place, StoredMessage, Wake

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

Plan: TypeAlias = Callable[[Wake], Awaitable[Wake | None]]
Accepts: TypeAlias = Callable[[Wake], bool]


class StoredRun(Protocol[H]):
    """One run in the storage; `id` includes the store's prefix.

    A method that writes a head compares it with the one that was last read, and returns `None` or
    `False` if another process changed it in the meantime.
    """

    @property
    def id(self) -> str: ...

    def lock(self, *, shared: bool = False) -> AbstractAsyncContextManager[None]:
        """Lock the run against every task and process that the storage can lock out.

        With `shared`, readers do not exclude each other.

        Journal entries that were added are durable when the context exits.
        """
        ...

    async def head(self) -> H | None:
        """Read the head."""
        ...

    async def load(self) -> Snapshot | None:
        """Read the merged snapshot."""
        ...

    async def inbox(self) -> Sequence[StoredMessage]:
        """Read the messages, including consumed ones that were not removed yet, in order."""
        ...

    async def consumed_ids(self, head: H) -> set[str]:
        """Return the ids of consumed messages that may still be in the inbox."""
        ...

    async def journal_places(self, head: H) -> Collection[Place]:
        """Return the places of the newest epoch's journal entries."""
        ...

    async def next_epoch(self, head: H | None, now: int) -> int:
        """Return an epoch that no run with this id has ever had, not even a deleted one."""
        ...

    async def prepare(self) -> None:
        """Prepare for a new run: remove what a crash left behind of a deleted one."""
        ...

    async def take(self, old: H, new: H) -> H | None:
        """Lease the run to another owner; from now on, entries of older epochs do not count."""
        ...

    async def read(self, head: H) -> tuple[H, Snapshot] | None:
        """Read the merged snapshot under a new lease; `None` if the lease was lost."""
        ...

    async def is_held(self, head: H) -> bool:
        """Return whether the lease is still the run's current one."""
        ...

    async def renew(self, old: H, new: H) -> bool:
        """Extend the lease."""
        ...

    async def release(self, old: H, new: H) -> bool:
        """Release the lease and close the epoch."""
        ...

    async def add(self, entries: Sequence[Entry]) -> H | None:
        """Append the entries to the journal; return the head that decides whether they count."""
        ...

    async def settle(self, old: H | None, new: Head, data: bytes) -> H | None:
        """Replace the head and the snapshot; the first head of a run may already have an owner."""
        ...

    async def sweep(self, head: H) -> None:
        """Remove what the head that was just settled no longer refers to."""
        ...

    async def deliver(self, head: H, messages: Sequence[NewMessage], now: int) -> Sequence[Receipt]:
        """Put messages in the inbox in one write, except for duplicates or if the run is over.

        Message ids are increasing integers.
        """
        ...

    async def progress(self, head: H) -> str:
        """Return a string that changes with every journal entry and message."""
        ...

    async def delete(self, head: H) -> bool:
        """Remove the head, and then everything else."""
        ...

    async def discard(self, now: int) -> bool:
        """Remove what is left of a run whose head is missing or cannot be read.

        Return whether there was a head.
        """
        ...


class Scan(Protocol):
    """The wake lines of one queue up to a given time, earliest first."""

    async def next(self, count: int) -> list[Wake]:
        """Return up to `count` more lines; fewer at the end."""
        ...

    def mark_claimed(self, id: str) -> None:
        """Note that a run was claimed, so that its lines are no longer needed."""
        ...

    def mark_outdated(self, id: str, wake: Wake | None) -> None:
        """Note that the lines of a run are out of date; `wake` is the correct one, if any."""
        ...

    async def tidy(self, plan: Plan, now: int) -> None:
        """Remove lines that are no longer true, where that is worth it.

        `plan` returns when the run of a line actually needs a worker.
        """
        ...


class Wakes(Protocol):
    """When runs need a worker, by queue and time: neither runs that are not due nor lines of other
    queues are ever read.
    """

    def gate(self) -> AbstractAsyncContextManager[None]:
        """Prevent the removal of lines until the runs that they announce are written."""
        ...

    async def add(self, wakes: Iterable[Wake], now: int) -> None:
        """Write lines; they are durable when this returns."""
        ...

    def scan(self, queue: str, until: int, now: int, accepts: Accepts) -> Scan:
        """Return the lines of a queue up to time `until` that `accepts` accepts."""
        ...

    async def queues(self) -> Collection[str]:
        """Return the queues that may have lines, except for ""."""
        ...


class Storage(Protocol[H]):
    """Runs and wake lines in files, or in a key-value store."""

    @property
    def wakes(self) -> Wakes: ...

    @property
    def read_ahead(self) -> int:
        """How many heads to read at once although fewer may be needed."""
        ...

    async def open(self) -> None:
        """Create the storage if it does not exist; otherwise check its layout."""
        ...

    def run(self, id: str) -> StoredRun[H]:
        """Return a run by its id with the store's prefix, whether it exists or not."""
        ...

    async def heads(self, ids: Sequence[str]) -> Sequence[H | StoreCorrupted | None]:
        """Read many heads; for an unreadable head, its error is returned."""
        ...

    async def all_heads(self, prefix: str) -> Sequence[H]:
        """Read the heads of all runs whose ids start with `prefix`, skipping unreadable ones."""
        ...

    async def gather(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T]
    ) -> list[R]:
        """Process several items concurrently."""
        ...

    async def execute(
        self, verb: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **options: P.kwargs
    ) -> R:
        """Run an operation where it may block, and translate the storage's errors."""
        ...

    async def close(self) -> None:
        """Wait for the operations in progress, and close what the storage opened."""
        ...
