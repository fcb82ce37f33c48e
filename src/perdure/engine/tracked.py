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

    __slots__ = ("_stored_names", "changes")

    def __init__(self, values: Mapping[str, V] | None = None) -> None:
        super().__init__(values or {})
        # Shared while empty, because a set takes 200 bytes, and each run has three of these.
        self._stored_names = frozenset(self) if self else _NOTHING
        self.changes: dict[str, V | None] = {}

    def put(self, name: str, value: V) -> V:
        """Add a value, or replace the one with this name."""
        self[name] = self.changes[name] = value
        return value

    def remove(self, name: str) -> V | None:
        """Remove a value, and return it."""
        if name in self._stored_names:
            self.changes[name] = None
        else:
            # It was added and removed between two writes, so the store need not see it.
            self.changes.pop(name, None)
        return self.pop(name, None)

    def take_changes(self) -> Mapping[str, V | None]:
        """Return the changes since the last call, for the next write; `None` means removed.

        A value is written once: an activation that only finds it again writes nothing, and so does
        not count as progress.
        """
        changes = self.changes
        if changes:
            self.changes = {}
            self._stored_names |= changes.keys()
        return changes
