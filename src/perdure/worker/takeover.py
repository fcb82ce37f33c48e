"""Find the runs of processes on this machine that no longer exist.

They would otherwise be claimed when their leases expire. A worker may have been started because of
a crash, so it looks for them first.
"""

from collections.abc import AsyncGenerator, Collection

from perdure.durable.owners import is_gone
from perdure.store import RunSummary, ScheduleStore
from perdure.validation import RESERVED

PAGE, MOST_PAGES = 1000, 20
"""The maximum number of running runs that a starting worker checks."""


async def left_behind(
    store: ScheduleStore, workflows: Collection[str]
) -> AsyncGenerator[RunSummary, None]:
    """Yield the runs of these workflows whose owner certainly no longer exists."""
    # The engine's own runs are listed only with their prefix.
    for prefix in ("", RESERVED):
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await store.list(prefix=prefix, status="running", limit=PAGE, after=cursor)
            for run in page:
                if run.workflow in workflows and is_gone(run.owner or ""):
                    yield run
            if len(page) < PAGE:
                break
            cursor = page[-1].cursor
