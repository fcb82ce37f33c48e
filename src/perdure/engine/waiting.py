"""Calls that do more than call a function: waits and transactions."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

from perdure import codec
from perdure.clock import isoformat
from perdure.engine.attempts import attempts
from perdure.engine.call import NO_STORE, SCOPE, Received, RunHost, StepCall
from perdure.engine.execution import Execution
from perdure.engine.records import EncodedRecord
from perdure.engine.sagas import finish_rollbacks
from perdure.engine.tasks import POSITION, Interrupted
from perdure.errors import CodecError, MissingAbility, PerdureError, RunOver
from perdure.result import Err, Ok
from perdure.snapshot import PendingWait

UNCLAIMED = "record:"
"""The prefix of the message id of an event that is kept in a record, not in the inbox."""


async def wait(run: Execution, call: StepCall, wait: PendingWait, default: object = None) -> Any:
    """Perform a sleep or a wait for an event, once, and record its end like a step.

    A wait that timed out returns the default, which is not recorded.
    """
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        value = await run.answer(call, *recorded_call)
        # A fork may have replaced the value of a wait that timed out.
        return default if value is None and "event" not in recorded_call[1] else value
    if run.gated:
        await run.gate(call, is_wait=True)
    run.begin(call)
    new, wait = wait, run.history.open_wait(wait)
    if wait is new:
        wait["since"] = isoformat(run.clock.now())
    else:
        run.count_from(call, wait.get("since"))
    run.branches.begin(call)
    try:
        # The wait is closed before the record is encoded, so that one write ends and records it.
        answer = await run.spend(wait)
        if answer is None:
            await run.succeed(call, None)
            return default
        return await _receive(run, call, wait.get("event", ""), answer)
    finally:
        run.branches.end(call)


async def _receive(run: Execution, call: StepCall, event: str, message: Received) -> Any:
    """Record the event that a wait received, and consume its message in the same write."""
    message_id = message.message_id
    if message_id.startswith(UNCLAIMED):
        key = message_id.removeprefix(UNCLAIMED)
        call.replaces = run.history.claim(key, by=call.record_key)
    else:
        call.consumes = (message_id,)
    try:
        value = as_type(message.payload, call.returns)
    except CodecError as error:
        text = f"the payload of event {event!r} does not fit {call.place()}: {error}"
        return await run.fail(call, CodecError(text))
    call.event = event
    try:
        return await run.succeed(call, value)
    except asyncio.CancelledError:
        if run.history.find(call.path, call.call) is not None:
            # Checked for the branch that executes the wait: a call belongs to the branch that made
            # it, which is not below the race if the call was passed to the race.
            branch = run.branches.current(run.run_id, call.id)
            run.unseen_events += ((branch, call),)
        raise


def as_type(payload: Any, annotation: Any) -> Any:
    """Convert a payload that was sent to a run to this type, or raise `CodecError`."""
    if annotation is None:
        return payload
    data = codec.encode(payload)
    if data is payload:
        return codec.convert(data, annotation)
    # It has tags, so perdure wrote it, and it is not JSON from another source.
    return codec.decode(data, annotation, typed=True)


async def continue_as_new(run: Execution, payload: object) -> NoReturn:
    """Unwind the run as a suspension does; its next generation begins with this payload."""
    if run.encode_input is None:
        raise PerdureError(
            "step.continue_as_new needs a Runtime: trigger the function as a workflow"
        )
    if SCOPE.get() is not None:
        raise PerdureError(
            "step.continue_as_new was called inside the scope of a saga, whose steps could no "
            "longer be undone: leave the block first"
        )
    if run.replays_only:
        branch = run.branches.current(run.run_id, "step.continue_as_new")
        await run.gate(StepCall("~continue", branch, None, continue_as_new, ()))
    data = run.encode_input(payload)
    if run.history.undoable_steps:
        await finish_rollbacks(run)
    run.begin_again(data)
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the run is unwound by a cancellation")


async def transact(run: Execution, call: StepCall) -> Any:
    """Run a step whose writes are committed with its record."""
    recorded_call = run.find_record(call)
    if recorded_call is not None:
        return await run.answer(call, *recorded_call)
    if run.host is None:
        raise MissingAbility(NO_STORE, "transaction", f"step.transaction({call.id!r})")
    async with run.in_flight(call):
        try:
            record = await attempts(run, call, partial(_transact_once, run, run.host, call))
        except Interrupted as interruption:
            run.publish(call, interruption.answer)
            raise asyncio.CancelledError from None
        except Exception as error:  # noqa: BLE001  # the user's function, or what stopped the run
            # In a separate write, because the transaction of the record was rolled back.
            return await run.fail(call, error)
        if isinstance(record, Err):
            return await run.fail(call, record)
        run.publish(call, record)
        if run.host.always_replay:
            await run.host.halt(record.key)
    run.tell_success(call, record)
    return record.value


async def _transact_once(run: Execution, host: RunHost, call: StepCall) -> EncodedRecord | Err[Any]:
    """Return the committed record, or the outcome of the user's function if it failed."""
    try:
        return await host.transact(call, _work(run, call))
    except _RolledBack as rolled_back:
        failure = rolled_back.failure
    except RunOver:
        raise
    except Exception as error:  # noqa: BLE001  # the store: it may or may not have committed
        raise run.stop_unsure(error) from error.__cause__
    if isinstance(failure, Err):
        return failure
    raise failure


def _work(run: Execution, call: StepCall) -> Callable[[Any], Coroutine[Any, Any, EncodedRecord]]:
    async def work(connection: Any) -> EncodedRecord:
        token = POSITION.set(call)
        try:
            if run.around is None:
                value = await call.fn(connection, *call.args)
            else:
                value = await run.around.step(call, partial(call.fn, connection, *call.args))
        except Exception as error:  # the user's function
            raise _RolledBack(error) from error
        finally:
            POSITION.reset(token)
        if isinstance(value, Err):
            raise _RolledBack(value)
        return run.encode(call, value.value if type(value) is Ok else value)

    return work


class _RolledBack(Exception):
    """Carries a failure of the user's function out of the store's transaction."""

    def __init__(self, failure: Exception | Err[Any]) -> None:
        self.failure = failure
