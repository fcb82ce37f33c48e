"""What a memory store keeps: runs as a database's rows would hold them."""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count

from perdure import codec
from perdure.snapshot import RunStatus, Snapshot
from perdure.store import Message
from perdure.stores._reading import merged, reading
from perdure.stores.memory.due_index import Agenda, Planned


@dataclass(slots=True, eq=False, kw_only=True)
class Run(Planned):
    """One run, encoded, so that it holds nothing a database would refuse.

    While it has an owner, `wake_at` is the end of the lease. `folded` is the place of the last
    entry that the snapshot holds. `known_mail` are the dedup ids that were used.
    """

    snapshot: bytes
    updated_at: datetime
    epoch: int
    status: RunStatus = "running"
    owner: str | None = None
    awaits: tuple[str, ...] = ()
    takeovers: int = 0
    folded: tuple[int, int] = (0, 0)
    journal: dict[tuple[int, int], bytes] = field(default_factory=dict)
    mail: dict[str, Message] = field(default_factory=dict)
    known_mail: set[str] = field(default_factory=set)

    def merged(self) -> Snapshot:
        """Give the snapshot with the journal applied, in the order of epoch and number."""
        journal = (self.journal[place] for place in sorted(self.journal))
        with reading(self.id):
            return merged(*(codec.loads(data) for data in (self.snapshot, *journal)))

    def orphaned(self, now: datetime) -> bool:
        """Tell whether the run has an owner whose lease has expired."""
        return self.owner is not None and self.wake_at is not None and self.wake_at <= now

    def place(self) -> tuple[datetime, str]:
        """Give what runs are listed by; the id keeps those of one moment apart."""
        return self.updated_at, self.id


class Shelf:
    """What memory stores that share their runs share."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.agenda: Agenda[Run] = Agenda()
        # One count for all runs: a deleted run's epochs need no memory to stay stale for ever.
        self.epochs = count(1)
        self.message_ids = count(1)
        self.listeners: set[asyncio.Event] = set()
