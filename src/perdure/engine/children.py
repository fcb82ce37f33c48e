"""Start child runs, and wait for their ends.

A call consists of a wait for the end of another run, and an outbox item that starts that run. One
write makes both durable, and only then is the other run created. Its end arrives as a message.
"""

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from perdure import codec
from perdure.clock import Duration, add_duration, isoformat
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution
from perdure.engine.host import NO_STORE, Host
from perdure.engine.target import ChildOptions, ChildRuns, Target
from perdure.engine.tasks import Interrupted
from perdure.engine.unawaited import call_named
from perdure.errors import MissingAbility, PerdureError, RunFailed, StepFailed, StepTimeout
from perdure.result import Ok
from perdure.snapshot import OutboxItem, PendingWait
from perdure.snapshot.record import result_of

T = TypeVar("T")

DONE = "~done:"
"""The prefix of the names of messages that report the end of a run."""


class RunRef(msgspec.Struct, Generic[T], frozen=True):
    """A run that was started: its id and workflow.

    `cancels` says that it ends with its parent. `T` is the type of its output, for type checkers.
    """

    id: str
    workflow: str = ""
    cancels: bool = False


def children_of(run: Execution, caller: str) -> ChildRuns:
    """Return the factory of this run's children, or raise if it cannot start any."""
    if run.host is None:
        raise MissingAbility(NO_STORE, "schedule", caller)
    if run.children is None:
        raise PerdureError(f"{caller} needs a Runtime: trigger the function as a workflow")
    return run.children


@call_named("step.call")
async def call_run(
    run: Execution,
    call: StepCall,
    host: Host,
    target: Target[Any, Any],
    options: ChildOptions,
) -> Any:
    """Start a run, wait for its end, and return its output."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    children = children_of(run, "step.call")
    async with run.in_flight(call):
        wait = run.history.waits.get(call.wait_id())
        # Otherwise an earlier activation opened the wait, and its outbox item starts the child.
        if wait is None:
            child = children.child_id(call.wait_id(), options)
            wait = _new_wait(run, call, child, cancels=options.on_parent_end == "cancel")
            payload = call.args[0] if call.args else None
            reply_to = {"run": run.run_id, "event": wait.get("event")}
            item = children.new_run(target, payload, child, call.wait_id(), options, reply_to)
            await _open(run, host, wait, item)
        else:
            _continue(run, call, wait, options.run_id or wait.get("run", ""))
        return await _receive_end(run, call, wait, target)


@call_named("step.start")
async def start_run(
    run: Execution, call: StepCall, target: Target[Any, Any], options: ChildOptions
) -> Any:
    """Start a run; the record and the item in the outbox are one write."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    children = children_of(run, "step.start")
    async with run.in_flight(call):
        name, payload = call.wait_id(), call.args[0] if call.args else None
        child = children.child_id(name, options)
        item = children.new_run(target, payload, child, name, options)
        if options.run_id is not None and (conflict := await _conflict(run, children, item)):
            return await run.fail(call, conflict)
        ref: RunRef[Any] = RunRef(child, target.name, options.on_parent_end == "cancel")
        call.run = child
        # The run may have been stopped during the lookup. It would then start a child without a
        # record of it, and could not cancel it.
        run.check_live(call.id)
        # Before the record is written, so that the same write contains the item.
        run.history.outbox.put(f"start:{name}", item)
        value = await run.succeed(call, ref)
        run.history.children.add(msgspec.to_builtins(ref), call.path)
        return value


async def _conflict(run: Execution, children: ChildRuns, item: OutboxItem) -> Exception | None:
    try:
        return await children.conflict(item)
    except Exception as error:  # noqa: BLE001  # the run cannot be read
        raise run.stop(error) from error.__cause__


@call_named("step.result")
async def await_run(
    run: Execution,
    call: StepCall,
    host: Host,
    ref: RunRef[Any],
    timeout: Duration | None,
) -> Any:
    """Wait for the end of a run that exists, and return its output."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    children = children_of(run, "step.result")
    async with run.in_flight(call):
        wait = run.history.waits.get(call.wait_id())
        if wait is None:
            wait = _new_wait(run, call, ref.id, cancels=False)
            if timeout is not None:
                wait["wakeAt"] = isoformat(add_duration(run.clock.now(), timeout, "timeout"))
            await _open(run, host, wait, {"watch": {"run": ref.id, "event": wait.get("event")}})
        else:
            _continue(run, call, wait, ref.id)
        return await _receive_end(run, call, wait, children.find(ref.workflow))


def _new_wait(run: Execution, call: StepCall, run_id: str, *, cancels: bool) -> PendingWait:
    # A new name each time: after a retry, the answer to an earlier wait must not be used.
    event = f"{DONE}{call.wait_id()}:{run.random.getrandbits(48):012x}"
    wait: PendingWait = {"id": call.wait_id(), "kind": "event", "event": event, "run": run_id}
    if cancels:
        wait["cancels"] = True
    wait["since"] = isoformat(run.clock.now())
    return wait


def _continue(run: Execution, call: StepCall, wait: PendingWait, run_id: str) -> None:
    """Continue the wait for the end of this run that an earlier activation began."""
    run.check_wait(call, wait, {"id": wait["id"], "kind": "event", "run": run_id})
    run.count_from(call, wait.get("since"))


async def _open(run: Execution, host: Host, wait: PendingWait, item: OutboxItem) -> None:
    """Make a wait durable together with the outbox item that leads to its answer."""
    run.history.open_wait(wait)
    run.history.outbox.put(f"wait:{wait['id']}", item)
    try:
        await host.persist()
    except Interrupted as interruption:
        give_up(run, wait)
        raise interruption.plain() from None
    except Exception as error:  # noqa: BLE001  # stops the run
        raise run.stop(error) from error.__cause__


def give_up(run: Execution, wait: PendingWait) -> None:
    """End a wait that was cancelled or timed out, and cancel the run that it waited for."""
    # A run that is being suspended keeps the wait, and finds it when it resumes.
    if run.live:
        run.history.close_wait(wait["id"])
        if wait.get("cancels"):
            at = isoformat(run.clock.now())
            run.history.cancel_runs(wait["id"], [wait.get("run", "")], at)


async def _receive_end(
    run: Execution, call: StepCall, wait: PendingWait, target: Target[Any, Any] | None
) -> Any:
    try:
        answer = await run.perform_wait(wait)
    except asyncio.CancelledError:
        give_up(run, wait)
        raise
    call.run = wait.get("run", "")
    if answer is None:
        give_up(run, wait)
        seconds = run.clock.monotonic() - call.started_at
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
    """Return the exception that a parent sees if a run failed."""
    about = f"run {run_id!r} of workflow {workflow!r} failed"
    if isinstance(error, StepFailed):
        failure = RunFailed(f"{about}: {error.error!r}", error.error, run_id)
        original = error.error if isinstance(error.error, BaseException) else None
        failure.__cause__ = error.__cause__ or original
    else:
        failure = RunFailed(f"{about}: {_reason(error)}", None, run_id)
        failure.__cause__ = error
    return failure


def _reason(error: BaseException) -> str:
    if not isinstance(error, RunFailed):
        return f"{type(error).__name__}: {error}"
    # Only the run that failed first is named: with all runs in between, the messages of a deep
    # recursion would be longer than its results.
    while isinstance(error.__cause__, RunFailed):
        error = error.__cause__
    return str(error)
