"""Count the open runs of a workflow by version."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from perdure.snapshot import RunStatus
from perdure.store import Query, SearchStore

EXAMINED = 10_000
"""The maximum number of open runs that are examined."""

_PAGE = 1_000
_LIVE: tuple[RunStatus, ...] = ("queued", "running", "suspended", "waiting", "paused")


class Versions(msgspec.Struct, frozen=True):
    """The open runs of a workflow, counted by version and status.

    Version 0 stands for runs that no worker has claimed yet: the first one determines the version.
    `capped` means that there are more runs than were counted.
    """

    counts: Mapping[int, Mapping[RunStatus, int]]
    capped: bool = False

    @property
    def totals(self) -> dict[int, int]:
        """How many open runs each version has."""
        return {version: sum(counts.values()) for version, counts in self.counts.items()}


async def count_versions(store: SearchStore, workflow: str) -> Versions:
    """Count the open runs of a workflow from their headers, the most recently updated first."""
    query = Query(statuses=_LIVE, workflows=(workflow,))
    runs_by_version: Counter[tuple[int, RunStatus]] = Counter()
    cursor: str | None = None
    for _ in range(EXAMINED // _PAGE):
        page = await store.search(query, _PAGE, after=cursor)
        runs_by_version.update((run.version, run.status) for run in page.runs)
        if (cursor := page.cursor) is None:
            break
    counts: dict[int, dict[RunStatus, int]] = {}
    for (version, status), count in sorted(runs_by_version.items()):
        counts.setdefault(version, {})[status] = count
    return Versions(counts, capped=cursor is not None)
