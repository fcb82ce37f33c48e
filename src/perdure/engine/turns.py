"""The order in which recorded calls are answered while undos of a run are not known.

What a branch does with an answer may cancel others: because of a failure in a `TaskGroup`, or of an
exception of its own. The first time, those had come further by then: steps that were recorded
before had been called, and others were being recorded. A replay is faster, so the answers are given
one by one in the order of the records, each when the other branches get no further. Failures come
after what succeeded, then the ends of races, then calls that have no record.
"""

from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum

from perdure.engine.history import History


class Rank(IntEnum):
    """What comes first, whatever was recorded first."""

    SUCCESS = 0
    FAILURE = 1
    RACE = 2
    NEW = 3


class Turns:
    """The calls that wait for their turn.

    `unknown` are the keys of steps whose undo is not known; the owner removes those that are shown.
    """

    __slots__ = ("_expected", "_places", "_unknown", "_waiting")

    def __init__(self, history: History, unknown: set[str]) -> None:
        self._unknown = unknown
        self._places = {key: place for place, key in enumerate(history)} if unknown else {}
        # The first one is the last of the list.
        self._expected = sorted(unknown, key=self._places.__getitem__, reverse=True)
        self._waiting: dict[str, tuple[Rank, int]] = {}

    def __bool__(self) -> bool:
        """Return whether a call waits for its turn."""
        return bool(self._waiting)

    @property
    def matter(self) -> bool:
        """Whether steps are expected to show their undos, or calls wait for their turn."""
        return bool(self._waiting) or self._is_expected_before(len(self._places))

    @property
    def is_early(self) -> bool:
        """Whether a step that was recorded before the next call is expected to show its undo."""
        _, place = min(self._waiting.values())
        return self._is_expected_before(place)

    def _is_expected_before(self, place: int) -> bool:
        expected = self._expected
        while expected and expected[-1] not in self._unknown:
            expected.pop()
        return bool(expected) and self._places[expected[-1]] < place

    @contextmanager
    def wait(self, id: str, rank: Rank, key: str = "") -> Generator[None]:
        """Count a call as waiting; `key` is that of its record."""
        self._waiting[id] = rank, self._places.get(key, len(self._places))
        try:
            yield
        finally:
            del self._waiting[id]

    def next(self) -> str:
        """Return the id of the next call; steps that were recorded before it are not expected any
        more.
        """
        id, (_, place) = min(self._waiting.items(), key=lambda each: each[1])
        while self._is_expected_before(place):
            self._expected.pop()
        return id
