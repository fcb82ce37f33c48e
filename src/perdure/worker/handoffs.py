"""Runs that a worker gets with the messages that make them due, without a claim."""

from collections.abc import Callable, Sequence

from perdure.durable.handoff import Slots
from perdure.durable.lifecycle import log_failure
from perdure.runtime.rounds import Turn
from perdure.store import Grant, LeaseStore
from perdure.worker.runs import WorkerRuns


class Handoffs:
    """Reserves the free slots of a worker for messages that are sent in its process.

    `free_slots` returns the slots that the worker neither uses nor claims runs for, with what it
    supports. `wake` makes it claim; `on_end` is called when reserved slots are used or free again,
    with whether some are free. `reserved` is how many slots are reserved currently.
    """

    def __init__(
        self,
        store: LeaseStore,
        runs: WorkerRuns,
        free_slots: Callable[[], Slots],
        wake: Callable[[], None],
        on_end: Callable[[bool], None],
    ) -> None:
        self.reserved = 0
        self.wake = wake
        self._store = store
        self._runs = runs
        self._free_slots = free_slots
        self._on_end = on_end
        self._is_open = True

    def close(self) -> None:
        """Take no more runs; those that arrive are left to others."""
        self._is_open = False

    def reserve(self, limit: int) -> Slots | None:
        """Reserve up to `limit` slots; `None` if the worker takes no runs currently."""
        if not self._is_open:
            return None
        slots = self._free_slots()
        slots = slots._replace(limit=min(limit, slots.limit))
        if slots.limit < 1 or not slots.supports:
            return None
        self.reserved += slots.limit
        return slots

    async def accept(self, slots: Slots, grants: Sequence[Grant]) -> None:
        """Execute runs in reserved slots, and free the other slots."""
        self.reserved -= slots.limit
        if self._is_open:
            for grant in grants:
                await self._runs.accept(Turn(grant))
        elif grants:
            await log_failure(self._store.release([grant.lease for grant in grants]))
        self._on_end(len(grants) < slots.limit)
