"""The runs of a memory store, as rows of a database."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count

from perdure import codec
from perdure.clock import Clock
from perdure.keyvalue import MemoryKeyValue
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Entry, Message, RunSummary
from perdure.stores._reading import merge_journal, reading
from perdure.stores.memory.due_index import DueIndex, IndexedRun
from perdure.stores.memory.transaction import Table


@dataclass(slots=True, eq=False, kw_only=True)
class Run(IndexedRun):
    """A run, encoded, so that it cannot hold anything that a database would reject.

    While the run has an owner, `wake_at` is when the lease expires. `folded` is the position (epoch
    and number) of the last entry that the snapshot includes. `dedup_ids` are all ids ever used.
    """

    snapshot: bytes
    updated_at: datetime
    created_at: datetime
    epoch: int
    tags: tuple[str, ...] = ()
    summary: bytes = b""
    status: RunStatus = "running"
    owner: str | None = None
    awaits: tuple[str, ...] = ()
    takeovers: int = 0
    folded: tuple[int, int] = (0, 0)
    journal: dict[tuple[int, int], bytes] = field(default_factory=dict)
    inbox: dict[str, Message] = field(default_factory=dict)
    dedup_ids: set[str] = field(default_factory=set)

    def merged_snapshot(self) -> Snapshot:
        """Return the snapshot with the journal applied, in the order of epoch and number."""
        with reading(self.id):
            snapshot = codec.loads(self.snapshot)
            # Most runs that are leased have no journal.
            entries = sorted(self.journal.items()) if self.journal else ()
            return merge_journal(snapshot, *[codec.loads(data) for _, data in entries])

    def includes(self, entry: Entry) -> bool:
        """Return whether the entry was written before."""
        position = (entry.epoch, entry.n)
        return position in self.journal or position <= self.folded

    def is_orphaned(self, now: datetime) -> bool:
        """Return whether the run has an owner whose lease has expired."""
        return self.owner is not None and self.wake_at is not None and self.wake_at <= now

    def to_summary(self, prefix: str) -> RunSummary:
        """Return the run's summary; its id does not include the prefix."""
        return RunSummary(
            id=self.id.removeprefix(prefix),
            updated_at=self.updated_at,
            status=self.status,
            workflow=self.workflow,
            owner=self.owner,
            version=self.version,
            queue=self.queue,
            tags=self.tags,
            summary=self.summary,
            created_at=self.created_at,
            wake_at=self.wake_at,
            awaits=self.awaits,
            takeovers=self.takeovers,
        )

    def revision(self) -> str:
        """Return a string that changes with every grant, release, entry, rest and message."""
        last = max(self.journal, default=self.folded)
        return f"{self.epoch}.{last[1]}.{len(self.inbox)}.{self.owner is not None:d}"


class Runs:
    """The runs of all memory stores that share them, by prefixed id, with their due index."""

    def __init__(self) -> None:
        self.index: DueIndex[Run] = DueIndex()
        # One counter for all runs, so that the epochs of deleted runs stay stale without being
        # stored.
        self.epochs = count(1)
        self.message_ids = count(1)
        # In order, so that a simulated run can be repeated.
        self.listeners: dict[asyncio.Event, None] = {}
        self.table = Table()
        self._by_id: dict[str, Run] = {}
        self._documents: MemoryKeyValue | None = None

    def __iter__(self) -> Iterator[Run]:
        return iter(self._by_id.values())

    def documents(self, clock: Clock) -> MemoryKeyValue:
        """Return the documents beside the runs; they expire by the clock of the first store."""
        if self._documents is None:
            self._documents = MemoryKeyValue(clock=clock)
        return self._documents

    def get(self, id: str) -> Run | None:
        """Return the run, or `None`."""
        return self._by_id.get(id)

    def add(self, run: Run) -> None:
        """Add a run; it enters the due index when it gets a wake time."""
        self._by_id[run.id] = run

    def remove(self, id: str) -> bool:
        """Remove a run; return whether it existed."""
        run = self._by_id.pop(id, None)
        if run is None:
            return False
        self.index.remove(run)
        return True
