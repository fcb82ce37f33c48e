"""The run that the calling code belongs to."""

from perdure.engine.branches import Branch, branches_of
from perdure.engine.execution import Execution
from perdure.engine.step import Step
from perdure.engine.tasks import POSITION
from perdure.errors import PerdureError, RunOver


def current() -> Step | None:
    """Return the handle of the run that the calling code belongs to; `None` outside a run.

    It is the `step` of the workflow function, in any function that it calls, in its branches, and
    in the functions of its steps and their threads. Code of a run that has ended is outside a run.
    """
    branches = branches_of(POSITION.get())
    handle: Step | None = None if branches is None else branches.handle
    return handle


def require_current() -> Step:
    """Return the handle of the run that the calling code belongs to, as `perdure.current` does.

    Raise `PerdureError` outside a run, and `RunOver` if the run has ended.
    """
    if (handle := current()) is not None:
        return handle
    if branches_of(POSITION.get()) is None:
        raise PerdureError(
            "durable.current() was called outside a run: call it in a workflow function, or in a "
            "function that one calls; perdure.current() returns None there"
        )
    raise RunOver("durable.current() was called by code of a run that has ended")


def current_execution() -> Execution | None:
    """Return the execution of the run that the calling code belongs to, or `None` outside a run."""
    position = POSITION.get()
    if type(position) is Branch and position.branches.handle is not None:
        # The usual case, checked first: determining it in general costs a tenth of a step.
        run: Execution = position.branches.handle._run
        return run
    return None if position is None else require_current()._run
