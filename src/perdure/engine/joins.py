"""Run several branches at once: the implementation of `step.all`, `step.map` and `step.race`."""

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from perdure.clock import isoformat
from perdure.engine.asyncio_internals import arguments_of, flatten, unstarted
from perdure.engine.branches import Branch
from perdure.engine.call import ASKS, StepCall
from perdure.engine.execution import Execution
from perdure.engine.tasks import Task, cancel_and_wait, exception_of
from perdure.engine.unawaited import call_named
from perdure.errors import DriftError
from perdure.result import Ok
from perdure.snapshot import StepRecord
from perdure.snapshot.asks import answer_in
from perdure.snapshot.record import outcome_of

Name: TypeAlias = str | int


@contextmanager
def closed_if_refused(work: Sequence[object]) -> Generator[None]:
    """Close coroutines if the call that would await them is refused."""
    try:
        yield
    except BaseException:
        for each in unstarted(work):
            each.close()
        raise


@call_named("step.all")
async def run_all(
    run: Execution, names: Sequence[str], work: Sequence[Coroutine[Any, Any, Any]]
) -> tuple[Any, ...]:
    """Run each coroutine in its own branch; wait for all, then raise the first failure.

    A branch with an empty name is numbered, like the branch of a task.
    """
    with closed_if_refused(work):
        branch = run.branches.current(run.run_id, "step.all")
    pairs = zip(names, work, strict=True)
    tasks = [branch.child(name).spawn(each) for name, each in pairs]
    await _finish(run, tasks)
    return tuple([task.result() for task in tasks])


async def _finish(run: Execution, tasks: Sequence[Task]) -> None:
    if tasks:
        try:
            await asyncio.wait(tasks)
        finally:
            # In case the caller was cancelled: no branch may outlive the call that started it.
            await run.branches.cancel_and_wait(tasks)


@call_named("step.map")
async def run_each(
    run: Execution, branch: Branch, calls: Sequence[StepCall], concurrency: int, *, collect: bool
) -> list[Any]:
    """Perform the calls of a map, up to `concurrency` at once; return their values in order.

    After a failure, no other call is started. Running calls finish, so that their work is recorded;
    then the first failure is raised. With `collect`, everything runs, and results are returned.
    """
    todo = deque(enumerate(calls))
    values: list[Any] = [None] * len(calls)
    failures: dict[int, Exception] = {}

    async def work() -> None:
        while todo:
            index, call = todo.popleft()
            try:
                values[index] = await run.perform(call)
            except Exception as error:
                # What stopped the run is not a failure of this item.
                if not run.live:
                    raise
                failures[index] = error
                if not collect:
                    # Recorded calls answer without yielding, in order: a replay gets here before it
                    # could start a call that the first run did not.
                    for _, skipped_call in todo:
                        run.find_undo(skipped_call)
                    _skip(run, flatten(todo))
                    todo.clear()

    workers = range(min(concurrency, len(todo)))
    tasks = [branch.child(f"worker{n}").spawn(work()) for n in workers]
    await _finish(run, tasks)
    for task in tasks:
        task.result()
    if collect:
        errors = {index: outcome_of(error) for index, error in failures.items()}
        return [errors.get(index, Ok(value)) for index, value in enumerate(values)]
    if failures:
        raise failures[min(failures)]
    return values


class Racer:
    """A branch of a race: a coroutine, or a function that is called when the branch starts.

    `call` is the call of a step or wait, if the branch consists of nothing else. `waits` are waits
    for events whose values are seen only by the race, not by code of the branch.
    """

    __slots__ = ("branch", "call", "name", "waits", "work")

    def __init__(self, name: Name, branch: Branch, work: Any) -> None:
        self.name = name
        self.branch = branch
        self.work = work
        self.call: StepCall | None = None
        self.waits: Sequence[StepCall] = ()

    def start(self) -> Task:
        """Start the branch."""
        if not inspect.iscoroutine(self.work):
            return self.branch.spawn(self._enter(self.work))
        # Not wrapped in another coroutine: if that was cancelled before it started, this one would
        # never be awaited.
        self._look_at(self.work)
        return self.branch.spawn(self.work)

    async def _enter(self, fn: Callable[[], Any]) -> Any:
        value = fn()
        self._look_at(value)
        return await value if isinstance(value, Awaitable) else value

    def _look_at(self, work: object) -> None:
        self.call = _call_of(work)
        self.waits = list(_waits_of(work))


def _call_of(work: object) -> StepCall | None:
    call = arguments_of(work).get("call")
    return call if isinstance(call, StepCall) else None


def _waits_of(work: Any) -> Iterator[StepCall]:
    call = _call_of(work)
    if call is not None and call.kind == "event":
        yield call
    # Between these calls and the race there is no code of the function that could see an event.
    if getattr(work, "cr_code", None) in (run_all.__code__, race.__code__):
        for each in arguments_of(work).get("work", ()):
            yield from _waits_of(each)


@call_named("step.race")
async def race(
    run: Execution, call: StepCall, names: Sequence[Name], work: Sequence[Any]
) -> tuple[Name, Any]:
    """Run branches until the first has ended, cancel the others, and record the winner.

    The value is not recorded again: a replay starts only the winner, whose steps are answered from
    their records. The record of a failed race contains the failure.
    """
    try:
        parent = call.branch.race_parent(call.call, run.branches.current(run.run_id, call.id))
        branches = [parent.child(name if isinstance(name, str) else "") for name in names]
        racers = [Racer(*each) for each in zip(names, branches, work, strict=True)]
        recorded_call = run.find_record(call)
        if run.replays_only:
            return await _replay_all(run, call, racers, recorded_call)
        if recorded_call is None and run.gated and run.may_only_replay:
            return await _stop(run, call, racers)
        if recorded_call is None:
            try:
                return await _decide(run, call, parent, racers)
            except asyncio.CancelledError:
                _note_unseen(run, racers)
                raise
        winner = (
            None
            if not recorded_call[1]["ok"]
            else _recorded_winner(run, call, racers, *recorded_call)
        )
        if winner is None:
            return await run.answer(call, *recorded_call)  # type: ignore[no-any-return]  # it raises
        _, task = await _first_to_end(run, [winner])
        return winner.name, task.result()
    finally:
        _discard(run, work)


async def _decide(
    run: Execution, call: StepCall, parent: Branch, racers: Sequence[Racer]
) -> tuple[Name, Any]:
    run.begin(call)
    winner, task = await _first_to_end(run, racers)
    # In flight only from here on: while its branches wait, the run may be suspended.
    with run.branches.busy(call):
        answered_racer = _answered_instead(run, winner, racers)
        winner = answered_racer or winner
        call.replaces = {**_unclaimed_below(run, parent), **_unclaimed_by(run, winner, racers)}
        # In the same write as the winner: a replay does not start the losers, so it would not know
        # about their children.
        losers = {racer.branch.path for racer in racers if racer is not winner}
        child_ids = run.history.open_children(losers)
        run.history.cancel_runs(call.wait_id(), child_ids, isoformat(run.clock.now()))
        try:
            value = task.result() if answered_racer is None else _value_of(run, answered_racer)
        except Exception as error:  # noqa: BLE001  # the user's function
            # A retry of the run drops the record of the race, and with it those of these steps. A
            # replay raises the recorded failure, and does not come to them or to these scopes.
            call.failures = [*run.failures_before(error), *run.sagas_before(error)]
            return await run.fail(call, error)  # type: ignore[no-any-return]  # it raises
        await run.succeed(call, _verdict(run, winner))
        return winner.name, value


def _answered_instead(run: Execution, winner: Racer, racers: Iterable[Racer]) -> Racer | None:
    """Return the branch that wins instead, if it is a question that was answered in time.

    The person who answered was told that the answer counts. The function has not seen the result of
    either branch.
    """
    if _is_answered(run, winner):
        return None
    return next((racer for racer in racers if _is_answered(run, racer)), None)


def _is_answered(run: Execution, racer: Racer) -> bool:
    call = racer.call
    if call is None or call.kind not in ASKS:
        return False
    key = run.history.find(call.path, call.call)
    if key is None:
        return False
    record = run.history.get(key)
    answer = answer_in(record)
    return record["ok"] and answer is not None and not answer.get("expired")


def _value_of(run: Execution, racer: Racer) -> Any:
    assert racer.call is not None, "it is a question"
    recorded_call = run.find_record(racer.call)
    assert recorded_call is not None, "it is recorded"
    return run.replay(racer.call, *recorded_call)


async def _stop(run: Execution, call: StepCall, racers: Sequence[Racer]) -> NoReturn:
    """Replay a race in a scope that is closed, as far as the records of its branches go."""
    tasks = [racer.start() for racer in racers]
    try:
        await asyncio.wait(tasks)
    finally:
        await cancel_and_wait(tasks)
    await run.gate(call)
    raise AssertionError("a call that has no record does not get here")


async def _replay_all(
    run: Execution,
    call: StepCall,
    racers: Sequence[Racer],
    recorded_call: tuple[str, StepRecord] | None,
) -> tuple[Name, Any]:
    """Replay all branches of a race, so that they show how their steps are undone.

    The losers are cancelled as they were the first time, and not awaited.
    """
    tasks = {racer.name: racer.start() for racer in racers}
    # Losers are not awaited, and asyncio logs exceptions that are never retrieved.
    for task in tasks.values():
        task.add_done_callback(exception_of)
    try:
        if recorded_call is None:
            await asyncio.wait(tasks.values())
            await run.gate(call)
            raise AssertionError("a call that has no record does not get here")
        if not recorded_call[1]["ok"]:
            return await run.answer(call, *recorded_call)  # type: ignore[no-any-return]  # it raises
        winner = _recorded_winner(run, call, racers, *recorded_call).name
        await asyncio.wait([tasks[winner]])
        return winner, tasks[winner].result()
    finally:
        descendants = run.branches.tasks_below(racer.branch for racer in racers)
        for task in (*tasks.values(), *descendants):
            task.cancel()


async def _first_to_end(run: Execution, racers: Sequence[Racer]) -> tuple[Racer, Task]:
    """Return the first branch to end, with its task; the others were cancelled and have ended.

    If several ended in one iteration of the event loop, it is the first of them in their order.
    Tasks that a branch created are cancelled too, including those that it no longer waits for: a
    replay starts none of those that a loser created, so they must no longer receive events.
    """
    tasks = [racer.start() for racer in racers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        descendants = run.branches.tasks_below(racer.branch for racer in racers)
        await run.branches.cancel_and_wait([*tasks, *descendants])
    pairs = zip(racers, tasks, strict=True)
    return next((racer, task) for racer, task in pairs if task in done)


def _verdict(run: Execution, winner: Racer) -> dict[str, Any]:
    """Return the value of a race's record: the winner, and the key of its record if it has one."""
    call = winner.call
    key = None if call is None else run.history.find(call.path, call.call)
    return {"winner": winner.name} if key is None else {"winner": winner.name, "record": key}


def _recorded_winner(
    run: Execution, call: StepCall, racers: Iterable[Racer], key: str, record: StepRecord
) -> Racer:
    verdict = run.replay(call, key, record)
    name = verdict.get("winner") if isinstance(verdict, dict) else verdict
    for racer in racers:
        if racer.name == name:
            return racer
    names = ", ".join(repr(racer.name) for racer in racers)
    text = (
        f"{call.place()} was won by branch {name!r}, and the function now has the branches "
        f"{names}; use a new id for a changed race, or a new version of the workflow"
    )
    raise run.stop(DriftError(call.call, text, recorded=repr(name), asked=names))


def _discard(run: Execution, work: Sequence[object]) -> None:
    """Close the branches that were not started, and count their records as used."""
    for each in unstarted(work):
        _skip(run, flatten(arguments_of(each).values()))
        each.close()


def _skip(run: Execution, values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, StepCall):
            run.history.skip(value.path, value.call)


def _unclaimed_below(run: Execution, parent: Branch) -> dict[str, bytes]:
    """Return the records of events that branches below `parent` received but never saw.

    A race may cancel a branch while the record of its wait is being written. The record was
    accepted, so the event is consumed, but the function never sees it: the write that records the
    winner also makes it available to the next wait. If the process dies between the two writes, the
    branch is answered from its record, and may win the race instead.
    """
    events, run.unseen_events = run.unseen_events, ()
    unclaimed: dict[str, bytes] = {}
    for branch, call in events:
        if branch.is_below(parent):
            unclaimed |= run.history.mark_unclaimed(call.record_key)
        else:
            run.unseen_events += ((branch, call),)
    return unclaimed


def _note_unseen(run: Execution, racers: Iterable[Racer]) -> None:
    """Remember the events that only a race could have seen, if the race was itself cancelled."""
    for racer in racers:
        for call in racer.waits:
            if (key := run.history.find(call.path, call.call)) is not None:
                call.record_key = key
                run.unseen_events += ((racer.branch, call),)


def _unclaimed_by(run: Execution, winner: Racer, racers: Iterable[Racer]) -> dict[str, bytes]:
    """Return the records of events that losers received, and that only the race could have seen.

    Two waits may end in one iteration of the event loop, especially if a crash left both recorded.
    """
    history, unclaimed = run.history, dict[str, bytes]()
    for call in (call for racer in racers if racer is not winner for call in racer.waits):
        if (key := history.find(call.path, call.call)) is not None:
            unclaimed |= history.mark_unclaimed(key)
    return unclaimed
