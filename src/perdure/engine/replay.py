"""Replay a function over its records, only to find out how its steps are undone.

An undo is a function, which cannot be stored: it is known once the call of its step is made. So the
replay has to make every recorded call again. What led to a call originally was the answer of
another call, a timeout in the function's own code, or the cancellation of a branch. A replay is
faster than the original execution, and would cancel branches before they are as far as they were.
So it takes one action at a time, and only when no branch can continue:

1. answer the call whose record comes first;
2. let a timeout in a branch expire, or the next timer of the function: time passes only when
   nothing else happens, and then at once;
3. deliver a cancellation, which was held back until then;
4. let a call without a record raise: originally it may have had one, which a retry dropped.

Nothing is recorded and no step begins, so whatever the function does then has no effect.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from perdure.engine.asyncio_internals import (
    awaited_future,
    awaits_only,
    awaits_primitive,
    fire,
    sleeps,
    timers_where,
)
from perdure.engine.branches import branches_of
from perdure.engine.call import SCOPE, StepCall
from perdure.engine.execution import Execution
from perdure.engine.function import run_function
from perdure.engine.patient_task import CancelRequest, PatientTask
from perdure.engine.step import Step
from perdure.engine.tasks import Future, Task, cancel_and_wait, outside_runs
from perdure.errors import RunOver, Suspended
from perdure.snapshot import StepRecord
from perdure.snapshot.rollback import UNDO

LONGEST_AWAIT = timedelta(seconds=1)
"""How long a replay waits for code that awaits no step, no other branch and no timer."""
# Limits, because a function may never become quiet, set timers in a loop, or call a refused step
# again and again.
_PAUSE, _MOST_PAUSES = 0.01, 1000
_QUIET_ITERATIONS = 5
_MOST_ITERATIONS = 100
_MOST_TIMERS = 1000
_MOST_REFUSALS = 10_000


class _WaitingCall(NamedTuple):
    """A call that waits for its answer. `place` is that of its record, or `None` if it has none."""

    call: StepCall
    place: int | None
    scope: Any


class Replay(Execution):
    """One replay: `undos` are the calls found so far, `unknown` the keys of the other steps."""

    __slots__ = (
        "_end_of_replay",
        "_last_waits",
        "_pauses",
        "_places",
        "_refusals",
        "_timers",
        "_waiting_calls",
        "unknown",
    )

    replays_only = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # A late call, in a `finally` block, is harmless here and needs no warning.
        self.gated = self._warned = True
        self.branches.task_class = PatientTask
        keys = self.history.steps_to_undo()
        self.unknown = {key for key in keys if UNDO + key not in self.history}
        self._places = {key: place for place, key in enumerate(self.history)}
        self._waiting_calls: dict[Future, _WaitingCall] = {}
        self._end_of_replay: Future = asyncio.get_running_loop().create_future()
        self._last_waits: list[tuple[Task, Future | None]] = []
        self._pauses, self._timers, self._refusals = _MOST_PAUSES, _MOST_TIMERS, _MOST_REFUSALS

    async def learn(self, body: Callable[[Step], Awaitable[Any]]) -> None:
        """Call the function until all undos are known, or until it cannot continue."""
        # A replay is a run of its own, so its root must not be a branch of another one.
        with outside_runs():
            root = PatientTask(run_function(self, partial(self._replay, body), announce=False))
        try:
            while await self._is_quiet() and self.live and self.unknown and not root.done():
                if not await self._take_action():
                    break
        finally:
            self.stop(Suspended())
            root.hurry()
            await cancel_and_wait([root])

    async def _replay(self, body: Callable[[Step], Awaitable[Any]], step: Step) -> None:
        try:
            await body(step)
        except Exception as error:  # noqa: BLE001  # the failure that ended the run, or another
            self.ended_by = error
        except asyncio.CancelledError:
            if not self.live:
                raise
        # Other branches may not have reached their last record yet.
        await self._end_of_replay

    def stop(self, error: BaseException) -> BaseException:
        """End the replay, and cancel its tasks without delay."""
        self.branches.task_class = None
        for task in self._patient():
            task.hurry()
        return super().stop(error)

    async def answer(self, call: StepCall, key: str, record: StepRecord) -> Any:
        """Return the recorded value, or raise the recorded failure, when it is its turn."""
        # Before waiting, because the call may be cancelled while it waits.
        self.find_undo(call)
        # A single branch makes its calls in the order of the records anyway.
        if len(self.branches.tasks) > 1:
            await self._park(call, self._places.get(key, len(self._places)))
        return self.replay(call, key, record)

    async def gate(self, call: StepCall, *, is_wait: bool = False) -> None:
        """Stop a call without a record until it is cancelled or refused."""
        await self._park(call, None)

    async def _park(self, call: StepCall, place: int | None) -> None:
        self.check_live(call.id)
        future = asyncio.get_running_loop().create_future()
        self._waiting_calls[future] = _WaitingCall(call, place, SCOPE.get())
        try:
            await future
        finally:
            del self._waiting_calls[future]

    def add_undo(self, call: StepCall, key: str) -> None:
        """Remember how a recorded step is undone."""
        super().add_undo(call, key)
        self.unknown.discard(key)

    async def _take_action(self) -> bool:
        """Take the next action; return whether there was one."""
        if self._answer() or await self._changes(self._at_work()):
            return True
        if self._cancel(lambda _, request: request.is_soft) or self._pass_time():
            return True
        if self._cancel(lambda task, _: not awaits_primitive(task)) or self._refuse():
            return True
        return self._cancel(lambda *_: True) or await self._changes(self._patient())

    def _patient(self) -> list[PatientTask]:
        return [task for task in self.branches.tasks if isinstance(task, PatientTask)]

    async def _is_quiet(self) -> bool:
        """Wait until no branch runs; return `False` if that takes too long."""
        # Asyncio calls callbacks between the end of one branch and the wake-up of another.
        quiet = busy = 0
        while quiet < _QUIET_ITERATIONS:
            is_busy = any(awaited_future(task) is None for task in self._live_tasks())
            quiet, busy = (0, busy + 1) if is_busy else (quiet + 1, busy)
            if busy < _MOST_ITERATIONS:
                await self.clock.sleep(0)
            elif await self._pause():
                busy = 0
            else:
                return False
        return True

    def _live_tasks(self) -> list[Task]:
        return [task for task in self.branches.tasks if not task.done()]

    async def _pause(self) -> bool:
        """Wait briefly for code of the function; return `False` at the limit of such waits."""
        self._pauses -= 1
        await self.clock.sleep(_PAUSE)
        return self._pauses > 0

    def _at_work(self) -> list[Task]:
        """Return the tasks that wait for something outside the run, other than a timer."""
        tasks = self._live_tasks()
        known_futures = {*self._waiting_calls, self._end_of_replay}
        others = [task for task in tasks if awaited_future(task) not in known_futures]
        return [task for task in others if not awaits_only(task, tasks) and not sleeps(task)]

    async def _changes(self, tasks: Iterable[Task]) -> bool:
        """Return whether one of these tasks continues within `LONGEST_AWAIT`."""
        waits = [(task, awaited_future(task)) for task in tasks]
        deadline = self.clock.monotonic() + LONGEST_AWAIT.total_seconds()
        # They did not continue the last time: waiting for them again would only take longer.
        if not waits or waits == self._last_waits:
            return False
        while self.clock.monotonic() < deadline and await self._pause():
            if [(task, awaited_future(task)) for task, _ in waits] != waits:
                return True
        self._last_waits = waits
        return False

    def _answer(self) -> bool:
        """Answer the call whose record comes first."""
        answers = {
            f: each.place for f, each in self._waiting_calls.items() if each.place is not None
        }
        future = min((f for f in answers if not f.done()), key=answers.__getitem__, default=None)
        if future is not None:
            future.set_result(None)
        return future is not None

    def _cancel(self, is_wanted: Callable[[PatientTask, CancelRequest], bool]) -> bool:
        """Deliver the first requested cancellation that is wanted."""
        for task in self._patient():
            for request in [*task.requests.values()]:
                if not task.done() and is_wanted(task, request):
                    task.deliver(request)
                    return True
        return False

    def _pass_time(self) -> bool:
        """Fire the next timer of the function's own code."""
        timers = timers_where(lambda position: branches_of(position) is self.branches)
        if not timers or not self._timers:
            return False
        self._timers -= 1
        fire(timers[0])
        return True

    def _refuse(self) -> bool:
        """Let a call without a record raise: what ended the scope around it, or `RunOver`."""
        future = next((f for f in self._waiting_calls if not f.done()), None)
        if future is None or not self._refusals:
            return False
        self._refusals -= 1
        waiting_call, scope = self._waiting_calls[future], self._waiting_calls[future].scope
        while scope is not None and scope.cause is None:
            scope = scope.outer
        text = f"step {waiting_call.call.id!r} does not begin: run {self.run_id!r} is being undone"
        future.set_exception(RunOver(text) if scope is None else scope.cause)
        return True
