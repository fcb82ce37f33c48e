"""Runs that a run starts, and waiting for their ends.

A call is a wait for the end of another run, and the item in the outbox that starts it: one write
makes both durable, and only then the other run exists. Its end arrives as a message.
"""

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Duration, isoformat, parse_duration
from perdure.engine.attempts import NO_STORE
from perdure.engine.call import RunHost, StepCall
from perdure.engine.execution import Execution
from perdure.engine.target import ChildOptions, ChildRuns, Target
from perdure.engine.tasks import Interrupted
from perdure.errors import MissingAbility, PerdureError, RunFailed, StepFailed, StepTimeout
from perdure.result import Ok
from perdure.snapshot import OutboxItem, PendingWait
from perdure.snapshot.record import result_of

T = TypeVar("T")

DONE = "~done:"
"""Begins the names of messages that report the end of a run."""


class RunRef(msgspec.Struct, Generic[T], frozen=True):
    """A run that was started: its id and workflow. `cancels` is whether it ends with its parent.

    `T` is the type of its output, for type checkers.
    """

    id: str
    workflow: str = ""
    cancels: bool = False


def children_of(run: Execution, what: str) -> ChildRuns:
    """Return what makes the runs that this run starts, or raise if it cannot start any."""
    if run.host is None:
        raise MissingAbility(NO_STORE, "schedule", what)
    if run.children is None:
        raise PerdureError(f"{what} needs a Runtime: trigger the function as a workflow")
    return run.children


async def call_run(
    run: Execution,
    call: StepCall,
    host: RunHost,
    target: Target[Any, Any],
    options: ChildOptions,
) -> Any:
    """Start a run, wait for its end, and return its output."""
    found = run.recorded(call)
    if found is not None:
        return await run.answer(call, *found)
    children = children_of(run, "step.call")
    await begin_call(run, call)
    try:
        wait = run.history.waits.get(call.wait_id())
        if wait is None:
            child = children.child_id(call.wait_id(), options)
            wait = _new_wait(run, call, child, cancels=options.on_parent_end == "cancel")
            payload = call.args[0] if call.args else None
            reply_to = {"run": run.run_id, "event": wait.get("event")}
            item = children.new_run(target, payload, child, call.wait_id(), options, reply_to)
            await _open(run, host, wait, item)
        return await _receive_end(run, call, wait, target)
    finally:
        run.branches.end(call)


async def start_run(
    run: Execution, call: StepCall, target: Target[Any, Any], options: ChildOptions
) -> Any:
    """Start a run; the record and the item in the outbox are one write."""
    found = run.recorded(call)
    if found is not None:
        return await run.answer(call, *found)
    children = children_of(run, "step.start")
    await begin_call(run, call)
    try:
        name, payload = call.wait_id(), call.args[0] if call.args else None
        child = children.child_id(name, options)
        item = children.new_run(target, payload, child, name, options)
        if options.run_id is not None and (taken := await _conflict(run, children, item)):
            return await run.fail(call, taken)
        ref: RunRef[Any] = RunRef(child, target.name, options.on_parent_end == "cancel")
        call.run = child
        run.history.put_item(f"start:{name}", item)
        value = await run.succeed(call, ref)
        run.history.add_child(msgspec.to_builtins(ref), call.path)
        return value
    finally:
        run.branches.end(call)


async def _conflict(run: Execution, children: ChildRuns, item: OutboxItem) -> Exception | None:
    try:
        return await children.conflict(item)
    except Exception as error:  # noqa: BLE001  # whatever keeps the run from being read
        raise run.break_off(error) from error.__cause__


async def await_run(
    run: Execution,
    call: StepCall,
    host: RunHost,
    ref: RunRef[Any],
    timeout: Duration | None,
) -> Any:
    """Wait for the end of a run that exists, and return its output."""
    found = run.recorded(call)
    if found is not None:
        return await run.answer(call, *found)
    children = children_of(run, "step.result")
    await begin_call(run, call)
    try:
        wait = run.history.waits.get(call.wait_id())
        if wait is None:
            wait = _new_wait(run, call, ref.id, cancels=False)
            if timeout is not None:
                until = run.clock.now() + parse_duration(timeout, "timeout")
                wait["wakeAt"] = isoformat(until)
            await _open(run, host, wait, {"watch": {"run": ref.id, "event": wait.get("event")}})
        return await _receive_end(run, call, wait, children.known(ref.workflow))
    finally:
        run.branches.end(call)


async def begin_call(run: Execution, call: StepCall) -> None:
    """Begin a call that is more than a function; if the run is being paused, stop here."""
    if run.gated:
        await run.gate(call)
    run.begin(call)
    run.branches.begin(call)


def _new_wait(run: Execution, call: StepCall, run_id: str, *, cancels: bool) -> PendingWait:
    # A name of its own each time: after a retry, the answer to an earlier wait is not the answer.
    event = f"{DONE}{call.wait_id()}:{run.random.getrandbits(48):012x}"
    wait: PendingWait = {"id": call.wait_id(), "kind": "event", "event": event, "run": run_id}
    if cancels:
        wait["cancels"] = True
    wait["since"] = isoformat(run.clock.now())
    return wait


async def _open(run: Execution, host: RunHost, wait: PendingWait, item: OutboxItem) -> None:
    """Make a wait durable together with what brings its answer."""
    run.history.open_wait(wait)
    run.history.put_item(f"wait:{wait['id']}", item)
    try:
        await host.persist()
    except Interrupted:
        give_up(run, wait)
        raise asyncio.CancelledError from None
    except Exception as error:  # noqa: BLE001  # what cannot be stored breaks the run
        raise run.break_off(error) from error.__cause__


def give_up(run: Execution, wait: PendingWait) -> None:
    """End a wait that was cancelled or timed out, and cancel the run that it was for."""
    if run.live:
        run.history.close_wait(wait["id"])
        if wait.get("cancels"):
            at = isoformat(run.clock.now())
            run.history.cancel_runs(wait["id"], [wait.get("run", "")], at)


async def _receive_end(
    run: Execution, call: StepCall, wait: PendingWait, target: Target[Any, Any] | None
) -> Any:
    try:
        answer = await run.spend(wait)
    except asyncio.CancelledError:
        give_up(run, wait)
        raise
    call.run = wait.get("run", "")
    if answer is None:
        give_up(run, wait)
        seconds = run.clock.monotonic() - call.started
        return await run.fail(call, StepTimeout(call.id, seconds))
    call.consumes = (answer.message_id,)
    outcome = codec.loads(answer.payload["outcome"].encode())
    types = codec.NO_TYPES if target is None else target.types
    scope = run.errors if target is None else run.errors.inside((), target.fn)
    result, error = result_of(outcome, call.run, call.return_type, scope, call.error_type, types)
    if isinstance(result, Ok):
        return await run.succeed(call, result.value)
    assert error is not None, "a failure has an exception"
    return await run.fail(call, run_failed(call.run, outcome.get("workflow", ""), error))


def run_failed(run_id: str, workflow: str, error: BaseException) -> RunFailed:
    """Return the exception with which a parent sees that a run failed."""
    about = f"run {run_id!r} of workflow {workflow!r} failed"
    if isinstance(error, StepFailed):
        failed = RunFailed(f"{about}: {error.error!r}", error.error, run_id)
        raised = error.error if isinstance(error.error, BaseException) else None
        failed.__cause__ = error.__cause__ or raised
    else:
        failed = RunFailed(f"{about}: {_reason(error)}", None, run_id)
        failed.__cause__ = error
    return failed


def _reason(error: BaseException) -> str:
    if not isinstance(error, RunFailed):
        return f"{type(error).__name__}: {error}"
    # Only the run that failed first is named: with those in between, the messages of a deep
    # recursion would be longer than its results.
    while isinstance(error.__cause__, RunFailed):
        error = error.__cause__
    return str(error)
