"""Whether a branch has recorded work ahead of it.

A branch has recorded work ahead if there are records or open waits of calls that it has not made
yet, or of branches that it has not created yet. Only the order of the program counts, never the
order in which calls of different branches are answered, so a replay finds the same.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from perdure.engine.branches import Branch
from perdure.engine.paths import split_path


class Mark(NamedTuple):
    """A call of a branch, or a branch below it, with a stored record or wait."""

    call: str
    key: str = ""
    is_branch: bool = False


class Ahead:
    """The stored calls by branch, each with the key of its record, if it has one.

    A branch never takes a call back, so marks that it has passed are not checked again: however
    often this is asked, the total cost is linear in the number of marks. Threads may ask too: a
    race between two of them only repeats some work.
    """

    __slots__ = ("_is_asked", "_marks", "_passed_marks")

    def __init__(
        self, stored_calls: Iterable[tuple[str, str, str]], is_asked: Callable[[str], bool]
    ) -> None:
        self._is_asked = is_asked
        marks: dict[str, dict[Mark, None]] = {}
        for path, call, key in stored_calls:
            for branch, mark in _marks(path, Mark(call, key)):
                marks.setdefault(branch, {})[mark] = None
        self._marks = {branch: tuple(each) for branch, each in marks.items()}
        self._passed_marks: dict[str, int] = {}

    def is_before(self, branch: Branch) -> bool:
        """Return whether the branch has stored calls ahead of it."""
        marks = self._marks.get(branch.path, ())
        n = self._passed_marks.get(branch.path, 0)
        while n < len(marks) and self._is_passed(branch, marks[n]):
            n += 1
        self._passed_marks[branch.path] = n
        return n < len(marks)

    def _is_passed(self, branch: Branch, mark: Mark) -> bool:
        if not mark.is_branch:
            return branch.has_called(mark.call) or self._is_asked(mark.key)
        if mark.call.isdecimal():
            return int(mark.call) <= branch.children
        # A branch is named after the call that creates it; the branches of a race have a suffix.
        names = (split_path(part)[1] for part in (mark.call, mark.call.removesuffix(">")))
        return any(branch.has_called(name) for name in names)


def _marks(path: str, mark: Mark) -> Iterator[tuple[str, Mark]]:
    """Yield each branch from this one up to the root, with its mark."""
    yield path, mark
    # What is ahead of a branch is also ahead of its ancestors, until they have created it.
    while path:
        path, _, part = path.rpartition("/")
        yield path, Mark(part, is_branch=True)
