"""How rollbacks affect the verbs that change a run.

The value of an undone step must not answer any call again. So a run that was rolled back continues
from the first undone step, in the next generation, or not at all.
"""

from collections.abc import Sequence

from perdure.clock import isoformat
from perdure.durable.rollback import drop_from, first_to_repeat, repeat_undos
from perdure.errors import Refused
from perdure.runtime.edits import RunEdit
from perdure.runtime.requests import Request
from perdure.snapshot.rollback import (
    UNDO,
    being_undone,
    causes_in,
    last_valid_start,
    undone_by_saga,
)


def check_not_undoing(run: RunEdit, request: Request) -> None:
    """Raise `Refused` while the run is being rolled back."""
    if run.history.rollback is not None and not run.was_over:
        reason = "its steps are being undone; wait until it has ended"
        raise Refused(run.run_id, request.verb, reason)


def check_undo_step(run: RunEdit, request: Request) -> None:
    """Raise `Refused` for a step of a rolled-back run or saga, or for an undo that is not due."""
    is_undone = run.history.rollback is not None
    if not request.step.startswith(UNDO):
        if is_undone:
            reason = "its steps were undone; change its undos, such as '~undo:charge', or retry it"
            raise Refused(run.run_id, request.verb, reason)
        _check_no_saga(run, request)
        return
    key = request.step.removeprefix(UNDO)
    if key not in (run.history.undoable_steps if is_undone else being_undone(run.history.steps())):
        raise Refused(run.run_id, request.verb, f"step {key!r} is not being undone")


def _check_no_saga(run: RunEdit, request: Request) -> None:
    """Raise `Refused` for a failure that ended a saga: its scope is closed, whatever is changed."""
    for record in run.history.steps().values():
        if record.get("kind") == "saga" and request.step in causes_in(record):
            start = undone_by_saga(record)[0]
            reason = (
                f"when {request.step!r} failed, the steps of a saga were undone, from {start!r} "
                "on; rewind the run to that step, or retry the run"
            )
            raise Refused(run.run_id, request.verb, reason)


def check_valid_start(run: RunEdit, request: Request) -> None:
    """Raise `Refused` if a run that continues at a step would keep records of undone steps."""
    start = last_valid_start(run.history.steps(), request.step)
    if start != request.step:
        reason = f"step {start!r} was undone after it; choose that step or an earlier one"
        raise Refused(run.run_id, request.verb, reason)


def continue_rollback(run: RunEdit) -> str:
    """Let a worker retry the undos that failed."""
    keys = repeat_undos(run.history)
    run.continue_run()
    return f"not undone: {', '.join(keys)}"


def start_over(run: RunEdit) -> None:
    """Drop the records of undone steps, which must run again, and all later records."""
    if (start := first_to_repeat(run.history, run.stored_block)) is not None:
        drop_records(run, start)
    # Even if all undone steps belong to scopes whose failures the function handled.
    run.history.rollback = None


def drop_records(run: RunEdit, start: str) -> list[str]:
    """Drop the record of a step and all later records; return their keys."""
    children = run.history.open_children()
    dropped_keys, is_next = drop_from(run.history, start)
    if is_next:
        # In the same generation, the calls would find the same runs again.
        _cancel_dropped(run, children)
    return dropped_keys


def _cancel_dropped(run: RunEdit, children: Sequence[str]) -> None:
    """Cancel the children whose calls were dropped."""
    open_children = set(run.history.open_children())
    dropped_children = [child for child in children if child not in open_children]
    run.history.cancel_runs("~rewind", dropped_children, isoformat(run.now))
