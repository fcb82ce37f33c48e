"""Causes outside a run that keep it from continuing: other runs, and its queue."""

import asyncio
from collections.abc import Sequence

from perdure.clock import Clock
from perdure.errors import PerdureError
from perdure.insights.family import fan_out
from perdure.insights.model import LimitRow, Tally
from perdure.insights.queues import limits_for, runs_ahead
from perdure.insights.state import Dependencies, RunState, Snapshots, read_state
from perdure.snapshot import is_over, open_waits
from perdure.store import SearchStore, can_inbox

MAX_ENDED = 1000
"""The maximum number of ended runs of `step.map_runs` that are counted: each is a message."""


async def read_dependencies(
    store: SearchStore, snapshots: Snapshots, state: RunState, clock: Clock
) -> Dependencies:
    """Read what a run waits for outside itself; nothing if it is being executed, or over."""
    if state.row.owner is not None or is_over(state.row.status):
        return Dependencies()
    child, ended_count, (limits, runs_ahead) = await asyncio.gather(
        _child(store, snapshots, state, clock), _count_ended(store, state), _queue(store, state)
    )
    return Dependencies(child, ended_count, limits, runs_ahead)


async def _child(
    store: SearchStore, snapshots: Snapshots, state: RunState, clock: Clock
) -> RunState | None:
    """Return the first run whose end this run waits for."""
    run_ids = (wait["run"] for wait in open_waits(state.snapshot) if "run" in wait)
    if (run_id := next(run_ids, None)) is None:
        return None
    try:
        return await read_state(store, snapshots, run_id, state.redact, clock)
    except PerdureError:
        # The run may be deleted or unreadable; the waiting run is still shown.
        return None


async def _count_ended(store: SearchStore, state: RunState) -> Tally | None:
    """Return how many of the runs that `step.map_runs` started have ended."""
    fan_outs = (fan_out(state.snapshot, wait) for wait in open_waits(state.snapshot))
    many = next((each for each in fan_outs if each is not None), None)
    if many is None or not can_inbox(store):
        return None
    reports = await store.inbox(many.log_id, limit=MAX_ENDED)
    return Tally(len(reports), len(reports) == MAX_ENDED)


async def _queue(store: SearchStore, state: RunState) -> tuple[Sequence[LimitRow], Tally | None]:
    """Return the limits of the queue of a run that is due, and how many runs come before it."""
    row = state.row
    if not row.queue or row.wake_at is None or row.wake_at > state.now:
        return (), None
    limits = limits_for(store, state.now, row.queue, state.workers, state.switches)
    return await asyncio.gather(limits, runs_ahead(store, state.now, row.queue, row.id))
