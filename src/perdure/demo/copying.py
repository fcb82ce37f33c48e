"""Copy runs into another store, each write at its original time."""

from datetime import datetime, timedelta

from perdure import codec
from perdure.snapshot import Snapshot, is_over, new_snapshot
from perdure.store import (
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Rest,
    RunSummary,
    Store,
    can_search,
    require_inbox,
    require_journal,
    require_lease,
    require_schedule,
)
from perdure.stores import MemoryStore
from perdure.testing import TestClock

_TTL = timedelta(hours=1)
_DOCUMENT_TTL = timedelta(hours=49)
_MAX_RUNS = 10_000
_PREFIXES = ("", "~schedule:", "~log:")


async def copy_runs(source: MemoryStore, target: Store, clock: TestClock) -> None:
    """Copy the runs, their inboxes and the documents; advance `clock` to the time of each write.

    The engine uses the store's time, so runs on a database server cannot be executed in the past.
    There, the copies are as old as the call.
    """
    copy, runs = _Copy(source, target), await _runs_in(source)
    writes = [(run.created_at or run.updated_at, copy.create, run) for run in runs]
    writes += [(run.updated_at, copy.settle, run) for run in runs]
    for at, write, run in sorted(writes, key=lambda each: each[0]):
        await advance_to(clock, at)
        await write(run)
    await copy.copy_documents()


async def _runs_in(source: MemoryStore) -> list[RunSummary]:
    """Return the runs of users and schedules, and the logs to which children report."""
    pages = [await source.list(prefix=prefix, limit=_MAX_RUNS) for prefix in _PREFIXES]
    return [run for runs in pages for run in runs]


async def advance_to(clock: TestClock, time: datetime) -> None:
    """Advance the clock to a time, unless that time has passed."""
    if (span := time - clock.now()) > timedelta(0):
        await clock.advance(span)


class _Copy:
    """Writes the runs of one store into another."""

    def __init__(self, source: MemoryStore, target: Store) -> None:
        self._source = source
        self._target = target

    async def create(self, run: RunSummary) -> None:
        """Create a run as it was in the beginning."""
        snapshot = await self._load(run)
        metadata = snapshot.get("metadata") or {}
        is_new = run.status == "queued"
        first = new_snapshot(run.workflow, now=run.updated_at, metadata=metadata)
        await require_schedule(self._target, "seed").enqueue(
            [
                NewRun(
                    run.id,
                    run.workflow or "",
                    codec.dumps(snapshot if is_new else first),
                    version=run.version,
                    tags=run.tags,
                    summary=run.summary,
                    queue=run.queue,
                    wake_at=run.wake_at if is_new else None,
                )
            ]
        )

    async def settle(self, run: RunSummary) -> None:
        """Bring a run into its final state, including its inbox."""
        if run.status == "queued":
            return
        request = LeaseRequest(run.id, run.owner or "seed", _TTL)
        [grant] = await require_lease(self._target, "seed").acquire([request])
        assert isinstance(grant, Grant)
        if run.status == "running":
            return
        rest = Rest(run.status, run.wake_at, run.awaits, summary=run.summary)
        entry = Entry(run.id, grant.lease.epoch, 0, codec.dumps(await self._load(run)), rest=rest)
        await require_journal(self._target, "seed").append([entry])
        await self._send(run)

    async def _send(self, run: RunSummary) -> None:
        messages = [
            NewMessage(run.id, each.name, each.payload) for each in await self._source.inbox(run.id)
        ]
        if messages and not is_over(run.status):
            await require_inbox(self._target, "seed").send(messages)

    async def copy_documents(self) -> None:
        """Copy the documents of workers and operators."""
        if can_search(self._target):
            for key in await self._source.documents.keys():
                if (value := await self._source.documents.get(key)) is not None:
                    await self._target.documents.set(key, value, ttl=_DOCUMENT_TTL)

    async def _load(self, run: RunSummary) -> Snapshot:
        snapshot = await self._source.load(run.id)
        assert snapshot is not None
        return snapshot
