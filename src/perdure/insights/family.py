"""The runs related to a run: its parent, its children, and the runs it waits for."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.engine.map_runs import FULL
from perdure.insights.model import Children, Parent, Tally
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.runtime.schedule_workflow import SCHEDULE
from perdure.snapshot import Metadata, PendingWait, Snapshot
from perdure.snapshot.tags import parent_tag
from perdure.store import Query, SearchStore

MAX_SHOWN, MAX_EXAMINED = 20, 200
"""How many children are shown, and how many are counted at most."""


class FanOut(msgspec.Struct, frozen=True):
    """The runs that one call of `step.map_runs` started: the prefix of their ids, and how many."""

    base: str
    total: int

    @property
    def log_id(self) -> str:
        """The id of the log to which the runs report their ends."""
        return f"~log:{self.base}"


async def read_parent(store: SearchStore, metadata: Metadata) -> Parent | None:
    """Return the run that started a run, or `None` if none did."""
    reference: Any = metadata.get("parent")
    if not isinstance(reference, Mapping) or not isinstance(reference.get("run"), str):
        return None
    run_id, call = reference["run"], str(reference.get("call") or "")
    (run,) = await store.summaries([run_id])
    return Parent(run_id, call) if run is None else Parent(run_id, call, run.workflow, run.status)


async def read_children(store: SearchStore, run_id: str, redact: Redact) -> Children:
    """Return the newest children of a run."""
    page = await store.search(Query(tags=(parent_tag(run_id),)), MAX_EXAMINED)
    counts = Counter(run.status for run in page.runs)
    is_capped = page.cursor is not None
    return Children(
        tuple(row_of(run, redact) for run in page.runs[:MAX_SHOWN]),
        {status: Tally(number, is_capped) for status, number in counts.most_common()},
    )


def schedule_of(metadata: Metadata) -> str:
    """Return the name of the schedule that started a run, or an empty string."""
    tags: Any = metadata.get("tags")
    name = tags.get(SCHEDULE) if isinstance(tags, Mapping) else None
    return name if isinstance(name, str) else ""


def fan_out(snapshot: Snapshot, wait: PendingWait) -> FanOut | None:
    """Return the runs that a wait of `step.map_runs` waits for, or `None` for other waits."""
    event = wait.get("event", "")
    if not event.startswith(FULL):
        return None
    values: Any = (record.get("value") for record in snapshot["steps"].values())
    for value in values:
        if isinstance(value, Mapping) and value.get("event") == event:
            return FanOut(value["base"], value["of"])
    return None
