"""Parts of a snapshot that a run changes by name: its waits, its metadata, its outbox."""

from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")

_NOTHING: frozenset[str] = frozenset()


class Tracked(dict[str, V]):
    """Values by name, and their changes since the last write.

    A change is stored with the next write of the run. Code whose next write contains the whole run
    may also assign and delete as in any dict.
    """

    __slots__ = ("_stored", "changed")

    def __init__(self, stored: Mapping[str, V] | None = None) -> None:
        super().__init__(stored or {})
        # Shared while empty, because a set takes 200 bytes, and each run has three of these.
        self._stored = frozenset(self) if self else _NOTHING
        self.changed: dict[str, V | None] = {}

    def put(self, name: str, value: V) -> V:
        """Add a value, or replace the one with this name."""
        self[name] = self.changed[name] = value
        return value

    def remove(self, name: str) -> V | None:
        """Remove a value, and return it."""
        if name in self._stored:
            self.changed[name] = None
        else:
            # It was added and removed between two writes, so the store need not see it.
            self.changed.pop(name, None)
        return self.pop(name, None)

    def take_changes(self) -> Mapping[str, V | None]:
        """Return the changes since the last call, for the next write; `None` means removed.

        A value is written once: an activation that only finds it again writes nothing, and so does
        not count as progress.
        """
        changed = self.changed
        if changed:
            self.changed = {}
            self._stored |= changed.keys()
        return changed
