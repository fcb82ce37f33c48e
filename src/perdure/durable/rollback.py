"""Undo the steps of a run that failed or was cancelled.

1. A run that is about to end as failed or cancelled, and has steps that can be undone, is stored
   with the mark `execution.rollback` instead: why it ends, and how. It is due at once.
2. Its next owner replays the function to learn how each step is undone: see `engine/replay.py`.
3. Then the undos run, each a recorded step, the step that was recorded last first. They may be
   retried, suspended and continued like any step.
4. The run is stored as the mark says, or as failed with `RollbackFailed`.

| crash after | in the store | continued by |
|---|---|---|
| the failure, the deadline, the request to cancel | no mark | what happened then happens again |
| the mark | a run that is due | its next owner replays and undoes |
| an undo, before its record | the mark | the undo again, with the same idempotency key |
| the record of an undo | the mark and the record | the next undo |
| the last undo | all records | its next owner only stores the end |
"""

from typing import Any

from msgspec.structs import replace

from perdure import codec
from perdure.clock import isoformat
from perdure.durable.host import RunHost
from perdure.durable.lifecycle import Program, run_to_rest
from perdure.durable.outcome import failed_block
from perdure.engine.history import History
from perdure.engine.sagas import describe, describe_all, undo_all
from perdure.engine.step import Step
from perdure.errors import RollbackFailed, StepFailed
from perdure.result import Result
from perdure.snapshot import ExecutionBlock, Rollback, rewinds_of, set_generation
from perdure.snapshot.patches import forget_patches
from perdure.snapshot.record import encode_failure, result_of
from perdure.snapshot.rewind import kept_before
from perdure.snapshot.rollback import (
    UNDO,
    cancelled_at_end,
    first_of,
    last_valid_start,
    led_to_end,
    undone_by_saga,
    undone_outside_sagas,
)
from perdure.store import Rest

Failures = dict[str, Exception]


def end_or_undo(host: RunHost, block: ExecutionBlock, rest: Rest) -> tuple[ExecutionBlock, Rest]:
    """Return how to store a run that ends, or whose steps have to be undone first."""
    history = host.history
    if rest.status == "completed" or history.rollback is not None:
        return block, rest
    if not (keys := history.steps_to_undo()):
        return block, rest
    history.rollback = _mark(block, rest, len(keys), isoformat(host.clock.now()))
    # The mark is durable before any undo begins, so that from then on no owner starts another step.
    history.forget_waits()
    return host.block(state="queued"), Rest("queued", host.clock.now())


def _mark(block: ExecutionBlock, rest: Rest, steps: int, at: str) -> Rollback:
    return {
        "at": at,
        "status": "cancelled" if rest.status == "cancelled" else "failed",
        # As JSON, as the next owner reads it.
        "error": codec.loads(codec.dumps(block.get("error"))),
        "failed": list(block.get("failed", ())),
        "sagas": list(block.get("sagas", ())),
        "steps": steps,
    }


async def roll_back(host: RunHost, program: Program) -> Result[Failures, Any] | None:
    """Undo the steps of a run; return the errors of those that could not be undone.

    Return `None` if the run was suspended or stopped, as `run_to_rest` does.
    """

    async def undo(step: Step) -> Failures:
        return await undo_all(host.execution, host.history.steps_to_undo())

    undo_program = replace(
        program, body=undo, function=program.body, deadline=None, is_function=False
    )
    return await run_to_rest(host, undo_program)


def first_to_repeat(history: History, block: ExecutionBlock) -> str | None:
    """Return the first undone step that must run again, or `None`.

    `block` is the outcome of the run. A scope whose failure the function handled is not repeated.
    """
    steps = history.steps()
    keys = led_to_end(steps, block)
    sagas = {*keys, *cancelled_at_end(steps, keys)}
    undone_keys = [key for saga in sagas for key in undone_by_saga(steps[saga])]
    if history.rollback is not None:
        undone_keys += undone_outside_sagas(steps)
    undone_keys = [key for key in undone_keys if key in steps]
    return last_valid_start(steps, first_of(steps, undone_keys)) if undone_keys else None


def drop_from(history: History, start: str) -> tuple[list[str], bool]:
    """Drop the record of a step and all later ones, but keep events that no wait has received.

    Return their keys, and whether the run enters its next generation because one of them had
    succeeded.
    """
    keys, kept_keys = list(history), set(kept_before(history.steps(), start))
    dropped_keys = [
        key for key in keys if key not in kept_keys and not history.get(key).get("unclaimed")
    ]
    is_next = any(history.get(key)["ok"] for key in dropped_keys)
    if is_next:
        # A successful step will run again, so it needs a new idempotency key: the old one would
        # return the old effect.
        history.metadata["rewinds"] = rewinds_of(history.metadata) + 1
        set_generation(history.metadata, history.generation + 1)
    forget_patches(history.metadata, keys, keys.index(start))
    history.drop(dropped_keys)
    history.forget_waits()
    history.rollback = None
    return dropped_keys, is_next


def repeat_undos(history: History) -> list[str]:
    """Forget failed undos, so that they are tried again; return the keys of their steps."""
    keys = history.steps_to_undo()
    history.drop(UNDO + key for key in keys)
    return keys


def rolled_back(host: RunHost, failures: Failures) -> tuple[ExecutionBlock, Rest]:
    """Return how to store a run after its rollback; `failures` are the failed undos."""
    rollback = host.history.rollback
    assert rollback is not None, "the run is being undone"
    if failures:
        error = _error(host, rollback, failures)
        record = encode_failure(error, host.id, host.execution.errors).record
        return failed_block(host, record, rollback["failed"]), Rest("failed")
    block = failed_block(host, rollback["error"], rollback["failed"], sagas=rollback["sagas"])
    if rollback["status"] == "cancelled":
        block["state"] = "cancelled"
    return block, Rest(rollback["status"])


def _error(host: RunHost, rollback: Rollback, failures: Failures) -> RollbackFailed:
    scope = host.execution.errors
    _, cause = result_of(rollback["error"], "run", lambda: None, scope)
    assert cause is not None, "a run that is undone has not succeeded"
    text = repr(cause.error) if isinstance(cause, StepFailed) else describe(cause)
    error = RollbackFailed(f"run {host.id!r}", text, describe_all(failures))
    error.__cause__ = cause
    return error
