"""What a branch of a run has yet to come to, of all that is stored of the run.

A branch has recorded work ahead if there are records or open waits of calls that it has not made
yet, or of branches that it has not created yet. Only the order of the program counts, never which
call of which branch happens to answer first: a replay finds the same.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from perdure.engine.branches import Branch, split_path


class Mark(NamedTuple):
    """A call of a branch, or a branch below it, of which something is stored."""

    call: str
    key: str = ""
    is_branch: bool = False


class Ahead:
    """The calls that are stored, by branch: each with the key of its record, if it has one.

    A branch never takes a call back: marks that it has passed are not looked at again, so that
    asking often costs no more than the marks there are. Threads may ask, too: one that counts less
    far than another only repeats its work.
    """

    __slots__ = ("_is_asked", "_marks", "_passed")

    def __init__(
        self, stored: Iterable[tuple[str, str, str]], is_asked: Callable[[str], bool]
    ) -> None:
        self._is_asked = is_asked
        marks: dict[str, dict[Mark, None]] = {}
        for path, call, key in stored:
            for branch, mark in _marks(path, Mark(call, key)):
                marks.setdefault(branch, {})[mark] = None
        self._marks = {branch: tuple(each) for branch, each in marks.items()}
        self._passed: dict[str, int] = {}

    def is_before(self, branch: Branch) -> bool:
        """Return whether the branch has yet to come to something that is stored."""
        marks = self._marks.get(branch.path, ())
        n = self._passed.get(branch.path, 0)
        while n < len(marks) and self._is_passed(branch, marks[n]):
            n += 1
        self._passed[branch.path] = n
        return n < len(marks)

    def _is_passed(self, branch: Branch, mark: Mark) -> bool:
        if not mark.is_branch:
            return branch.has_called(mark.call) or self._is_asked(mark.key)
        if mark.call.isdecimal():
            return int(mark.call) <= branch.children
        # Named after the call that creates it; those of a race have a mark at their end.
        names = (split_path(part)[1] for part in (mark.call, mark.call.removesuffix(">")))
        return any(branch.has_called(name) for name in names)


def _marks(path: str, mark: Mark) -> Iterator[tuple[str, Mark]]:
    """Yield each branch from this one up to the root, with what it has yet to come to."""
    yield path, mark
    while path:
        path, _, part = path.rpartition("/")
        yield path, Mark(part, is_branch=True)
