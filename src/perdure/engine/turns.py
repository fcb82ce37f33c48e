"""The order in which the calls of several branches continue in a run that is resumed.

Each recorded call could be answered at once. Branches would then end in the order of their
creation, and a function that depends on which of them ends or fails first, by `asyncio.gather`,
`as_completed` or `wait`, would continue differently than before. So a call waits until the records
before its own have been used, and until the function has noticed what came of them. A call without
a record waits for all of them.

Some records are never asked for again: those of a branch that is now cancelled earlier, or of code
that was removed. They are no longer waited for when no branch can continue.
"""

import asyncio
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import NamedTuple, TypeAlias

from perdure.engine.asyncio_internals import awaited_future
from perdure.engine.branches import Branches
from perdure.engine.history import History
from perdure.engine.tasks import Future, current_task
from perdure.validation import RESERVED

_ITERATIONS_PER_LEVEL = 3
"""How many iterations of the event loop code may need to notice the end of a branch."""

_QUIET_ITERATIONS, _MOST_ITERATIONS = 5, 100
"""For how many iterations no branch may run before records are no longer waited for. That is
limited, because a function may never become quiet."""


Path: TypeAlias = Sequence[str]
"""The numbers of a branch and of those around it, from the outside in; none for the function."""


class _WaitingCall(NamedTuple):
    """A call that waits for its turn, of the branch with this `path`.

    `place` is that of its record; a call without a record comes after the last one.
    """

    place: int
    number: int
    path: Path
    future: Future


class Turns:
    """Lets recorded calls continue in the order of their records, and others after them.

    `_next` is the place of the first record that no call has asked for. `_last` is the branch of
    the recorded call that continued last, and `_iterations` counts those of the event loop since
    then. `_released` counts calls that may continue, but have not done so yet. The records that are
    left are `_given_up` once a call without a record has begun in spite of them.
    """

    __slots__ = (
        "_branches",
        "_given_up",
        "_history",
        "_iterations",
        "_keys",
        "_last",
        "_next",
        "_numbers",
        "_places",
        "_quiet_iterations",
        "_released",
        "_waiting_calls",
    )

    def __init__(self, history: History, branches: Branches) -> None:
        self._history = history
        self._branches = branches
        # The engine's own records do not belong to calls of the function.
        self._keys = [
            key for key in history if not (key.startswith(RESERVED) or history.is_used(key))
        ]
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._numbers = count()
        self._waiting_calls: list[_WaitingCall] = []
        self._released = self._next = self._iterations = self._quiet_iterations = 0
        self._given_up = False
        self._last: Path | None = None

    async def wait_to_continue(self, key: str) -> None:
        """Wait until a call may be answered from the record with this key."""
        if (place := self._places.get(key)) is not None:
            self._note(await self._wait(place))

    async def wait_to_begin(self) -> None:
        """Wait until a call without a record may begin."""
        await self._wait(len(self._keys))

    async def _wait(self, place: int) -> Path:
        """Wait for the turn of the calling branch, and return its path."""
        task = current_task()
        branch = None if task is None else self._branches.tasks.get(task)
        path = branch.path.split("/") if branch is not None and branch.path else ()
        self._pass_used_records()
        is_first = not self._waiting_calls and not self._released and self._is_next(place)
        if not is_first or not self._is_noticed(place, path):
            await self._wait_for_turn(place, path)
        return path

    async def _wait_for_turn(self, place: int, path: Path) -> None:
        loop = asyncio.get_running_loop()
        call = _WaitingCall(place, next(self._numbers), path, loop.create_future())
        if not self._waiting_calls:
            loop.call_soon(self._tick)
        heappush(self._waiting_calls, call)
        try:
            await call.future
        finally:
            if not call.future.cancelled():
                self._released -= 1

    def _note(self, path: Path) -> None:
        """Remember the branch whose recorded call continues."""
        self._last, self._iterations = path, 0

    def _pass_used_records(self) -> None:
        while self._next < len(self._keys) and self._history.is_used(self._keys[self._next]):
            self._next += 1

    def _tick(self) -> None:
        """Let calls continue whose turn it is; called in each iteration of the event loop."""
        self._iterations += 1
        self._pass_used_records()
        calls = self._waiting_calls
        while calls and (calls[0].future.done() or self._may_continue(calls[0])):
            call = heappop(calls)
            # A call that was cancelled in the meantime has no turn.
            if not call.future.done():
                self._release(call)
        if calls:
            asyncio.get_running_loop().call_soon(self._tick)

    def _release(self, call: _WaitingCall) -> None:
        self._released += 1
        call.future.set_result(None)
        if call.place == len(self._keys):
            self._given_up = True
        else:
            self._next = max(self._next, call.place + 1)
            self._quiet_iterations = 0
            self._note(call.path)

    def _may_continue(self, call: _WaitingCall) -> bool:
        """Return whether the records before that of the call have been used, and noticed."""
        is_next = self._is_next(call.place) or self._is_stuck()
        return is_next and self._is_noticed(call.place, call.path)

    def _is_next(self, place: int) -> bool:
        """Return whether all records before this place have been asked for, or given up."""
        return place <= self._next or (self._given_up and place == len(self._keys))

    def _is_noticed(self, place: int, path: Path) -> bool:
        """Return whether other branches have noticed what the last recorded call led to."""
        if self._last is None:
            return True
        levels, down = _levels_between(self._last, path)
        if place == len(self._keys):
            # A failure may cancel the branch of this call, which then must not begin.
            levels += down + 1
        return self._iterations >= _ITERATIONS_PER_LEVEL * levels

    def _is_stuck(self) -> bool:
        """Return whether no branch will ask for the records that come next."""
        tasks = self._branches.tasks
        is_quiet = all(task.done() or awaited_future(task) is not None for task in tasks)
        self._quiet_iterations = self._quiet_iterations + 1 if is_quiet else 0
        return self._quiet_iterations >= _QUIET_ITERATIONS or self._iterations >= _MOST_ITERATIONS


def _levels_between(first: Path, second: Path) -> tuple[int, int]:
    """Return how many levels up, and then down, it is from one branch to another."""
    pairs = zip(first, second, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return len(first) - common, len(second) - common
