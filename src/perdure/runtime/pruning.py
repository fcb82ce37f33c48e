"""Removing finished runs by policy: the logs of a run first, then the run with all that is in it.

Runs are selected and deleted by the store in one step, so that a run that is started again in the
meantime is never hit. What a run has beside itself is removed before: a crash in between leaves a
run without its log, and never a log that a later run of the same id could read. Documents of a run
expire within a day, which is no longer than any run is kept.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

from perdure.clock import Clock
from perdure.retention import FLOOR, Over
from perdure.runtime.ends import LOG, log_owner
from perdure.snapshot import RunStatus, is_over
from perdure.snapshot.tags import parent_tag
from perdure.store import (
    MaintenanceStore,
    Query,
    RunSummary,
    Store,
    can_search,
)

Policies: TypeAlias = Mapping[str, Mapping[Over, timedelta]]
"""How long runs are kept, by workflow and status."""

GRACE = timedelta(minutes=5)
"""How much longer runs are kept than their logs: clocks differ."""

SMALLEST, LARGEST = 10, 1000
"""How many runs are removed at once."""

TARGET = 0.002
"""How many seconds a batch should take: other writers wait for the store about this long."""

SHARE, LARGEST_SHARE = 0.01, 0.16
"""The share of the time that the store may be busy removing runs: in the first hour, so that fewer
than one in a hundred writes waits, and at most. It doubles with each hour that is not enough."""

LONGEST_PAUSE = 10.0
_PAGE = 500


class Kind(NamedTuple):
    """The runs of a workflow that ended in one way, and for how long they are kept."""

    workflow: str
    status: Over
    span: timedelta


class Removed(NamedTuple):
    """How many runs of a kind were removed, or would be."""

    kind: Kind
    runs: int


def kinds_of(policies: Policies) -> list[Kind]:
    """Return what the policies remove; nothing is removed before the floor."""
    return [
        Kind(workflow, status, max(span, FLOOR))
        for workflow, spans in sorted(policies.items())
        for status, span in spans.items()
    ]


class Pace:
    """How many runs to remove next and how long to wait then, from the time that it took before.

    A store that is busy, or slow, answers later: batches become smaller and pauses longer.
    """

    def __init__(self) -> None:
        self.limit = SMALLEST
        self.pause = 0.0

    def took(self, seconds: float, behind: timedelta = timedelta(0)) -> None:
        """Adapt to a batch that took so long, `behind` after the removal began."""
        wanted = self.limit * TARGET / max(seconds, 1e-6)
        self.limit = int(min(max(wanted, self.limit / 2, SMALLEST), self.limit * 2, LARGEST))
        hours = min(max(behind // timedelta(hours=1), 0), 10)
        share = min(SHARE * 2**hours, LARGEST_SHARE)
        self.pause = min(seconds * (1 / share - 1), LONGEST_PAUSE)


class Pruner:
    """Removes the runs that their policies no longer keep, as of the time `now`.

    Runs that become old enough while it works are left for the next time: their logs were not
    looked at.
    """

    def __init__(
        self, store: MaintenanceStore, clock: Clock, policies: Policies, now: datetime
    ) -> None:
        self._store = store
        self._clock = clock
        self._kinds = kinds_of(policies)
        self._now = now

    async def count_kind(self, kind: Kind, limit: int) -> int:
        """Count the runs of a kind that would be removed, up to a limit."""
        return await self._prune(kind, limit, True)

    async def remove_logs(self) -> None:
        """Remove the logs of the runs that are to be removed, and those whose run is gone."""
        spans = {(kind.workflow, kind.status): kind.span for kind in self._kinds}
        async for logs in _pages(self._store, self._now - FLOOR):
            owners = await _owners(self._store, logs)
            for log, owner in zip(logs, owners, strict=True):
                if owner is None or self._is_old(owner, spans):
                    await self._store.delete(log)

    def _is_old(self, run: RunSummary, spans: Mapping[Any, timedelta]) -> bool:
        span = spans.get((run.workflow, run.status))
        return span is not None and run.updated_at < self._now - span

    async def remove(self) -> AsyncGenerator[Removed]:
        """Remove runs in batches, and yield after each; the pauses follow the store's speed."""
        pace = Pace()
        for kind in self._kinds:
            count = limit = 0
            while count == limit:
                await self._clock.sleep(pace.pause)
                began, limit = self._clock.monotonic(), pace.limit
                count = await self._prune(kind, limit)
                pace.took(self._clock.monotonic() - began, self._clock.now() - self._now)
                if count:
                    yield Removed(kind, count)

    async def _prune(self, kind: Kind, limit: int, dry_run: bool = False) -> int:
        # The store counts from its own time: what has passed since `now` is added.
        passed = max(self._clock.now() - self._now, timedelta(0))
        return await self._store.prune(
            kind.span + GRACE + passed,
            status=kind.status,
            workflow=kind.workflow,
            limit=limit,
            dry_run=dry_run,
        )


async def remove_logs_of(store: Store, run_id: str) -> None:
    """Remove the logs of a run that is about to be deleted."""
    if can_search(store):
        query = Query(prefix=LOG, tags=(parent_tag(run_id),))
        while logs := (await store.search(query, _PAGE)).runs:
            for log in logs:
                await store.delete(log.id)


async def remove_old_logs(
    store: Store, statuses: Iterable[RunStatus], workflow: str | None, before: datetime
) -> None:
    """Remove the logs of finished runs that were last updated before a time."""
    chosen = tuple(statuses)
    async for logs in _pages(store, before):
        for log, owner in zip(logs, await _owners(store, logs), strict=True):
            if owner is not None and not _is_chosen(owner, chosen, workflow):
                continue
            if owner is None or owner.updated_at < before:
                await store.delete(log)


def _is_chosen(run: RunSummary, statuses: Sequence[RunStatus], workflow: str | None) -> bool:
    is_wanted = run.status in statuses if statuses else is_over(run.status)
    return is_wanted and workflow in (None, run.workflow)


async def _pages(store: Store, before: datetime) -> AsyncGenerator[list[str]]:
    """Yield the ids of the logs that were created before a time."""
    cursor: str | None = None
    while page := await store.list(prefix=LOG, limit=_PAGE, after=cursor):
        cursor = page[-1].cursor
        if old := [log.id for log in page if (log.created_at or log.updated_at) < before]:
            yield old


async def _owners(store: Store, logs: Sequence[str]) -> list[RunSummary | None]:
    """Return the run that each log belongs to, or `None` if it is gone."""
    ids = [log_owner(await store.load(log)) for log in logs]
    if can_search(store):
        known = [each for each in ids if each]
        found = dict(zip(known, await store.summaries(known), strict=True)) if known else {}
        return [found.get(each) for each in ids]
    return [await _summary(store, each) for each in ids]


async def _summary(store: Store, run_id: str) -> RunSummary | None:
    found = await store.list(prefix=run_id, limit=1000) if run_id else ()
    return next((run for run in found if run.id == run_id), None)
