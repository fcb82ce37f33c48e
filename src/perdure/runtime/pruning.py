"""Remove finished runs by policy: first the logs of a run, then the run itself.

The store selects and deletes runs in one step, so a run that is restarted in the meantime is never
deleted. Logs are removed first: a crash in between leaves a run without its log, but never a log
that a later run with the same id could read. Documents of a run expire within a day, and every run
is kept at least that long.
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
"""How much longer runs are kept than their logs, because clocks differ."""

SMALLEST, LARGEST = 10, 1000
"""The number of runs removed at once."""

TARGET = 0.002
"""How many seconds a batch should take: other writers wait for the store about this long."""

SHARE, LARGEST_SHARE = 0.01, 0.16
"""The share of the time that the store may be busy removing runs: at first, so that fewer than one
in a hundred writes waits, and at most."""

DOUBLING = timedelta(hours=3)
"""How long removing runs may take before the share doubles: more runs may end than are removed."""

LONGEST_PAUSE = 10.0
_PAGE = 500


class Kind(NamedTuple):
    """The runs of a workflow that ended with a given status, and how long they are kept."""

    workflow: str
    status: Over
    span: timedelta


class RemovalCount(NamedTuple):
    """How many runs of a kind were removed."""

    kind: Kind
    runs: int


def kinds_of(policies: Policies) -> list[Kind]:
    """Return what the policies remove; no run is removed before `FLOOR`."""
    return [
        Kind(workflow, status, max(span, FLOOR))
        for workflow, spans in sorted(policies.items())
        for status, span in spans.items()
    ]


class Pace:
    """The size of the next batch and the pause after it, adapted to the store's speed.

    If the store is busy or slow, batches become smaller and pauses longer.
    """

    def __init__(self) -> None:
        self.limit = SMALLEST
        self.pause = 0.0

    def adapt(self, seconds: float, elapsed: timedelta = timedelta(0)) -> None:
        """Adapt to a batch that took `seconds`, and ended `elapsed` after the removal began."""
        ideal = self.limit * TARGET / max(seconds, 1e-6)
        self.limit = int(min(max(ideal, self.limit / 2, SMALLEST), self.limit * 2, LARGEST))
        doublings = min(max(elapsed // DOUBLING, 0), 10)
        share = min(SHARE * 2**doublings, LARGEST_SHARE)
        self.pause = min(seconds * (1 / share - 1), LONGEST_PAUSE)


class Pruner:
    """Removes the runs that their policies no longer keep, as of `now`.

    Runs that become old enough in the meantime are left for the next pass: their logs were not
    examined.
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
        """Remove the logs of the runs to remove, and those whose run is gone."""
        spans = {(kind.workflow, kind.status): kind.span for kind in self._kinds}
        async for logs in _pages(self._store, self._now - FLOOR):
            owners = await _owners(self._store, logs)
            for log, owner in zip(logs, owners, strict=True):
                if owner is None or self._is_old(owner, spans):
                    await self._store.delete(log)

    def _is_old(self, run: RunSummary, spans: Mapping[Any, timedelta]) -> bool:
        span = spans.get((run.workflow, run.status))
        return span is not None and run.updated_at < self._now - span

    async def remove(self) -> AsyncGenerator[RemovalCount]:
        """Remove runs in batches, and yield after each; the pauses adapt to the store's speed."""
        pace = Pace()
        for kind in self._kinds:
            count = limit = 0
            while count == limit:
                await self._clock.sleep(pace.pause)
                start, limit = self._clock.monotonic(), pace.limit
                count = await self._prune(kind, limit)
                pace.adapt(self._clock.monotonic() - start, self._clock.now() - self._now)
                if count:
                    yield RemovalCount(kind, count)

    async def _prune(self, kind: Kind, limit: int, dry_run: bool = False) -> int:
        # The store measures age from its own time, so add the time that has passed since `now`.
        elapsed = max(self._clock.now() - self._now, timedelta(0))
        return await self._store.prune(
            kind.span + GRACE + elapsed,
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
    """Remove the logs of finished runs that were last updated before `before`."""
    wanted_statuses = tuple(statuses)
    async for logs in _pages(store, before):
        for log, owner in zip(logs, await _owners(store, logs), strict=True):
            if owner is not None and not _is_chosen(owner, wanted_statuses, workflow):
                continue
            if owner is None or owner.updated_at < before:
                await store.delete(log)


def _is_chosen(run: RunSummary, statuses: Sequence[RunStatus], workflow: str | None) -> bool:
    is_wanted = run.status in statuses if statuses else is_over(run.status)
    return is_wanted and workflow in (None, run.workflow)


async def _pages(store: Store, before: datetime) -> AsyncGenerator[list[str]]:
    """Yield the ids of the logs that were created before `before`."""
    cursor: str | None = None
    while page := await store.list(prefix=LOG, limit=_PAGE, after=cursor):
        cursor = page[-1].cursor
        if old := [log.id for log in page if (log.created_at or log.updated_at) < before]:
            yield old


async def _owners(store: Store, logs: Sequence[str]) -> list[RunSummary | None]:
    """Return the run that each log belongs to, or `None` if it is gone."""
    ids = [log_owner(await store.load(log)) for log in logs]
    if can_search(store):
        owner_ids = [each for each in ids if each]
        summary_by_id = (
            dict(zip(owner_ids, await store.summaries(owner_ids), strict=True)) if owner_ids else {}
        )
        return [summary_by_id.get(each) for each in ids]
    return [await _summary(store, each) for each in ids]


async def _summary(store: Store, run_id: str) -> RunSummary | None:
    page = await store.list(prefix=run_id, limit=1000) if run_id else ()
    return next((run for run in page if run.id == run_id), None)
