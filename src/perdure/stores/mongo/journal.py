"""The journal: one log per run and epoch, whose slots are filled one after another.

An entry is a document whose `_id` is its run, epoch and slot. Only the process that was granted the
epoch fills slots from memory, each the one after the last, so an entry costs one insert and nothing
else. Who takes the run over reads the log and puts a *seal* into the first free slot. Of the two,
the index on `_id` lets one through: either the entry came first, then the seal's insert fails and
the log is read again, entry and all; or the seal did, then the entry's insert fails and its writer
learns that it is fenced. No transaction is needed, and no reader ever counts what lies behind a
seal.

A writer goes by memory only for a few minutes after it last heard of its lease (`TRUST`), and
looks at the run again after that. Seals of logs that no longer count stay for a day.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from perdure.clock import Clock
from perdure.store import Entry
from perdure.stores.mongo.documents import DOCUMENT_ROOM, pack, unpack
from perdure.stores.mongo.schema import Collections, insert

TRUST = timedelta(minutes=5)
SEALS_STAY = timedelta(days=1)
_MANY_POSITIONS = 10_000
_BATCH = 10_000


class Record(NamedTuple):
    """An entry as the journal has it: packed, if it is large."""

    epoch: int
    n: int
    content: bytes
    packed: bool
    consumes: Sequence[str] = ()

    def data(self) -> bytes:
        """Return the JSON of the entry."""
        return unpack(self.content) if self.packed else self.content


@dataclass(slots=True)
class Log:
    """One epoch's entries as far as they count, and the first slot after them."""

    epoch: int
    records: list[Record] = field(default_factory=list)
    next: int = 0
    sealed: bool = False

    def holds(self, n: int) -> bool:
        """Tell whether an entry of this number is there."""
        return any(record.n == n for record in self.records)

    @property
    def last(self) -> int:
        """The highest number of an entry, or -1."""
        return max((record.n for record in self.records), default=-1)

    def taken(self) -> set[str]:
        """Give the messages that the entries took."""
        return {id for record in self.records for id in record.consumes}

    def add(self, slot: int, document: Mapping[str, Any]) -> None:
        """Take the next document in the order of slots."""
        self.next = slot + 1
        if "seal" in document:
            self.sealed = True
        elif not self.sealed:
            self.records.append(record_in(document, self.epoch))


def slot_id(run: str, epoch: int, slot: int) -> str:
    """Give the `_id` of a slot; ids hold no NUL, so no run's slots are among another's."""
    return f"{run}\0{epoch:014x}\0{slot:08x}"


def slots_upto(run: str, epoch: int, first: int = 0) -> dict[str, str]:
    """Match the slots of a run from one epoch to another, both included."""
    return {"$gte": f"{run}\0{first:014x}\0", "$lt": f"{run}\0{epoch:014x}\1"}


def slots_of(run: str) -> dict[str, str]:
    """Match all slots of a run."""
    return {"$gte": f"{run}\0", "$lt": f"{run}\1"}


def entry_document(run: str, entry: Entry, slot: int) -> dict[str, Any]:
    """Give the document of an entry."""
    document: dict[str, Any] = {"_id": slot_id(run, entry.epoch, slot), "n": entry.n}
    document.update(content_of(entry))
    return document


def content_of(entry: Entry) -> dict[str, Any]:
    """Give the fields that hold an entry's data and takes."""
    fields: dict[str, Any] = {"data": entry.data}
    if len(entry.data) > DOCUMENT_ROOM:
        what = f"the record of step {entry.step!r} of run {entry.id!r}"
        fields = {"packed": pack(entry.data, what)}
    if entry.consumes:
        fields["takes"] = [*entry.consumes]
    return fields


def record_in(document: Mapping[str, Any], epoch: int) -> Record:
    """Give the entry that a document holds."""
    packed = "packed" in document
    content = document["packed" if packed else "data"]
    return Record(epoch, document["n"], content, packed, document.get("takes", ()))


async def read_logs(db: Collections, expected: Mapping[str, Sequence[int]]) -> dict[str, list[Log]]:
    """Give the logs of runs, of the epochs that are wanted, in one round trip."""
    logs = {run: {epoch: Log(epoch) for epoch in epochs} for run, epochs in expected.items()}
    ranges = [
        {"_id": slots_upto(run, max(epochs), min(epochs))}
        for run, epochs in expected.items()
        if epochs
    ]
    if ranges:
        chosen = ranges[0] if len(ranges) == 1 else {"$or": ranges}
        async for document in db.journal.find(chosen, batch_size=_BATCH).sort("_id"):
            run, epoch, slot = document["_id"].split("\0")
            log = logs[run].get(int(epoch, 16))
            if log is not None:
                log.add(int(slot, 16), document)
    return {run: [*by_epoch.values()] for run, by_epoch in logs.items()}


async def seal_logs(db: Collections, expected: Mapping[str, Sequence[int]]) -> dict[str, list[Log]]:
    """Give the logs as they will stay: from now on nothing is added to them that counts."""
    logs = await read_logs(db, expected)
    while unsealed := [(run, log) for run in logs for log in logs[run] if not log.sealed]:
        seals = [{"_id": slot_id(run, log.epoch, log.next), "seal": True} for run, log in unsealed]
        beaten = await insert(db.journal, seals)
        for place, (_, log) in enumerate(unsealed):
            log.sealed = place not in beaten
        if beaten:
            await _read_again(db, logs, {unsealed[place][0] for place in beaten})
    return logs


async def _read_again(db: Collections, logs: dict[str, list[Log]], runs: Iterable[str]) -> None:
    logs.update(await read_logs(db, {run: [log.epoch for log in logs[run]] for run in runs}))


@dataclass(slots=True)
class Position:
    """Where the next entry of a lease goes, and what its owner knows of the run's mail.

    It is sure while every write made with it was answered. `sealed` tells that logs of earlier
    epochs count, too. `mail` are the untaken messages at the grant, by id, with their names.
    """

    epoch: int
    seen: float
    life: str
    slot: int = 0
    last: int = -1
    sure: bool = True
    sealed: bool = False
    letters: int = 0
    mail: dict[str, str] = field(default_factory=dict)


class Positions:
    """The positions of the leases that were given to this process, by the runs' `_id`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._positions: dict[str, Position] = {}

    def grant(self, run: str, epoch: int, life: str, **known: Any) -> None:
        """Begin with a new lease; one of a later epoch stays."""
        held = self._positions.get(run)
        if held is None or held.epoch < epoch:
            if len(self._positions) >= _MANY_POSITIONS:
                self._forget_old()
            self._positions[run] = Position(epoch, self._clock.monotonic(), life, **known)

    def get(self, run: str, epoch: int) -> Position | None:
        """Give the position of a lease, sure or not."""
        position = self._positions.get(run)
        return position if position is not None and position.epoch == epoch else None

    def sure(self, run: str, epoch: int) -> Position | None:
        """Give the position of a lease if it can be gone by."""
        position = self.get(run, epoch)
        if position is None or not position.sure or self._is_old(position):
            return None
        return position

    def confirm(self, run: str, epoch: int) -> Position | None:
        """Note that the lease was heard of just now."""
        position = self.get(run, epoch)
        if position is not None:
            position.seen = self._clock.monotonic()
        return position

    def forget_mail(self, run: str, epoch: int, ids: Iterable[str]) -> None:
        """Note that messages were taken."""
        position = self.get(run, epoch)
        if position is not None:
            for id in ids:
                position.mail.pop(id, None)

    def drop(self, run: str, epoch: int) -> None:
        """Forget a lease that has ended."""
        if self.get(run, epoch) is not None:
            del self._positions[run]

    def _is_old(self, position: Position) -> bool:
        return self._clock.monotonic() - position.seen > TRUST.total_seconds()

    def _forget_old(self) -> None:
        old = [run for run, position in self._positions.items() if self._is_old(position)]
        for run in old:
            del self._positions[run]
