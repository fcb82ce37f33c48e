"""Sagas: scopes whose steps are undone if their block fails, and undos, which are steps too.

The rollback of a scope is recorded before its first undo begins. From then on the scope is closed,
even for a replay after a crash: steps in it answer from their records, and a call without a record
does not begin but raises what ended the block. So does the block, whatever else is raised in it.

If the block was cancelled, because its branch lost a race or a sibling failed, such a call waits
instead, until the block is cancelled again as in the original execution.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from perdure import codec
from perdure.engine.branches import Branch
from perdure.engine.call import SCOPE, StepCall, step_call
from perdure.engine.execution import Execution
from perdure.engine.history import History
from perdure.engine.host import NO_STORE
from perdure.engine.invoke import invoke
from perdure.engine.tasks import Interrupted, Task, finish
from perdure.errors import InvalidArgument, MissingAbility, PerdureError, RollbackFailed
from perdure.result import Err
from perdure.retry import Retry
from perdure.snapshot.record import encode_failure, result_of
from perdure.snapshot.rollback import SAGA, UNDO, being_undone

logger = logging.getLogger(__name__)

UNDO_RETRY = Retry(5)
"""How undos are retried by default."""


class Saga:
    """A block whose steps are undone if it raises; the exception then propagates.

    The record of a scope that was undone has the keys of its steps, what ended the block, and the
    keys of the failures, and of the scopes inside it, that led to it.
    """

    def __init__(self, run: Execution, id: str, retry: Retry | None) -> None:
        if run.host is None:
            raise MissingAbility(NO_STORE, "journal", f"step.saga({id!r})")
        branch = run.branches.current(run.run_id, id)
        self._run, self._id = run, id
        self._call = step_call(f"{SAGA}{id}", branch, None, self._roll_back)
        self._call.kind = "saga"
        self._name = self._call.wait_id()
        self._own_retry = retry
        self.outer: Any = None
        self.names: tuple[str, ...] = ()
        self._is_entered = self._is_closing = False
        self._record: dict[str, Any] | None = None
        self._key = ""
        self._older_branches: list[Branch] = []

    async def __aenter__(self) -> None:
        if self._is_entered:
            raise PerdureError(f"the scope of saga {self._id!r} was entered before: make a new one")
        run, self._is_entered = self._run, True
        run.check_live(f"step.saga({self._id!r})")
        self.outer = SCOPE.get()
        outer = () if self.outer is None else self.outer.names
        self.names = (*outer, self._name)
        if (recorded_call := run.find_record(self._call)) is not None:
            self._key, self._record = recorded_call[0], run.replay(self._call, *recorded_call)
            # Only now must each call ask whether its scope is closed; most runs never pay for that.
            run.gated = True
        # Branches that were started before the block are not part of it: they keep running.
        self._older_branches = self._branches_below()
        SCOPE.set(self)

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        SCOPE.set(self.outer)
        run = self._run
        if (error is None and self._record is None) or not run.live:
            # A scope that succeeded is undone only if an enclosing scope, or the run, fails. A run
            # that was stopped is not undone here either: it leaves memory, or is rolled back as a
            # whole.
            return
        if error is None:
            # Only a function that is not deterministic gets here.
            await self._stop_here(self._call)
        if not isinstance(error, Exception | asyncio.CancelledError):
            return
        if run.replays_only:
            await self._replay(error)
            return
        if self._record is None and (self._is_left_to_outer or self._has_nothing_to_undo()):
            return
        was_recorded = self._record is not None
        # Before anything is awaited, so that no branch of the block begins another step.
        self._is_closing = run.gated = True
        # In a separate task: the block may be cancelled repeatedly, which must not interrupt the
        # undos. Its branch has no parent, so that no race cancels it.
        branch = Branch(run.branches, f"{self._name}>", None)
        task = branch.spawn(self._roll_back(error))
        run.rollbacks[task] = None
        task.add_done_callback(run.rollbacks.pop)
        try:
            failures = await finish(task)
        except Interrupted as interruption:
            self._note(error, interruption.answer)
            raise interruption.plain() from None
        self._raise(error, self._note(self._recall(error) if was_recorded else error, failures))

    def _raise(self, error: BaseException, ended_by: BaseException) -> None:
        # A cancellation stays one: code that catches exceptions must not stop it.
        if ended_by is not error and isinstance(error, Exception):
            raise ended_by

    async def _replay(self, error: BaseException) -> None:
        """Let the block end as it did originally, if that is recorded; nothing is undone."""
        if self._record is not None:
            for task in self._tasks():
                task.cancel()
            keys = (key for key in self._record["undoes"] if UNDO + key in self._run.history)
            failures = await undo_all(self._run, keys)
            self._raise(error, self._note(self._recall(error), failures))

    @property
    def retry(self) -> Retry | None:
        """How undos of this scope are retried, if it or an enclosing scope defines that."""
        return self._own_retry or (
            None if self.outer is None else getattr(self.outer, "retry", None)
        )

    @property
    def is_recorded(self) -> bool:
        """Whether the rollback of this scope, or of an enclosing one, is recorded."""
        return self._record is not None or self._is_left_to_outer

    @property
    def _is_left_to_outer(self) -> bool:
        return self.outer is not None and self.outer.is_recorded

    def _has_nothing_to_undo(self) -> bool:
        """Return whether no step was recorded, and none can be: no branch of the block runs."""
        is_running = any(not self._is_older(branch) for branch in self._branches_below())
        return not is_running and not self._run.history.steps_to_undo(self._name)

    @property
    def is_closed(self) -> bool:
        """Whether no call without a record may begin in this scope."""
        is_closed = self._record is not None or self._is_closing
        return is_closed or (self.outer is not None and self.outer.is_closed)

    async def stop(self, call: StepCall) -> None:
        """Prevent a call without a record from beginning if the scope is closed."""
        if self._is_closing and call.kind != "saga":
            # Scopes in branches that are cancelled are undone first.
            await _wait_forever(self._run, call)
        if self._record is not None:
            await self._stop_here(call)
        if self.outer is not None:
            await self.outer.stop(call)

    async def _stop_here(self, call: StepCall) -> None:
        if (cause := self.cause) is None:
            await _wait_forever(self._run, call)
        else:
            raise cause

    @property
    def cause(self) -> Exception | None:
        """What ended the block originally, if that is recorded and was not a cancellation."""
        if self._record is None or self._record.get("cause") is None:
            return None
        cause: Any = self._record["cause"]
        _, error = result_of(cause, self._id, lambda: None, self._run.errors)
        assert isinstance(error, Exception), "what ended a block is an exception"
        return error

    def _recall(self, error: BaseException) -> BaseException:
        """Return what ended the block originally.

        If several branches fail, another one may be first in a replay.
        """
        assert self._record is not None, "the scope is closed"
        run, failed_keys = self._run, self._record.get("failed", ())
        if run.failures_before(error) == failed_keys or (cause := self.cause) is None:
            return error
        if not failed_keys:
            return cause
        first = run.failures.setdefault(failed_keys[0], cause)
        if describe(first) == describe(cause):
            return first
        cause.__cause__ = first
        return cause

    async def _roll_back(self, error: BaseException) -> dict[str, Exception]:
        """Undo the steps of the scope; return the errors of those that could not be undone."""
        run = self._run
        # Before the steps to undo are determined: a cancelled branch still finishes its write.
        await run.branches.cancel_and_wait(self._tasks())
        if self._record is None:
            if not run.history.steps_to_undo(self._name):
                return {}
            self._record = await self._decide(error)
        return await undo_all(run, self._record["undoes"])

    def _branches_below(self) -> list[Branch]:
        """Return the branches that the branch of the block has started, and those below them."""
        tasks = self._run.branches.tasks_below([self._call.branch])
        return [self._run.branches.tasks[task] for task in tasks]

    def _tasks(self) -> list[Task]:
        """Return the tasks that the block has started, and those below them."""
        tasks = self._run.branches.tasks
        own = [branch for branch in self._branches_below() if not self._is_older(branch)]
        return [task for task in tasks if tasks[task] in own]

    def _is_older(self, branch: Branch) -> bool:
        """Return whether a branch, or one of its ancestors, was started before the block."""
        return any(branch is old or branch.is_below(old) for old in self._older_branches)

    async def _decide(self, error: BaseException) -> dict[str, Any]:
        """Record the rollback of the scope, and its reason."""
        run, call = self._run, self._call
        async with run.in_flight(call):
            value = {
                "undoes": run.history.steps_to_undo(self._name),
                "cause": self._encode(error),
                "failed": run.failures_before(error),
                "sagas": run.sagas_before(error),
            }
            decision: dict[str, Any] = await run.succeed(call, value)
            self._key = call.record_key
            return decision

    def _encode(self, error: BaseException) -> Any:
        """Encode what ended the block; `None` if the block was cancelled."""
        if not isinstance(error, Exception):
            return None
        record = encode_failure(error, self._id, self._run.errors).record
        return codec.loads(codec.dumps(record))

    def _note(self, error: BaseException, failures: dict[str, Exception]) -> BaseException:
        """Return the exception that ends the block: the error, or `RollbackFailed`."""
        if failures:
            rollback_error = RollbackFailed(
                f"saga {self._id!r}", describe(error), describe_all(failures)
            )
            rollback_error.__cause__ = error
            if not isinstance(error, Exception):
                logger.error("run %r: %s", self._run.run_id, rollback_error)
            error = rollback_error
        if self._key:
            self._run.saga_failures[self._key] = error
        return error


async def finish_rollbacks(run: Execution) -> None:
    """Wait until scopes that branches have begun to undo are undone; no branch may await them.

    A run that completes is not undone as a whole, so what they leave would never be undone.
    """
    failures: dict[str, str] = {}
    while True:
        if run.rollbacks:
            await asyncio.wait(list(run.rollbacks))
        # After a crash, a branch may not have come to the end of its scope again, and may never do
        # so: nothing waits for it.
        elif keys := [key for key in _left_by_scopes(run.history) if key not in failures]:
            failures |= describe_all(await undo_all(run, keys))
        else:
            break
    if failures:
        logger.error("run %r: steps of a scope could not be undone: %s", run.run_id, failures)


def _left_by_scopes(history: History) -> list[str]:
    """Return the keys of the steps whose undos are decided on and have not been tried."""
    if not (keys := history.steps_to_undo()):
        return []
    decided_keys = being_undone(history.steps())
    return [key for key in keys if key in decided_keys and UNDO + key not in history]


def check_undo(undo: object) -> Callable[[Any], object]:
    """Return the function that undoes a step, or raise `InvalidArgument`."""
    if not callable(undo):
        raise InvalidArgument("undo", undo, "a function that takes the value of the step")
    return undo


async def _wait_forever(run: Execution, call: StepCall) -> None:
    """Stop the calling branch until it is cancelled."""
    if run.replays_only:
        await run.gate(call)
    await asyncio.Event().wait()


async def undo_all(run: Execution, keys: Iterable[str]) -> dict[str, Exception]:
    """Undo steps in reverse order of recording; return the errors of failed undos."""
    failures: dict[str, Exception] = {}
    wanted_keys = set(keys)
    await _learn(run, wanted_keys)
    for key in reversed([key for key in run.history if key in wanted_keys]):
        try:
            await _undo(run, key)
        except Exception as error:
            if not run.live:
                raise
            failures[key] = error
    return failures


async def _learn(run: Execution, keys: Iterable[str]) -> None:
    """Replay the function if this activation has not reached the calls of all these steps."""
    unknown = [key for key in keys if key not in run.undos and UNDO + key not in run.history]
    if not unknown or run.replays_only:
        return
    assert run.host is not None, "a step with an undo has a host"
    call = step_call("~replay", run.branches.root, None, _learn)
    # In flight, so that the run is not suspended during the replay.
    run.branches.begin(call)
    try:
        undos = await run.host.learn_undos()
    finally:
        run.branches.end(call)
    run.undos = {**undos.calls, **run.undos}
    run.replay_stopped_by = undos.stopped_by


async def _undo(run: Execution, key: str) -> None:
    """Undo a step, unless that is recorded; raise if the undo failed or is unknown."""
    undo = step_call(UNDO + key, run.branches.root, UNDO + key, _undo)
    # The key is not the user's, so no other run may find the record in a cache.
    undo.key, undo.kind, undo.retries = None, "undo", UNDO_RETRY
    # While the end of the function undoes a step, a branch may come to the end of its scope.
    await run.take_key(undo.id)
    try:
        if run.find_record(undo) is None:
            _prepare(run, undo, key)
        await run.perform(undo)
    finally:
        run.free_key(undo.id)


def _prepare(run: Execution, undo: StepCall, key: str) -> None:
    """Let the call of an undo do what the function says; raise if that is unknown."""
    call = run.undos.get(key)
    if call is None or call.undo is None:
        raise run.replay_stopped_by or PerdureError(
            f"the function no longer passes an undo for step {key!r}, or no longer calls it"
        )
    undo.fn, undo.args = _without_value(call.undo), (run.value_of(call, key),)
    undo.errors, undo.retries = call.errors, call.undo_retry or UNDO_RETRY


def _without_value(fn: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return an undo as the function of a step whose value need not be recorded.

    An undo that is cancelled from within, for example by a task that it awaits, has failed.
    """

    @wraps(fn)
    async def undo(value: Any) -> Any:
        task = asyncio.current_task()
        requests = 0 if task is None else task.cancelling()
        try:
            result = await invoke(fn, (value,))
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > requests:
                raise
            raise PerdureError("the undo was cancelled, and not by its run") from error
        return result if isinstance(result, Err) else None

    return undo


def describe(error: BaseException) -> str:
    """Return the class and message of an error."""
    return f"{codec.class_name(type(error))}: {error}".removesuffix(": ")


def describe_all(failures: dict[str, Exception]) -> dict[str, str]:
    """Describe the errors of failed undos, by the keys of their steps."""
    return {key: describe(error) for key, error in failures.items()}
