"""A run with everything that is known about it, read in two round trips."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from perdure.clock import Clock
from perdure.errors import RunNotFound
from perdure.insights.model import (
    InFlight,
    LimitRow,
    RunRow,
    Tally,
    WorkerRow,
    WorkflowVersions,
)
from perdure.insights.redaction import Redact
from perdure.insights.rows import row_of
from perdure.presence import (
    Switches,
    WorkerPresence,
    read_last_throughput,
    read_switches,
    read_workers,
)
from perdure.runtime.reader import read_report
from perdure.runtime.watching import read_reports
from perdure.snapshot import Snapshot
from perdure.store import Message, RunSummary, SearchStore, can_inbox

INBOX = 100
"""The maximum number of messages of an inbox that are shown."""

LOST_FOR = timedelta(days=1)
"""How long a worker that disappeared is remembered."""

_MAX_CACHED, _LARGEST, _BRIEFLY = 4, 8 * 1024 * 1024, 1.0


class Dependencies(msgspec.Struct, frozen=True):
    """What a run waits for outside itself.

    `child` is a run whose end it waits for, `ended` is how many of the runs that it started with
    `step.map_runs` are over. If the run is due, `limits` are the limits of its queue and key, and
    `runs_ahead` counts the runs of its key that start before it.
    """

    child: "RunState | None" = None
    ended: Tally | None = None
    limits: Sequence[LimitRow] = ()
    runs_ahead: Tally | None = None


class RunState(msgspec.Struct, frozen=True):
    """A run, its inbox, and the workers that could execute it, at one time.

    `is_lost` means that its owner is a worker that disappeared without stopping.
    """

    row: RunRow
    snapshot: Snapshot
    now: datetime
    redact: Redact
    inbox: Sequence[Message] = ()
    workers: Sequence[WorkerPresence] = ()
    switches: Switches = Switches()
    report: Mapping[str, Any] | None = None
    is_lost: bool = False
    dependencies: Dependencies = Dependencies()

    @property
    def owner(self) -> WorkerPresence | None:
        """The live worker that owns the run."""
        owner = self.row.owner
        return next((each for each in self.workers if owner in each.owners), None)

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """The steps of the run that its owner is executing."""
        return () if self.owner is None else in_flight_of(self.owner, self.row.id)

    @property
    def drivers(self) -> list[WorkerPresence]:
        """The live workers that know the run's workflow and version."""
        return [each for each in self.workers if knows(each, self.row.workflow, self.row.version)]


class Snapshots:
    """Loads snapshots, and caches the last few: the pages of one run read it several times."""

    def __init__(self, store: SearchStore) -> None:
        self._store = store
        self._cache: dict[str, tuple[str, Snapshot]] = {}

    async def load(self, run: RunSummary, size: int) -> Snapshot:
        """Return the snapshot of a run that has this summary, or a newer one."""
        revision, snapshot = self._cache.get(run.id, ("", None))
        if snapshot is not None and revision == run.revision:
            return snapshot
        snapshot = await self._store.load(run.id)
        if snapshot is None:
            raise RunNotFound(run.id)
        self._cache.pop(run.id, None)
        self._cache[run.id] = (run.revision, snapshot)
        if size > _LARGEST:
            # Cached only briefly: a page reads a snapshot three times, but it must not fill the
            # memory.
            asyncio.get_running_loop().call_later(_BRIEFLY, self._cache.pop, run.id, None)
        while len(self._cache) > _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return snapshot


async def read_state(
    store: SearchStore, snapshots: Snapshots, run_id: str, redact: Redact, clock: Clock
) -> RunState:
    """Read a run and what is around it, or raise `RunNotFound`."""
    (summary,), inbox, workers, switches = await asyncio.gather(
        store.summaries([run_id]),
        _inbox(store, run_id),
        read_workers(store),
        read_switches(store),
    )
    if summary is None:
        raise RunNotFound(run_id)
    row = row_of(summary, redact)
    is_owned = row.owner is not None
    snapshot, reports, is_lost = await asyncio.gather(
        snapshots.load(summary, row.size),
        read_reports(store, [run_id] if is_owned else []),
        _is_lost(store, row, workers, clock.now()),
    )
    report = read_report(reports.get(run_id))
    return RunState(row, snapshot, clock.now(), redact, inbox, workers, switches, report, is_lost)


async def _inbox(store: SearchStore, run_id: str) -> Sequence[Message]:
    return await store.inbox(run_id, limit=INBOX + 1) if can_inbox(store) else ()


async def _is_lost(
    store: SearchStore, row: RunRow, workers: Sequence[WorkerPresence], now: datetime
) -> bool:
    """Return whether the owner is a worker that no longer has a heartbeat.

    A process that executes a run without a worker has no heartbeat either, but is not lost.
    """
    if row.owner is None or any(row.owner in worker.owners for worker in workers):
        return False
    throughput = await read_last_throughput(store, now - LOST_FOR)
    return any(each.owner == row.owner and not each.stopped for each in throughput)


def in_flight_of(worker: WorkerPresence, run_id: str | None = None) -> tuple[InFlight, ...]:
    """Return the steps that a worker is executing, of all runs or of one."""
    return tuple(
        InFlight(
            run_id=step.run_id,
            workflow=step.workflow,
            key=step.key,
            since=step.since,
            attempt=step.attempt,
            next_attempt_at=step.next_attempt_at,
            worker=worker.id,
        )
        for step in worker.steps
        if run_id is None or step.run_id == run_id
    )


def knows(worker: WorkerPresence, workflow: str | None, version: int) -> bool:
    """Return whether a worker can execute the runs of a workflow and version; 0 is any version."""
    return any(
        each.workflow == workflow and (not version or each.first <= version <= each.last)
        for each in worker.workflows
    )


def worker_row(worker: WorkerPresence) -> WorkerRow:
    """Return a live worker as of its last heartbeat."""
    return WorkerRow(
        id=worker.id,
        state="draining" if worker.draining else "live",
        host=worker.host,
        pid=worker.pid,
        started_at=worker.started_at,
        seen_at=worker.seen_at,
        perdure=worker.perdure,
        python=worker.python,
        workflows=tuple(
            WorkflowVersions(each.workflow, each.first, each.last) for each in worker.workflows
        ),
        queues=worker.queues,
        slots=worker.slots,
        running=worker.running,
        counters=worker.counters,
        in_flight=in_flight_of(worker),
    )
