"""The steps that a run is executing, for display."""

from datetime import datetime, timedelta
from typing import Annotated, TypeAlias

import msgspec

from perdure.clock import parse_iso
from perdure.engine.call import StepCall
from perdure.engine.execution import Execution

Time: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]


class StepInFlight(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step or transaction that is being executed.

    `next_attempt_at` is set while it waits durably for its next attempt.
    """

    run_id: str
    workflow: str
    key: str
    since: Time
    attempt: int = 1
    next_attempt_at: Time | None = None


def steps_in_flight(run: Execution) -> list[StepInFlight]:
    """Return the steps that a run is executing; sleeps and waits for events are not steps."""
    calls = [call for call in run.branches.calls if isinstance(call, StepCall)]
    # A call that is held because the run is being paused has no key yet.
    return [
        _describe(run, call)
        for call in calls
        if call.record_key and call.kind in ("step", "transaction")
    ]


def _describe(run: Execution, call: StepCall) -> StepInFlight:
    since = run.clock.now() - timedelta(seconds=run.clock.monotonic() - call.started_at)
    wait, next_attempt_at = run.history.waits.get(call.wait_id()), None
    if wait is not None and wait["kind"] == "retry" and "wakeAt" in wait:
        next_attempt_at = parse_iso(wait["wakeAt"])
    key = call.record_key
    return StepInFlight(run.run_id, run.workflow, key, since, call.attempt, next_attempt_at)
