"""The journal: one log per run and epoch, whose slots are filled one after another.

An entry is a document whose `_id` is its run, epoch and slot. The process that was granted the
epoch remembers its position and fills the next slot, so an entry costs a single insert. A process
that takes the run over reads the log and inserts a *seal* into the first free slot. The unique
index on `_id` decides between the two: if the entry was first, the insert of the seal fails and the
log is read again, with the entry; if the seal was first, the insert of the entry fails, and its
writer knows that it is fenced. No transaction is needed, and readers ignore everything after a
seal.

A writer trusts its position only for a few minutes after its lease was last confirmed
(`MAX_POSITION_AGE`), and reads the run again after that. So a seal need not stay forever: seals of
logs that no longer count are removed after a day.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from perdure.clock import Clock
from perdure.store import Entry
from perdure.stores.mongo.documents import MAX_DOCUMENT_SIZE, pack, unpack
from perdure.stores.mongo.schema import Collections, insert

MAX_POSITION_AGE = timedelta(minutes=5)
SEAL_TTL = timedelta(days=1)
EMBEDDED = "e"
_MANY_POSITIONS = 10_000
_BATCH_SIZE = 10_000


class StoredEntry(NamedTuple):
    """An entry as the journal holds it: compressed, if it is large."""

    epoch: int
    n: int
    content: bytes
    is_packed: bool
    consumes: Sequence[str] = ()

    def data(self) -> bytes:
        """Return the JSON of the entry."""
        return unpack(self.content) if self.is_packed else self.content


@dataclass(slots=True)
class Log:
    """The entries of one epoch up to a seal, and the slot after them."""

    epoch: int
    entries: list[StoredEntry] = field(default_factory=list)
    next_slot: int = 0
    is_sealed: bool = False

    def find(self, n: int) -> StoredEntry | None:
        """Return the entry with this number, or `None`."""
        return next((entry for entry in self.entries if entry.n == n), None)

    @property
    def last_n(self) -> int:
        """The highest number of an entry, or -1."""
        return max((entry.n for entry in self.entries), default=-1)

    def add(self, slot: int, document: Mapping[str, Any]) -> None:
        """Add the next document in the order of slots."""
        self.next_slot = slot + 1
        if "seal" in document:
            self.is_sealed = True
        elif not self.is_sealed:
            is_packed = "packed" in document
            content = document["packed" if is_packed else "data"]
            consumes = document.get("consumes", ())
            entry = StoredEntry(self.epoch, document["n"], content, is_packed, consumes)
            self.entries.append(entry)


def slot_id(run: str, epoch: int, slot: int) -> str:
    """Return the `_id` of a slot; ids of runs contain no NUL, so slots never collide."""
    return f"{run}\0{epoch:014x}\0{slot:08x}"


def slots_between(run: str, first: int, last: int) -> dict[str, str]:
    """Match the slots of a run from one epoch to another, both included."""
    return {"$gte": f"{run}\0{first:014x}\0", "$lt": f"{run}\0{last:014x}\1"}


def entry_document(run: str, entry: Entry, slot: int) -> dict[str, Any]:
    """Return the document of an entry."""
    document: dict[str, Any] = {"_id": slot_id(run, entry.epoch, slot), "n": entry.n}
    if len(entry.data) > MAX_DOCUMENT_SIZE:
        what = f"the record of step {entry.step!r} of run {entry.id!r}"
        document["packed"] = pack(entry.data, what)
    else:
        document["data"] = entry.data
    if entry.consumes:
        document["consumes"] = [*entry.consumes]
    return document


def journal_data(logs: Iterable[Log]) -> Iterator[bytes]:
    """Yield the data of all entries of a run's logs, in order."""
    entries: dict[tuple[int, int], StoredEntry] = {}
    for log in logs:
        for entry in log.entries:
            entries.setdefault((entry.epoch, entry.n), entry)
    return (entries[place].data() for place in sorted(entries))


def message_name(id: str) -> str:
    """Return the id of a message without its number, which messages of layout 1 do not have."""
    number, _, name = id.partition(":")
    return name if name and number.lstrip("-").isdecimal() else id


def is_embedded(name: str) -> bool:
    """Return whether a message, given by its name, is embedded in its run's document."""
    return name.partition(".")[2].startswith(EMBEDDED)


def consumed_by(logs: Iterable[Log]) -> set[str]:
    """Return the names of the messages that the entries of logs consumed."""
    entries = (entry for log in logs for entry in log.entries)
    return {message_name(id) for entry in entries for id in entry.consumes}


def consumed_messages(run: Mapping[str, Any], logs: Iterable[Log] = ()) -> set[str]:
    """Return the names of messages that a run's last rest and the entries since consumed."""
    return {*map(message_name, run.get("consumed", ())), *consumed_by(logs)}


async def read_logs(db: Collections, epochs: Mapping[str, Sequence[int]]) -> dict[str, list[Log]]:
    """Return the logs of runs, for the given epochs of each, in one round trip."""
    logs = {run: {epoch: Log(epoch) for epoch in epochs[run]} for run in epochs}
    ranges = [
        {"_id": slots_between(run, min(some), max(some))} for run, some in epochs.items() if some
    ]
    if ranges:
        condition = ranges[0] if len(ranges) == 1 else {"$or": ranges}
        async for document in db.journal.find(condition, batch_size=_BATCH_SIZE).sort("_id"):
            run, epoch, slot = document["_id"].split("\0")
            log = logs[run].get(int(epoch, 16))
            if log is not None:
                log.add(int(slot, 16), document)
    return {run: [*by_epoch.values()] for run, by_epoch in logs.items()}


async def seal_logs(db: Collections, epochs: Mapping[str, Sequence[int]]) -> dict[str, list[Log]]:
    """Seal the logs and return them; nothing that is added from now on counts."""
    logs = await read_logs(db, epochs)
    while pairs := [(run, log) for run in logs for log in logs[run] if not log.is_sealed]:
        seals = [
            {"_id": slot_id(run, log.epoch, log.next_slot), "seal": True} for run, log in pairs
        ]
        filled_indexes = await insert(db.journal, seals)
        for index, (_, log) in enumerate(pairs):
            log.is_sealed = index not in filled_indexes
        if filled_indexes:
            # An entry came before the seal, and counts.
            runs = {pairs[index][0] for index in filled_indexes}
            logs.update(await read_logs(db, {run: epochs[run] for run in runs}))
    return logs


@dataclass(slots=True)
class Position:
    """Where the next entry of a lease goes, and what the owner knows about the run's messages.

    `is_certain` is false while a write is unanswered. `has_older_logs` says that logs of earlier
    epochs count too. `messages` are the events of the messages that were unconsumed at the time of
    the grant, by name, and `found` the names of those that were read since; `consumed` are the
    messages that entries consumed since the last rest, and `consumed_count` is how many were
    consumed before it. `unmarked` are those of `consumed` whose marks are not written yet, or that
    are still embedded.
    """

    epoch: int
    confirmed_at: float
    incarnation: str
    slot: int = 0
    last_n: int = -1
    is_certain: bool = True
    has_older_logs: bool = False
    message_count: int = 0
    messages: dict[str, str] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    consumed_count: int = 0
    unmarked: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)

    def knows(self, name: str) -> bool:
        """Return whether a name is known to be that of a message, consumed by this lease or not."""
        return name in self.messages or name in self.found or name in self.consumed


class Positions:
    """The positions of the leases that were granted to this process, by the runs' `_id`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._positions: dict[str, Position] = {}

    def add(self, run: str, epoch: int, incarnation: str, **details: Any) -> None:
        """Add a new lease, unless there is one with a later epoch."""
        current = self._positions.get(run)
        if current is None or current.epoch < epoch:
            if len(self._positions) >= _MANY_POSITIONS:
                self._remove_old()
            self._positions[run] = Position(epoch, self._clock.monotonic(), incarnation, **details)

    def get(self, run: str, epoch: int) -> Position | None:
        """Return the position of a lease, certain or not."""
        position = self._positions.get(run)
        return position if position is not None and position.epoch == epoch else None

    def latest(self, run: str) -> Position | None:
        """Return the position of a run's latest lease, certain or not."""
        return self._positions.get(run)

    def get_certain(self, run: str, epoch: int) -> Position | None:
        """Return the position of a lease if an entry can be written without reading first."""
        position = self.get(run, epoch)
        if position is None or not position.is_certain or self._is_old(position):
            return None
        return position

    def confirm(self, run: str, epoch: int) -> Position | None:
        """Note that the lease is currently valid; return its position."""
        position = self.get(run, epoch)
        if position is not None:
            position.confirmed_at = self._clock.monotonic()
        return position

    def consume(self, run: str, epoch: int, ids: Iterable[str]) -> None:
        """Note that messages were consumed and must be marked."""
        position = self.get(run, epoch)
        if position is not None:
            for name in map(message_name, ids):
                position.messages.pop(name, None)
                position.consumed.add(name)
                position.unmarked.add(name)

    def mark_done(self, run: str, epoch: int, ids: Iterable[str]) -> None:
        """Note that consumed messages were marked or removed."""
        position = self.get(run, epoch)
        if position is not None:
            position.unmarked.difference_update(map(message_name, ids))

    def unmarked(self, leases: Iterable[tuple[str, int]]) -> set[str]:
        """Return the names of unmarked messages of leases, given by run and epoch."""
        positions = (self.get(run, epoch) for run, epoch in leases)
        return {name for position in positions if position for name in position.unmarked}

    def remove(self, run: str, epoch: int) -> None:
        """Forget a lease that has ended."""
        if self.get(run, epoch) is not None:
            del self._positions[run]

    def _is_old(self, position: Position) -> bool:
        return self._clock.monotonic() - position.confirmed_at > MAX_POSITION_AGE.total_seconds()

    def _remove_old(self) -> None:
        for run in [run for run, position in self._positions.items() if self._is_old(position)]:
            del self._positions[run]
