"""More memory stores with one bug each: in leases, schedule, inbox and maintenance."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from perdure.clock import Clock
from perdure.store import (
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewMessage,
    NewRun,
    Receipt,
    Rest,
    Verdict,
)
from perdure.stores._backend import PruneRequest
from perdure.stores._reading import Granted
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Run, Runs
from tests.stores.mutants import Drives, caught_by


@caught_by("test_another_owners_unexpired_lease_is_never_stolen")
class StealsLeases(MemoryBackend):
    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        run = self._find(request.id)
        if run is not None and request.existing:
            run.owner = None
        return super()._acquire(request, now)


@caught_by("test_existing_false_does_not_fence_the_owner")
class FencesTheOwnerOfAnExistingRun(MemoryBackend):
    def _acquire(self, request: LeaseRequest, now: datetime) -> Granted | None:
        run = self._find(request.id)
        if run is not None and not request.existing:
            run.epoch = next(self.runs.epochs)
        return super()._acquire(request, now)


@caught_by("test_a_granted_run_is_running_until_its_next_rest")
class GrantsWithOldStatus(MemoryBackend):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Granted:
        status = run.status
        grant = super()._grant(run, *arguments, **options)
        run.status = status
        return grant


@caught_by("test_takeovers_are_counted_until_a_rest")
class CountsNoTakeovers(MemoryBackend):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Granted:
        run.takeovers = -1
        return with_takeovers(super()._grant(run, *arguments, **options), 0)


@caught_by("test_an_entry_resets_the_takeovers")
class CountsOwnersThatMadeProgress(MemoryBackend):
    def _grant(self, run: Run, owner: str, now: datetime, *rest: Any, **options: Any) -> Granted:
        takeovers = run.takeovers + run.is_orphaned(now)
        granted = super()._grant(run, owner, now, *rest, **options)
        run.takeovers = takeovers
        return with_takeovers(granted, takeovers)


def with_takeovers(granted: Granted, takeovers: int) -> Grant:
    assert isinstance(granted, Grant)
    return replace(granted, takeovers=takeovers)


@caught_by("test_a_fenced_entry_does_not_reset_the_takeovers")
class ResetsTakeoversForAnyEntry(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None:
            run.takeovers = 0
        return super()._append(entry)


class ChangesTakeoversOnRelease(MemoryBackend):
    """Changes the number of takeovers when a lease is released."""

    def changed(self, takeovers: int) -> int:
        raise NotImplementedError

    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        for run in filter(None, map(self._find_owned, leases)):
            run.takeovers = self.changed(run.takeovers)
        await super().release(leases, wake_at)


@caught_by("test_a_release_neither_counts_nor_resets_takeovers")
class ResetsTakeoversOnRelease(ChangesTakeoversOnRelease):
    def changed(self, takeovers: int) -> int:
        return 0


@caught_by("test_a_release_neither_counts_nor_resets_takeovers")
class CountsReleases(ChangesTakeoversOnRelease):
    def changed(self, takeovers: int) -> int:
        return takeovers + 1


@caught_by("test_a_lease_that_was_taken_over_is_never_renewed")
class RenewsLostLeases(MemoryBackend):
    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._find(lease.id)
        if run is not None:
            run.owner, run.epoch = lease.owner, lease.epoch
        return super()._renew(lease, expires_at)


@caught_by("test_an_expired_lease_is_renewed_until_the_run_is_taken_over")
class RenewsOnlyUnexpiredLeases(MemoryBackend):
    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._find_owned(lease)
        if run is not None and run.is_orphaned(self.clock.now()):
            return None
        return super()._renew(lease, expires_at)


@caught_by("test_releasing_a_lease_that_is_not_current_does_nothing")
class ReleasesAnyLease(MemoryBackend):
    async def release(self, leases: Sequence[Lease], wake_at: datetime | None) -> None:
        for lease in leases:
            run = self._find(lease.id)
            if run is not None:
                run.owner = None
                self._wake(run, wake_at or self.clock.now())


@caught_by("test_enqueue_leaves_an_existing_run_unchanged")
class EnqueuesOverRuns(MemoryBackend):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        self.runs.remove(self.prefix + new.id)
        return super()._enqueue(new, now)


@caught_by("test_due_returns_the_earliest_first")
class SortsDueRunsById(MemoryBackend):
    async def due(
        self, now: datetime, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Due]:
        due = await super().due(now, limit, supports, queues)
        return sorted(due, key=lambda run: run.id, reverse=True)


@caught_by("test_concurrent_claims_share_the_due_runs")
class ClaimsTwice(MemoryBackend):
    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        due = self.runs.index.due(self.clock.now(), limit, supports, queues, self.prefix)
        await asyncio.sleep(0)
        return [self._grant(run, owner, self.clock.now(), ttl) for run in due]


@caught_by("test_claim_is_restricted_to_workflows")
class ClaimsAnyWorkflow(MemoryBackend):
    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        return await super().claim(owner, ttl, limit, None, queues)


@caught_by("test_an_orphaned_run_is_claimed")
class IgnoresOrphans(MemoryBackend):
    async def claim(
        self, owner: str, ttl: timedelta, limit: int, supports: Drives, queues: Mapping[str, int]
    ) -> Sequence[Granted]:
        due = self.runs.index.due(self.clock.now(), limit, supports, queues, self.prefix)
        unowned = [run for run in due if run.owner is None]
        return [self._grant(run, owner, self.clock.now(), ttl) for run in unowned]


@caught_by(
    "test_enqueueing_a_run_sends_a_notification",
    "test_releasing_a_run_sends_a_notification",
    "test_sending_an_awaited_event_sends_a_notification",
    "test_notifications_reach_another_instance",
)
class NotifiesOnceAtFirst(MemoryBackend):
    async def notifications(self) -> AsyncGenerator[None]:
        yield
        await asyncio.get_running_loop().create_future()


@caught_by("test_a_dedup_id_is_a_duplicate_after_its_message_was_consumed")
class ForgetsDedupIds(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        verdict = super()._append(entry)
        run = self._find(entry.id)
        if run is not None and entry.consumes:
            run.dedup_ids.clear()
        return verdict


@caught_by("test_a_fenced_entry_consumes_nothing")
class ConsumesWhenFenced(MemoryBackend):
    def _append(self, entry: Entry) -> Verdict:
        run = self._find(entry.id)
        if run is not None:
            for message_id in entry.consumes:
                run.inbox.pop(message_id, None)
        return super()._append(entry)


@caught_by("test_a_rest_that_awaits_a_message_in_the_inbox_is_due_at_once")
class IgnoresTheInboxAtRest(MemoryBackend):
    def _rest(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        inbox, run.inbox = run.inbox, {}
        super()._rest(run, snapshot, rest)
        run.inbox = inbox


@caught_by("test_an_awaited_event_makes_an_unowned_run_due")
class SendsWithoutWaking(MemoryBackend):
    def _send(self, message: NewMessage) -> Receipt:
        run = self._find(message.to)
        if run is not None:
            run.awaits = ()
        return super()._send(message)


@caught_by("test_messages_are_returned_in_the_order_they_were_sent")
class SortsMessagesByName(MemoryBackend):
    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[Message]:
        return sorted(await super().inbox(id, after, limit), key=lambda message: message.name)


@caught_by("test_delete_removes_the_inbox")
class KeepsDedupIdsOfDeletedRuns(MemoryBackend):
    def __init__(self, runs: Runs, prefix: str, clock: Clock) -> None:
        super().__init__(runs, prefix, clock)
        self.dedup_ids: dict[str, set[str]] = {}

    def _create(self, id: str, *arguments: Any) -> Run:
        run = super()._create(id, *arguments)
        run.dedup_ids = self.dedup_ids.setdefault(id, run.dedup_ids)
        return run


@caught_by("test_prune_deletes_runs_that_are_over")
class PrunesRunsThatAreNotOver(MemoryBackend):
    async def prune(self, request: PruneRequest) -> int:
        for run in self._mine():
            run.status = "completed"
        return await super().prune(request)
