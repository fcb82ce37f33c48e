"""The entries of one run in a call of `append`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from perdure.store import Entry
from perdure.stores.mongo.inbox import unconsumed_among
from perdure.stores.mongo.journal import Position, message_name
from perdure.stores.mongo.schema import Collections


@dataclass(slots=True)
class RunBatch:
    """What one call writes for one run, in order; `indexes` are the entries' positions in the call.

    `unconfirmed_rest` is a rest that was sent and may have been written.
    """

    key: str
    entries: list[Entry] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    position: Position | None = None
    incarnation: str = ""
    unconfirmed_rest: Entry | None = None

    @property
    def last(self) -> Entry:
        """The last entry, the only one that may be a rest."""
        return self.entries[-1]

    @property
    def is_delete(self) -> bool:
        """Whether the batch deletes the run."""
        return self.last.rest is not None and self.last.rest.delete

    @property
    def consumes(self) -> list[str]:
        """The messages that the entries consume."""
        return [id for entry in self.entries for id in entry.consumes]

    def keep_messages(self, names: Collection[str]) -> None:
        """Let the last entry consume only messages with these names."""
        consumes = tuple(id for id in self.last.consumes if message_name(id) in names)
        self.entries[-1] = replace(self.last, consumes=consumes)

    def continues(self, position: Position | None) -> bool:
        """Return whether the entries come next in this lease, with a rest only at the end.

        They must not name messages that are not known here: a rest counts what was consumed, and
        other ids do not count.
        """
        if position is None or not all(map(position.knows, map(message_name, self.consumes))):
            return False
        n = position.last_n
        for entry in self.entries:
            rests_early = entry.rest is not None and entry is not self.last
            if entry.epoch != position.epoch or entry.n <= n or rests_early:
                return False
            n = entry.n
        return True


async def drop_unknown_messages(
    db: Collections, batch: RunBatch, run: Mapping[str, Any], position: Position | None
) -> None:
    """Let an entry name only messages of the run that were not consumed before this lease.

    The number of the names is added to the number of consumed messages, so ids of other messages
    and unknown ids must not be among them.
    """
    if names := {*map(message_name, batch.consumes)}:
        known_names = {name for name in names if position and position.knows(name)}
        unconsumed_names = await unconsumed_among(db, run, names - known_names)
        batch.keep_messages(known_names | unconsumed_names)
