"""More memory stores with one bug each: in runs that are leased with a message."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from perdure.store import Delivery, Grant, NewMessage, Receipt
from perdure.stores._handoff import Claimant
from perdure.stores._reading import Granted
from perdure.stores.memory.backend import MemoryBackend
from perdure.stores.memory.rows import Run
from tests.stores.mutants import caught_by


class ChangesHandoffs(MemoryBackend):
    """Returns other grants than the right ones."""

    def changed(self, grants: Sequence[Grant]) -> Sequence[Granted]:
        raise NotImplementedError

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        receipts, grants = await super().send_and_claim(messages, claimant)
        return receipts, self.changed([each for each in grants if isinstance(each, Grant)])


@caught_by("test_a_waiting_run_is_granted_with_its_message")
class HandsNothingOff(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        return await self.send(messages), ()


@caught_by(
    "test_a_waiting_run_is_granted_with_its_message", "test_a_grant_contains_all_messages_in_order"
)
class HandsOffWithoutMessages(ChangesHandoffs):
    def changed(self, grants: Sequence[Grant]) -> Sequence[Granted]:
        return [replace(grant, inbox=()) for grant in grants]


@caught_by("test_a_granted_run_has_an_owner")
class HandsOffWithoutLease(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        receipts, grants = await super().send_and_claim(messages, claimant)
        for message in messages:
            if (run := self._find(message.to)) is not None and grants:
                run.owner = None
                self._wake(run, self.clock.now())
        return receipts, grants


@caught_by("test_an_owned_run_is_not_granted")
class HandsOffOwnedRuns(MemoryBackend):
    def _deliver(self, messages: Sequence[NewMessage]) -> tuple[list[Receipt], list[Run]]:
        receipts, woken_runs = super()._deliver(messages)
        runs = [self._find(message.to) for message in messages]
        return receipts, woken_runs + [run for run in runs if run is not None and run.owner]


@caught_by("test_a_run_that_awaits_another_message_is_not_granted")
class HandsOffAnyRun(MemoryBackend):
    def _deliver(self, messages: Sequence[NewMessage]) -> tuple[list[Receipt], list[Run]]:
        receipts, _ = super()._deliver(messages)
        runs = [self._find(message.to) for message in messages]
        return receipts, [run for run in runs if run is not None and run.owner is None]


class ChangesClaimants(MemoryBackend):
    """Grants runs as if the claimant were another one."""

    def changed(self, claimant: Claimant) -> Claimant:
        raise NotImplementedError

    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        return await super().send_and_claim(messages, self.changed(claimant))


@caught_by("test_a_run_that_is_not_supported_becomes_due")
class HandsOffAnyVersion(ChangesClaimants):
    def changed(self, claimant: Claimant) -> Claimant:
        versions = [replace(each, first=1, last=9) for each in claimant.supports]
        return claimant._replace(supports=versions)


@caught_by("test_a_run_without_a_version_is_granted")
class HandsOffOnlyVersionedRuns(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        runs = [self._find(message.to) for message in messages]
        if any(run is not None and not run.version for run in runs):
            return await self.send(messages), ()
        return await super().send_and_claim(messages, claimant)


@caught_by("test_runs_beyond_the_limit_become_due")
class HandsOffBeyondTheLimit(ChangesClaimants):
    def changed(self, claimant: Claimant) -> Claimant:
        return claimant._replace(limit=100)


@caught_by("test_a_run_in_a_queue_becomes_due")
class HandsOffQueuedRuns(MemoryBackend):
    def _deliver(self, messages: Sequence[NewMessage]) -> tuple[list[Receipt], list[Run]]:
        receipts, woken_runs = super()._deliver(messages)
        for run in woken_runs:
            run.queue = ""
        return receipts, woken_runs


@caught_by("test_runs_beyond_the_limit_become_due", "test_a_run_that_is_not_supported_becomes_due")
class ForgetsToWakeOtherRuns(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        wake, self._wake = self._wake, self._ignore  # type: ignore[method-assign]
        try:
            return await super().send_and_claim(messages, claimant)
        finally:
            self._wake = wake  # type: ignore[method-assign]

    def _ignore(self, run: Run, at: Any) -> None:
        if run.owner is not None:
            type(self)._wake(self, run, at)


@caught_by("test_receipts_are_those_of_send")
class CountsDuplicatesOfHandoffs(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        receipts, grants = await super().send_and_claim(messages, claimant)
        return [
            replace(each, delivery=Delivery.DELIVERED)
            if each.delivery is Delivery.DUPLICATE
            else each
            for each in receipts
        ], grants


@caught_by("test_the_owner_consumes_the_message_it_was_granted_with")
class HandsOffWithTheSameEpoch(MemoryBackend):
    async def send_and_claim(
        self, messages: Sequence[NewMessage], claimant: Claimant
    ) -> tuple[Sequence[Receipt], Sequence[Granted]]:
        runs = [self._find(message.to) for message in messages]
        epochs = [run.epoch for run in runs if run is not None]
        receipts, grants = await super().send_and_claim(messages, claimant)
        for run, epoch in zip((run for run in runs if run is not None), epochs, strict=True):
            run.epoch = epoch
        return receipts, [
            replace(grant, lease=replace(grant.lease, epoch=epochs[0]))
            for grant in grants
            if isinstance(grant, Grant)
        ]
