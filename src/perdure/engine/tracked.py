"""Parts of a snapshot that a run changes by name: its waits, its metadata, its outbox."""

from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")

_NOTHING: frozenset[str] = frozenset()


class Tracked(dict[str, V]):
    """Values by name, and what the next write has to say about them.

    A change is durable with the next write of the run, whatever that is for. Code whose next write
    contains the whole run may also assign and delete as in any dict.
    """

    __slots__ = ("_stored", "changed")

    def __init__(self, stored: Mapping[str, V] | None = None) -> None:
        super().__init__(stored or {})
        # Shared while it is empty: a set takes 200 bytes, and each run has three of these.
        self._stored = frozenset(self) if self else _NOTHING
        self.changed: dict[str, V | None] = {}

    def put(self, name: str, value: V) -> V:
        """Add a value, or replace the one that has this name."""
        self[name] = self.changed[name] = value
        return value

    def remove(self, name: str) -> V | None:
        """Remove a value, and return it."""
        if name in self._stored:
            self.changed[name] = None
        else:
            # It came and went between two writes: the store need not learn of it.
            self.changed.pop(name, None)
        return self.pop(name, None)

    def take_changes(self) -> Mapping[str, V | None]:
        """Return what changed since the last call, for the next write; `None` means removed.

        A value is written once: an activation of the run that only finds it again changes nothing,
        and so makes no progress.
        """
        changed = self.changed
        if changed:
            self.changed = {}
            self._stored |= changed.keys()
        return changed
