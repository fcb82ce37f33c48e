"""How long finished runs are kept, and which of them can be removed."""

from datetime import timedelta

from perdure.clock import Clock
from perdure.insights.model import Retention, RetentionRow, Tally
from perdure.runtime.maintenance import MAINTENANCE, read_input, spans_of
from perdure.runtime.pruning import Kind, Pruner, kinds_of
from perdure.store import SearchStore, Store, can_maintain

COUNTED = 100_000
"""The maximum number of runs counted for each workflow and status."""


async def retention(store: SearchStore, clock: Clock, workflow: str | None = None) -> Retention:
    """Return the policies that workers follow, and how many runs each would remove now."""
    policies_input = read_input(await store.load(MAINTENANCE))
    policies = spans_of(policies_input.policies)
    selected_policies = {name: policies[name] for name in policies if workflow in (None, name)}
    rows = [
        _row(
            kind,
            policies_input.policies[kind.workflow].version,
            await _removable(store, clock, kind),
        )
        for kind in kinds_of(selected_policies)
    ]
    return Retention(tuple(rows), policies_input.looked_at, policies_input.removed)


def _row(kind: Kind, version: int, removable: Tally | None) -> RetentionRow:
    return RetentionRow(kind.workflow, version, kind.status, kind.span, removable)


async def spans_by_workflow(store: Store) -> dict[str, dict[str, timedelta]]:
    """Return how long the runs of each workflow are kept, by status."""
    policies = spans_of(read_input(await store.load(MAINTENANCE)).policies)
    return {
        name: {str(status): span for status, span in spans.items()}
        for name, spans in policies.items()
    }


async def _removable(store: SearchStore, clock: Clock, kind: Kind) -> Tally | None:
    if not can_maintain(store):
        return None
    count = await Pruner(store, clock, {}, clock.now()).count_kind(kind, COUNTED)
    return Tally(count, count == COUNTED)
