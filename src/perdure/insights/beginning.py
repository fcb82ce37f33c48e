"""The beginning of a large value, for pages: to redact megabytes would take seconds."""

from typing import Any

from perdure.insights.model import Json
from perdure.insights.redaction import Path, Redact

MEMBERS = 5000
"""How many members of a value and of what it contains are returned."""


class LongList(list[Json]):
    """The first items of a list with `total` items."""

    total: int


class LongDict(dict[str, Json]):
    """The first items of an object with `total` keys."""

    total: int


def beginning(redact: Redact, value: Json, path: Path) -> Json:
    """Return a redacted value; of a large one its first members, in `LongList` and `LongDict`."""
    return value if redact.is_off else _Reader(redact).read(value, path)


def total_of(value: list[Any] | dict[str, Any]) -> int:
    """Return how many members a list or an object has, including those that were left out."""
    return value.total if isinstance(value, LongList | LongDict) else len(value)


class _Reader:
    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._left = MEMBERS

    def read(self, value: Json, path: Path) -> Json:
        self._left -= 1
        if not isinstance(value, list | dict) or self._redact.hides(path, value):
            return self._redact.value(value, path)
        if isinstance(value, list):
            return self._list(value, path)
        if len(value) == 1 and isinstance(pairs := value.get("~map"), list):
            # The keys of these pairs are redacted like those of an object.
            return self._redact.value({"~map": pairs[: max(self._left, 0)]}, path)
        return self._dict(value, path)

    def _list(self, value: list[Json], path: Path) -> Json:
        items = LongList()
        items.total = len(value)
        for n, item in enumerate(value):
            if self._left <= 0:
                break
            items.append(self.read(item, (*path, str(n))))
        return items

    def _dict(self, value: dict[str, Json], path: Path) -> Json:
        items = LongDict()
        items.total = len(value)
        for key, item in value.items():
            if self._left <= 0:
                break
            items[key] = self.read(item, (*path, key))
        return items
