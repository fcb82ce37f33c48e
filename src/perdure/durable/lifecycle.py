"""One activation of a run in this process: lease → history → host → run → rest or release.

`durable.run`, idempotency keys and the runtime's driver all use these parts. They differ in which
function runs, and in what happens to the run afterwards.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any, TypeAlias

from perdure.durable.host import RunHost
from perdure.durable.journaled_run import JournaledRun
from perdure.durable.session import Session
from perdure.durable.snapshot_run import SnapshotRun
from perdure.engine.contexts import Activation
from perdure.engine.environment import Environment
from perdure.engine.execution import Execution
from perdure.engine.function import run_function
from perdure.engine.history import History
from perdure.engine.host import Undos
from perdure.engine.middleware import Around, Middleware
from perdure.engine.replay import Replay
from perdure.engine.step import Step
from perdure.engine.tasks import Task, cancel_and_wait, detached, exception_of, outside_runs
from perdure.errors import Cancelled, DeadlinePassed, PerdureError
from perdure.events import Bus
from perdure.result import Err, Result
from perdure.store import Grant, Rest

logger = logging.getLogger(__name__)

Body: TypeAlias = Callable[[Step], Awaitable[Any]]


class Program(Environment, frozen=True, kw_only=True):
    """A function to run over a run's history, and how.

    With `suspend_after` a run whose branches all wait for longer than that leaves memory;
    `always_replay` makes it leave after every step. At the `deadline` it is stopped. `around` is
    called around the function and its steps. The listeners of `bus` are told how it ends if
    `is_function`; otherwise `body` is something else, such as a rollback, and `function` is the
    run's function.
    """

    body: Body
    function: Body | None = None
    random: Random
    bus: Bus | None = None
    deadline: datetime | None = None
    suspend_after: timedelta | None = None
    always_replay: bool = False
    is_function: bool = True
    around: tuple[Middleware, ...] = ()


def open_host(
    session: Session,
    id: str,
    history: History,
    grant: Grant | None,
    now: datetime | None = None,
) -> RunHost:
    """Return the host of a run that was leased, or whose store has no leases.

    `now` overrides the time of the grant if it is later.
    """
    if grant is not None and session.has_journal:
        return JournaledRun(session, history, grant, now)
    return SnapshotRun(session, id, history, grant)


async def save_first(host: RunHost) -> None:
    """Ensure that the run is stored, and its outbox delivered, before anything else.

    A store with a journal already has the run. The outbox may contain items that the previous owner
    did not deliver.
    """
    try:
        await host.persist()
        await host.deliver_rest()
    except BaseException:
        await log_failure(host.release())
        raise


async def rewrite(host: RunHost, *, wake_at: datetime | None = None) -> None:
    """Store a run with its current history, and release it, to be leased again.

    A journal can only add: records that a retry or a migration removed would be back after a crash.
    If this process dies before it leases the run again, a worker finds the run at `wake_at`.
    """
    await host.settle(host.running_block(), Rest("running", wake_at))


async def run_to_rest(host: RunHost, program: Program) -> Result[Any, Any] | None:
    """Run the function until it ends, and return its result.

    Return `None` if the run was suspended or stopped: `host.suspended_waits` has the waits,
    `host.execution.stopped_by` the reason. If the caller is cancelled, the run is released.
    """
    history, emit = host.history, program.bus.publish if program.bus else None
    # By position, because keywords take as long as everything that a new execution does.
    execution = Execution(
        history.name, host.id, history, host.clock, program.random, program, emit, host
    )
    if not host.is_saved:
        await save_first(host)
    # Started before the lease is held: a renewal may bring messages for waits.
    host.start(execution, program.suspend_after, program.always_replay)
    host.session.leases.hold(host)
    timer = None if program.deadline is None else _start_timer(execution, program.deadline)
    task, context = _start_function(execution, host, program)
    try:
        await _end_of(task, context)
    except asyncio.CancelledError:
        # Stopped first, so that the function begins no further step, whatever it catches.
        execution.stop(Cancelled(host.id, "the task that ran it was cancelled"))
        # Ended before the lease is released, so that its steps do not run beside those of the next
        # owner.
        try:
            await execution.branches.cancel_and_wait([task])
        finally:
            await log_failure(host.release())
        raise
    finally:
        if timer is not None:
            timer.cancel()
        await host.close()
    # A stopped run has no result, even if the function caught the error and returned a value.
    if execution.stopped_by is None:
        return Err(_cancelled_itself(host)) if task.cancelled() else task.result()
    if (error := exception_of(task)) is not None:
        logger.debug("run %r unwound with %r", host.id, error)
    return None


def _start_function(execution: Execution, host: RunHost, program: Program) -> tuple[Task, Context]:
    """Start the function in a task of its own; return the task and the context it begins in."""
    body = _with_middleware(execution, host, program)
    with outside_runs():
        # Copied before the function can change it: a replay begins as the run did.
        context = copy_context()
        host.replay = partial(_learn_undos, host, program, context)
        # A separate task, so that a cancellation of the caller does not reach the function before
        # the run is stopped.
        work = run_function(execution, body, announce=program.is_function)
        return host.session.loop.create_task(work), context


def _with_middleware(execution: Execution, host: RunHost, program: Program) -> Body:
    """Return the function, wrapped in its middleware."""
    if not program.around:
        return program.body
    around = host.around = _around(execution, host, program)
    if around.has_steps:
        execution.around = around
    return lambda step: around.run(lambda: program.body(step))


def _around(execution: Execution, host: RunHost, program: Program) -> Around:
    epoch = 0 if host.lease is None else host.lease.epoch
    activation = Activation(epoch, host.takeovers, host.due_at)
    return Around(program.around, execution, activation)


async def _learn_undos(host: RunHost, program: Program, context: Context) -> Undos:
    """Replay the function of a run beside it, in the context in which the run began."""
    replay = Replay(
        workflow=host.history.name,
        run_id=host.id,
        history=host.history.replica(),
        clock=host.clock,
        random=program.random,
        environment=program,
        host=host,
    )
    function = program.function or program.body
    around = _around(replay, host, program)
    body: Body = lambda step: around.run(lambda: function(step))  # noqa: E731  # as above
    task = detached(replay.learn(body), context)
    try:
        await _end_of(task, context)
    finally:
        # The run may have been stopped in the meantime, and must not leave a replay behind.
        await cancel_and_wait([task])
    task.result()
    stopped_by = replay.stopped_by
    return Undos(replay.undos, stopped_by if isinstance(stopped_by, Exception) else None)


def _end_of(task: Task, context: Context) -> asyncio.Future[None]:
    """Return a future for the end of a task; cancelling its waiter does not cancel the task.

    It is set in `context`. Without one, asyncio would copy the current context for the callback.
    """
    end: asyncio.Future[None] = task.get_loop().create_future()
    task.add_done_callback(partial(_set_done, end), context=context)
    return end


def _set_done(end: asyncio.Future[None], _: Task) -> None:
    if not end.done():
        end.set_result(None)


def _start_timer(execution: Execution, deadline: datetime) -> Task | None:
    """Stop the run when its deadline passes, or at once if it has passed."""
    error = DeadlinePassed(execution.run_id, deadline)
    remaining = deadline - execution.clock.now()
    if remaining <= timedelta(0):
        execution.stop(error)
        return None

    async def wait() -> None:
        await execution.clock.sleep(remaining)
        execution.stop(error)

    return detached(wait())


def _cancelled_itself(host: RunHost) -> Cancelled:
    return Cancelled(host.id, "the function cancelled itself")


async def log_failure(work: Awaitable[object]) -> None:
    """Await something that may fail, and log the failure."""
    try:
        await work
    except PerdureError as error:
        logger.warning("%s; the lease will expire", error)
