"""More memory stores with one hole each: in leases, schedule, inbox and upkeep."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace

from perdure.snapshot import RunStatus
from perdure.store import (
    Delivery,
    Due,
    Entry,
    Grant,
    Lease,
    LeaseRequest,
    Message,
    NewRun,
    Rest,
    Verdict,
)
from perdure.stores.memory import MemoryStore
from perdure.stores.memory.rows import Run
from tests.stores.mutants import caught_by


@caught_by("test_another_owners_unexpired_lease_is_never_stolen")
class StealsLeases(MemoryStore):
    def _acquire(self, want: LeaseRequest, now: datetime) -> Grant | None:
        run = self._runs.get(self._prefix + want.id)
        if run is not None and want.existing:
            run.owner = None
        return super()._acquire(want, now)


@caught_by("test_existing_false_does_not_fence_the_owner")
class FencesOnAskingForNew(MemoryStore):
    def _acquire(self, want: LeaseRequest, now: datetime) -> Grant | None:
        run = self._runs.get(self._prefix + want.id)
        if run is not None and not want.existing:
            run.epoch = next(self._shelf.epochs)
        return super()._acquire(want, now)


@caught_by("test_a_granted_run_is_running_until_its_next_rest")
class GrantsWithOldStatus(MemoryStore):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Grant:
        status = run.status
        grant = super()._grant(run, *arguments, **options)
        run.status = status
        return grant


@caught_by("test_takeovers_are_counted_until_a_rest")
class CountsNoTakeovers(MemoryStore):
    def _grant(self, run: Run, *arguments: Any, **options: Any) -> Grant:
        run.takeovers = -1
        return replace(super()._grant(run, *arguments, **options), takeovers=0)


@caught_by("test_an_entry_resets_the_takeovers")
class CountsOwnersThatMadeProgress(MemoryStore):
    def _grant(self, run: Run, owner: str, now: datetime, *rest: Any, **options: Any) -> Grant:
        takeovers = run.takeovers + run.orphaned(now)
        grant = super()._grant(run, owner, now, *rest, **options)
        run.takeovers = takeovers
        return replace(grant, takeovers=takeovers)


@caught_by("test_a_fenced_entry_does_not_reset_the_takeovers")
class ResetsTakeoversForAnyEntry(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        if run is not None:
            run.takeovers = 0
        return super()._append(entry)


class Releasing(MemoryStore):
    """Changes the count of takeovers when a lease is released."""

    def count(self, takeovers: int) -> int:
        raise NotImplementedError

    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        for run in filter(None, map(self._owned, leases)):
            run.takeovers = self.count(run.takeovers)
        await super().release(leases, wake_at=wake_at)


@caught_by("test_a_release_neither_counts_nor_resets_takeovers")
class ResetsTakeoversOnRelease(Releasing):
    def count(self, takeovers: int) -> int:
        return 0


@caught_by("test_a_release_neither_counts_nor_resets_takeovers")
class CountsReleases(Releasing):
    def count(self, takeovers: int) -> int:
        return takeovers + 1


@caught_by("test_a_taken_lease_is_never_renewed")
class RenewsTakenLeases(MemoryStore):
    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._runs.get(self._prefix + lease.id)
        if run is not None:
            run.owner, run.epoch = lease.owner, lease.epoch
        return super()._renew(lease, expires_at)


@caught_by("test_an_expired_lease_that_nobody_took_is_renewed")
class RenewsOnlyTheLiving(MemoryStore):
    def _renew(self, lease: Lease, expires_at: datetime) -> Lease | None:
        run = self._owned(lease)
        if run is not None and run.orphaned(self._now()):
            return None
        return super()._renew(lease, expires_at)


@caught_by("test_releasing_a_lease_that_is_not_ones_own_does_nothing")
class ReleasesForStrangers(MemoryStore):
    async def release(self, leases: Sequence[Lease], /, *, wake_at: datetime | None = None) -> None:
        for lease in leases:
            run = self._runs.get(self._prefix + lease.id)
            if run is not None:
                run.owner = None
                self._wake(run, wake_at or self._now())


@caught_by("test_enqueue_leaves_a_run_that_is_there")
class EnqueuesOverRuns(MemoryStore):
    def _enqueue(self, new: NewRun, now: datetime) -> bool:
        self._runs.pop(self._prefix + new.id, None)
        return super()._enqueue(new, now)


@caught_by("test_due_gives_the_earliest_first")
class GivesDueInAnyOrder(MemoryStore):
    async def due(
        self, now: datetime, limit: int, /, *, workflows: Sequence[str] | None = None
    ) -> Sequence[Due]:
        due = await super().due(now, limit, workflows=workflows)
        return sorted(due, key=lambda line: line.id, reverse=True)


class Claiming(MemoryStore):
    """Claims in some other way."""

    async def claim(
        self,
        owner: str,
        ttl: timedelta,
        limit: int,
        /,
        *,
        workflows: Sequence[str] | None = None,
    ) -> Sequence[Grant]:
        raise NotImplementedError


@caught_by("test_many_claimants_share_what_is_due")
class ClaimsTwice(Claiming):
    async def claim(self, owner: str, ttl: timedelta, limit: int, /, **options: Any) -> Any:
        due = self._agenda.due(self._now(), limit, options.get("workflows"), self._prefix)
        await asyncio.sleep(0)
        return [self._grant(run, owner, self._now(), ttl) for run in due]


@caught_by("test_claim_keeps_to_workflows")
class ClaimsAnyWorkflow(Claiming):
    async def claim(self, owner: str, ttl: timedelta, limit: int, /, **options: Any) -> Any:
        return await MemoryStore.claim(self, owner, ttl, limit)


@caught_by("test_an_orphan_is_claimed")
class LeavesOrphans(Claiming):
    async def claim(self, owner: str, ttl: timedelta, limit: int, /, **options: Any) -> Any:
        due = self._agenda.due(self._now(), limit, options.get("workflows"), self._prefix)
        free = [run for run in due if run.owner is None]
        return [self._grant(run, owner, self._now(), ttl) for run in free]


@caught_by(
    "test_hints_come_when_a_run_is_enqueued",
    "test_hints_come_when_a_run_is_released",
    "test_hints_come_when_an_awaited_event_is_sent",
    "test_hints_come_to_another_instance",
)
class HintsAtFirstOnly(MemoryStore):
    async def notifications(self) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().create_future()


@caught_by("test_a_dedup_id_is_known_after_its_message_was_taken")
class ForgetsDedupIds(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        verdict = super()._append(entry)
        if entry.consumes:
            self._runs[self._prefix + entry.id].known_mail.clear()
        return verdict


@caught_by("test_a_fenced_entry_takes_nothing")
class TakesWhenFenced(MemoryStore):
    def _append(self, entry: Entry) -> Verdict:
        run = self._runs.get(self._prefix + entry.id)
        for message_id in entry.consumes if run is not None else ():
            run.mail.pop(message_id, None)
        return super()._append(entry)


@caught_by("test_a_run_resting_on_mail_that_lies_there_is_due")
class RestsOverMail(MemoryStore):
    def _lay(self, run: Run, snapshot: bytes, rest: Rest) -> None:
        mail, run.mail = run.mail, {}
        super()._lay(run, snapshot, rest)
        run.mail = mail


@caught_by("test_an_awaited_event_makes_a_run_at_rest_due")
class SendsWithoutWaking(MemoryStore):
    async def send(self, id: str, name: str, payload: bytes, /, **options: Any) -> Delivery:
        run = self._runs.get(self._prefix + id)
        if run is not None:
            run.awaits = ()
        return await super().send(id, name, payload, **options)


@caught_by("test_messages_come_in_the_order_they_were_sent")
class ShufflesMail(MemoryStore):
    async def inbox(self, id: str, /) -> Sequence[Message]:
        return sorted(await super().inbox(id), key=lambda message: message.name)


@caught_by("test_delete_removes_the_inbox")
class KeepsMailOfTheDead(MemoryStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[str, set[str]] = {}

    def _create(self, key: str, *arguments: Any) -> Run:
        run = super()._create(key, *arguments)
        run.known_mail = self.known.setdefault(key, run.known_mail)
        return run


@caught_by("test_prune_deletes_runs_that_are_over")
class PrunesTheLiving(MemoryStore):
    async def prune(
        self, older_than: timedelta, /, *, status: RunStatus | None = None, limit: int = 1000
    ) -> int:
        for run in self._mine():
            run.status = "completed"
        return await super().prune(older_than, status=status, limit=limit)
