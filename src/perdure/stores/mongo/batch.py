"""The entries of one run in a call of `append`."""

from dataclasses import dataclass, field

from perdure.store import Entry
from perdure.stores.mongo.journal import Position


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

    def continues(self, position: Position | None) -> bool:
        """Return whether the entries come next in this lease, with a rest only at the end."""
        if position is None:
            return False
        n = position.last_n
        for entry in self.entries:
            rests_early = entry.rest is not None and entry is not self.last
            if entry.epoch != position.epoch or entry.n <= n or rests_early:
                return False
            n = entry.n
        return True
