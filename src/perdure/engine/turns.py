"""The order in which recorded calls of several branches are answered.

Each of them could be answered at once. Branches would then end in the order of their creation, and
a function that depends on which of them ends or fails first, by `asyncio.gather`, `as_completed` or
`wait`, would continue differently than before. So a call waits until the records before its own
have been used, and until the function has noticed what came of them.

Some records are never asked for again: those of a branch that is now cancelled earlier, or of code
that was removed. They are no longer waited for when no branch can continue.
"""

import asyncio
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from perdure.engine.branches import Branches
from perdure.engine.history import History
from perdure.engine.tasks import Future, Task, awaited_future, awaits_first, current_task
from perdure.validation import RESERVED

_ITERATIONS_PER_LEVEL = 3
"""How many iterations of the event loop a branch may need to notice the end of one below it."""

_QUIET_ITERATIONS, _MOST_ITERATIONS = 5, 100
"""For how many iterations no branch may run before records are no longer waited for. That is
limited, because a function may never become quiet."""


class _WaitingCall(NamedTuple):
    """A call that waits for its turn. `level` is how deeply its branch is nested."""

    place: int
    number: int
    level: int
    future: Future


class Turns:
    """Lets recorded calls continue in the order of their records.

    `_next` is the place of the first record that no call has asked for. `_task` and `_level` are
    those of the call that continued last, and `_iterations` counts those of the event loop since
    then. `_answered` counts calls that may continue, but have not done so yet.
    """

    __slots__ = (
        "_answered",
        "_branches",
        "_ended",
        "_history",
        "_iterations",
        "_keys",
        "_level",
        "_next",
        "_numbers",
        "_places",
        "_quiet_iterations",
        "_task",
        "_waiting_calls",
        "_wants_first",
    )

    def __init__(self, history: History, branches: Branches, first: str) -> None:
        self._history = history
        self._branches = branches
        # The engine's own records do not belong to calls of the function.
        self._keys = [
            key
            for key in history
            if key == first or not (key.startswith(RESERVED) or history.is_used(key))
        ]
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._numbers = count()
        self._waiting_calls: list[_WaitingCall] = []
        self._answered = self._next = self._iterations = self._quiet_iterations = 0
        self._task: Task | None = None
        self._level: int | None = None
        self._wants_first: bool | None = None
        self._ended: Future | None = None

    async def wait(self, key: str) -> None:
        """Wait until a call with this record may be answered."""
        place = self._places.get(key)
        if place is None:
            return
        task = current_task()
        branch = None if task is None else self._branches.tasks.get(task)
        level = branch.path.count("/") + 1 if branch is not None and branch.path else 0
        self._pass_used_records()
        is_first = not self._waiting_calls and not self._answered and place < self._next
        # The next call of the same branch does not have to wait until others notice the last one.
        if not is_first or not (task is self._task or self._is_noticed(level)):
            await self._wait_for_turn(place, level)
        self._task, self._level, self._iterations = task, level, 0

    async def ended(self) -> None:
        """Wait until no recorded call waits any longer."""
        while self._waiting_calls:
            if self._ended is None:
                self._ended = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._ended)

    async def _wait_for_turn(self, place: int, level: int) -> None:
        loop = asyncio.get_running_loop()
        call = _WaitingCall(place, next(self._numbers), level, loop.create_future())
        if not self._waiting_calls:
            loop.call_soon(self._tick)
        heappush(self._waiting_calls, call)
        try:
            await call.future
        finally:
            if not call.future.cancelled():
                self._answered -= 1

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
                self._answered += 1
                call.future.set_result(None)
                self._next = max(self._next, call.place + 1)
                self._level, self._iterations, self._quiet_iterations = call.level, 0, 0
        if calls:
            asyncio.get_running_loop().call_soon(self._tick)
        elif self._ended is not None:
            self._ended.set_result(None)
            self._ended = None

    def _may_continue(self, call: _WaitingCall) -> bool:
        """Return whether the records before that of the call have been used, and noticed."""
        return (call.place < self._next or self._is_stuck()) and self._is_noticed(call.level)

    def _is_noticed(self, level: int) -> bool:
        """Return whether branches above this level have noticed what the last call led to."""
        if self._level is None:
            return True
        levels = self._level - level + self._awaits_first()
        return self._iterations >= _ITERATIONS_PER_LEVEL * levels

    def _awaits_first(self) -> bool:
        """Return whether a branch continues as soon as the first of several others has ended."""
        # Once in each iteration of the event loop: there may be thousands of branches.
        if self._wants_first is None:
            futures = {call.future for call in self._waiting_calls}
            tasks = [task for task in self._branches.tasks if awaited_future(task) not in futures]
            self._wants_first = any(awaits_first(task) for task in tasks)
            asyncio.get_running_loop().call_soon(self._forget_first)
        return self._wants_first

    def _forget_first(self) -> None:
        self._wants_first = None

    def _is_stuck(self) -> bool:
        """Return whether no branch will ask for the records that come next."""
        tasks = self._branches.tasks
        is_quiet = all(task.done() or awaited_future(task) is not None for task in tasks)
        self._quiet_iterations = self._quiet_iterations + 1 if is_quiet else 0
        return self._quiet_iterations >= _QUIET_ITERATIONS or self._iterations >= _MOST_ITERATIONS
