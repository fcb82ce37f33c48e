"""One run's part of a call that writes."""

from dataclasses import dataclass, field

from perdure.store import Entry
from perdure.stores.mongo.journal import Position


@dataclass(slots=True)
class Turn:
    """What one call has to write of one run, in order."""

    key: str
    entries: list[Entry] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    position: Position | None = None
    life: str = ""
    sent: Entry | None = None
    """The rest that was sent and may have been written, when that is in doubt."""

    @property
    def last(self) -> Entry:
        """The last entry, which may be a rest."""
        return self.entries[-1]

    def goes_by(self, position: Position | None) -> bool:
        """Tell whether all entries are the next ones of this lease, and a rest the last of them."""
        if position is None:
            return False
        last = position.last
        for entry in self.entries:
            rests_early = entry.rest is not None and entry is not self.last
            if entry.epoch != position.epoch or entry.n <= last or rests_early:
                return False
            last = entry.n
        return True

    def leaves(self) -> bool:
        """Tell whether nothing is to be left of the run."""
        return self.last.rest is not None and self.last.rest.delete

    def consumes(self) -> list[str]:
        """Give all messages that the entries take."""
        return [id for entry in self.entries for id in entry.consumes]
