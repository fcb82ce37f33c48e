"""Parts of a snapshot that a run changes by name: its waits, its metadata, its outbox."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

V = TypeVar("V")

_UNCHANGED: Any = MappingProxyType({})
"""The changes of everything that has none. It is read-only, and shared by all runs."""


class Tracked(dict[str, V]):
    """Values by name, and their changes since the last write.

    A change is stored with the next write of the run. Code whose next write contains the whole run
    may also assign and delete as in any dict.
    """

    __slots__ = ("_new_names", "changes")

    def __init__(self, values: Mapping[str, V] | None = None) -> None:
        # Without `super().__init__`, because most of these dicts are empty at first.
        if values:
            self.update(values)
        # Both are created by the first change that needs them, because most runs have none.
        self.changes: dict[str, V | None] = _UNCHANGED
        self._new_names: set[str] | None = None

    def put(self, name: str, value: V) -> V:
        """Add a value, or replace the one with this name."""
        if name not in self and name not in self.changes:
            self._new_names = self._new_names or set()
            self._new_names.add(name)
        self._change(name, value)
        self[name] = value
        return value

    def put_all(self, values: Mapping[str, V]) -> None:
        """Add values, or replace those with these names."""
        for name, value in values.items():
            self.put(name, value)

    def remove(self, name: str) -> V | None:
        """Remove a value, and return it."""
        if self._new_names and name in self._new_names:
            # It was added and removed between two writes, so the store need not see it.
            self._new_names.remove(name)
            del self.changes[name]
        elif name in self:
            self._change(name, None)
        return self.pop(name, None)

    def _change(self, name: str, value: V | None) -> None:
        if self.changes is _UNCHANGED:
            self.changes = {}
        self.changes[name] = value

    def take_changes(self) -> Mapping[str, V | None]:
        """Return the changes since the last call, for the next write; `None` means removed.

        A value is written once: an activation that only finds it again writes nothing, and so does
        not count as progress.
        """
        changes, self.changes = self.changes, _UNCHANGED
        self._new_names = None
        return changes
