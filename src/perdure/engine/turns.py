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
from typing import NamedTuple

from perdure.engine.asyncio_internals import awaited_future, awaits_first, end_callbacks
from perdure.engine.branches import Branches
from perdure.engine.history import History
from perdure.engine.tasks import Future, Task, current_task
from perdure.validation import RESERVED

_ITERATIONS_PER_LEVEL = 3
"""How many iterations of the event loop a branch may need to notice the end of one below it."""

_QUIET_ITERATIONS, _MOST_ITERATIONS = 5, 100
"""For how many iterations no branch may run before records are no longer waited for. That is
limited, because a function may never become quiet."""


class _Caller(NamedTuple):
    """The branch that makes a call, if it is one, and its task."""

    path: Sequence[str]
    task: Task | None

    def levels_to(self, other: "_Caller") -> tuple[int, int]:
        """Return how many levels up, and then down, it is to another branch."""
        pairs = zip(self.path, other.path, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return len(self.path) - common, len(other.path) - common


class _WaitingCall(NamedTuple):
    """A call that waits for its turn.

    `place` is that of its record; a call without a record comes after the last one.
    """

    place: int
    number: int
    caller: _Caller
    future: Future


class Turns:
    """Lets recorded calls continue in the order of their records, and others after them.

    `_next` is the place of the first record that no call has asked for. `_last` made the recorded
    call that continued last, `_last_callbacks` are called when its task ends, and `_iterations`
    counts those of the event loop since then. `_released` counts calls that may continue, but have
    not done so yet. The records that are left are `_given_up` once a call without a record has
    begun in spite of them.
    """

    __slots__ = (
        "_branches",
        "_given_up",
        "_history",
        "_iterations",
        "_keys",
        "_last",
        "_last_callbacks",
        "_next",
        "_numbers",
        "_places",
        "_quiet_iterations",
        "_released",
        "_waiting_calls",
        "_wants_first",
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
        self._last: _Caller | None = None
        self._last_callbacks: Sequence[object] = ()
        self._wants_first: bool | None = None

    async def wait_to_continue(self, key: str) -> None:
        """Wait until a call may be answered from the record with this key."""
        if (place := self._places.get(key)) is not None:
            self._note(await self._wait(place))

    async def wait_to_begin(self) -> None:
        """Wait until a call without a record may begin."""
        await self._wait(len(self._keys))

    async def _wait(self, place: int) -> _Caller:
        """Wait for the turn of the caller, and return it."""
        task = current_task()
        branch = None if task is None else self._branches.tasks.get(task)
        path = branch.path.split("/") if branch is not None and branch.path else ()
        caller = _Caller(path, task)
        self._pass_used_records()
        is_first = not self._waiting_calls and not self._released and self._is_next(place)
        if not is_first or not self._is_noticed(place, caller):
            await self._wait_for_turn(place, caller)
        return caller

    async def _wait_for_turn(self, place: int, caller: _Caller) -> None:
        loop = asyncio.get_running_loop()
        call = _WaitingCall(place, next(self._numbers), caller, loop.create_future())
        if not self._waiting_calls:
            loop.call_soon(self._tick)
        heappush(self._waiting_calls, call)
        try:
            await call.future
        finally:
            if not call.future.cancelled():
                self._released -= 1

    def _note(self, caller: _Caller) -> None:
        """Remember the caller whose recorded call continues."""
        self._last, self._iterations = caller, 0
        # Now, because a task that has ended has none.
        self._last_callbacks = end_callbacks(caller.task)

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
            self._note(call.caller)

    def _may_continue(self, call: _WaitingCall) -> bool:
        """Return whether the records before that of the call have been used, and noticed."""
        is_next = self._is_next(call.place) or self._is_stuck()
        return is_next and self._is_noticed(call.place, call.caller)

    def _is_next(self, place: int) -> bool:
        """Return whether all records before this place have been asked for, or given up."""
        return place <= self._next or (self._given_up and place == len(self._keys))

    def _is_noticed(self, place: int, caller: _Caller) -> bool:
        """Return whether other branches have noticed what the last recorded call led to."""
        if self._last is None:
            return True
        is_new, up, down = place == len(self._keys), *self._last.levels_to(caller)
        if is_new:
            # A failure may cancel the branch of this call, which then must not begin.
            levels = max(up + down, 1)
        elif caller.task is self._last.task:
            # The next call of the same branch does not have to wait for others.
            levels = 0
        elif end_callbacks(caller.task) == self._last_callbacks:
            # The same join waits for both branches.
            levels = int(self._awaits_first())
        else:
            levels = up + self._awaits_first()
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
