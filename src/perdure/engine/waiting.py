"""Waits for a time or an event, and the start of the next generation."""

import asyncio
from typing import Any, NoReturn

from perdure import codec
from perdure.clock import isoformat
from perdure.engine.call import SCOPE, StepCall, step_call
from perdure.engine.execution import Execution
from perdure.engine.host import Received
from perdure.engine.sagas import finish_rollbacks
from perdure.engine.unawaited import call_named
from perdure.errors import CodecError, PerdureError
from perdure.snapshot import PendingWait

UNCLAIMED = "record:"
"""The prefix of the message id of an event that is kept in a record, not in the inbox."""


@call_named("step.sleep")
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
    new, wait = wait, run.open_wait(call, wait)
    if wait is new:
        wait["since"] = isoformat(run.clock.now())
    else:
        run.count_from(call, wait.get("since"))
    with run.branches.busy(call):
        # The wait is closed before the record is encoded, so that one write ends and records it.
        answer = await run.perform_wait(wait)
        if answer is None:
            await run.succeed(call, None)
            return default
        return await _receive(run, call, wait.get("event", ""), answer)


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


@call_named("step.continue_as_new")
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
        await run.gate(step_call("~continue", branch, None, continue_as_new))
    data = run.encode_input(payload)
    if run.history.undoable_steps:
        await finish_rollbacks(run)
    run.begin_again(data)
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the run is unwound by a cancellation")
