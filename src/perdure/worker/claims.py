"""Claim runs for a worker: runs in no queue, and runs of the queues that it serves."""

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from perdure.durable.handoff import Slots
from perdure.durable.permits import Permits
from perdure.durable.session import Session
from perdure.errors import StoreError
from perdure.limits import Queue, check_queue_names, declared_limits, with_numbers
from perdure.presence.documents import DeclaredLimit
from perdure.presence.switches import Switches
from perdure.runtime.rounds import Rounds, Turn
from perdure.runtime.runtime import Runtime
from perdure.snapshot import workflow_of
from perdure.store import Grant, SupportedVersions, require_queues, require_schedule

logger = logging.getLogger(__name__)


class Claims:
    """Claims runs for one worker.

    `queues` are the names of the queues that it serves; "" stands for runs in no queue. `None`
    means the queues of its workflows, and runs in no queue.
    """

    def __init__(self, runtime: Runtime, owner: str, queues: Collection[str] | None) -> None:
        self._runtime = runtime
        self._store = require_schedule(runtime.store, "Worker")
        self._owner = owner
        self._names = None if queues is None else check_queue_names(queues)
        self._rounds: Rounds | None = None
        self._session: Session | None = None
        self._are_queues_first = False
        self._switches = Switches()

    def start(self, session: Session) -> None:
        """Let a session renew the permits from now on."""
        self._session, self._rounds = session, None
        known_queues = self._runtime.registry.queues
        unknown = [name for name in self.names if name and name not in known_queues]
        if unknown:
            names = ", ".join(map(repr, unknown))
            logger.warning("no workflow here declares the queue %s: its runs have no limits", names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the queues that the worker serves."""
        return ("", *self._runtime.registry.queues) if self._names is None else self._names

    def obey(self, switches: Switches) -> None:
        """Skip paused queues, and use the limits that operators have set."""
        self._switches = switches
        if self._session is not None:
            self._session.change_limits(switches.numbers)

    def limits(self) -> tuple[DeclaredLimit, ...]:
        """Return the declared limits of the queues it serves, and of the steps it has run."""
        limits = [each for queue in self._declared_queues() for each in declared_limits(queue)]
        if self._session is not None:
            limits += self._session.step_limits()
        return tuple(DeclaredLimit(each.name, each.n, _seconds(each.per)) for each in limits)

    def serves(self, queue: str) -> bool:
        """Return whether the worker may execute runs of a queue."""
        return queue.partition("/")[0] in self.names

    @property
    def pause(self) -> float | None:
        """After how many seconds queues may have more runs, or `None` if they have none."""
        return None if self._rounds is None else self._rounds.pause

    def slots(self, limit: int, paused_workflows: Collection[str]) -> Slots:
        """Return free slots for runs that need no permits and are in no queue."""
        versions: Sequence[SupportedVersions] = ()
        if "" in self.names:
            versions = self._runtime.registry.unqueued_versions
        if paused_workflows:
            versions = [each for each in versions if each.workflow not in paused_workflows]
        return Slots(self._owner, self._runtime.lease_ttl, limit, versions)

    async def take(self, room: int, versions: Sequence[SupportedVersions]) -> list[Turn]:
        """Claim up to `room` runs."""
        queues = self._queues()
        if not queues:
            return await self._take_plain(room, versions)
        rounds = self._serve(queues)
        rounds.begin()
        try:
            return await self._take_both(room, versions)
        finally:
            await rounds.return_unneeded()

    async def _take_both(self, room: int, versions: Sequence[SupportedVersions]) -> list[Turn]:
        """Claim runs in no queue and runs of queues."""
        self._are_queues_first = not self._are_queues_first
        # Alternating, so that neither takes all slots while the other waits.
        parts = [self._take_plain, self._take_from_queues]
        turns: list[Turn] = []
        for part in reversed(parts) if self._are_queues_first else parts:
            try:
                turns += await part(room - len(turns), versions) if room > len(turns) else []
            except StoreError as error:
                if not turns:
                    raise
                logger.warning("claiming failed (%s); retrying", error)
        return turns

    async def return_idle(self) -> None:
        """Return the permits that no run uses."""
        if self._rounds is not None:
            await self._rounds.return_idle()

    def _declared_queues(self) -> list[Queue]:
        known_queues = self._runtime.registry.queues
        # A queue that no known workflow declares has no limits; runs may be left in it.
        return [known_queues.get(name) or Queue(name) for name in self.names if name]

    def _queues(self) -> list[Queue]:
        queues = self._declared_queues()
        if numbers := self._switches.numbers:
            queues = [with_numbers(queue, numbers) for queue in queues]
        return queues

    def _serve(self, queues: Sequence[Queue]) -> Rounds:
        if self._rounds is None:
            assert self._session is not None, "the worker was not started"
            runtime = self._runtime
            store = require_queues(self._store, "a queue")
            leases, ttl = self._session.leases, runtime.lease_ttl
            self._rounds = Rounds(Permits(store, leases, runtime.clock, ttl, self._owner))
        self._rounds.serve(queues)
        self._rounds.paused = self._switches.paused_queues
        return self._rounds

    async def _take_from_queues(
        self, room: int, versions: Sequence[SupportedVersions]
    ) -> list[Turn]:
        async def claim(limit: int, queues: Mapping[str, int]) -> Sequence[Grant]:
            ttl = self._runtime.lease_ttl
            return await self._store.claim(
                self._owner, ttl, limit, supports=versions, queues=queues
            )

        assert self._rounds is not None, "a round has begun"
        turns = await self._rounds.take(room, versions, claim)
        await self._rounds.clean_up()
        return turns

    async def _take_plain(self, room: int, versions: Sequence[SupportedVersions]) -> list[Turn]:
        if "" not in self.names:
            return []
        ttl = self._runtime.lease_ttl
        grants = await self._store.claim(self._owner, ttl, room, supports=versions)
        if self._rounds is None:
            return [Turn(grant) for grant in grants]
        turns = [await self._permit(self._rounds, grant) for grant in grants]
        return [turn for turn in turns if turn is not None]

    async def _permit(self, rounds: Rounds, grant: Grant) -> Turn | None:
        """Return a run with the permits that it would need in its workflow's queue.

        A run is in no queue if it was created by name where the workflow is unknown, or before the
        workflow had a queue. It takes no turns, but observes the limits.
        """
        definition = self._runtime.registry.find(workflow_of(grant.snapshot) or "")
        if definition is None or definition.queue is None:
            return Turn(grant)
        try:
            name = definition.queue_for((grant.snapshot.get("metadata") or {}).get("input"))
        except Exception:  # noqa: BLE001 - the key is the user's function, the payload unchecked
            # The run will fail with this or a clearer error; other runs must not.
            name = definition.queue.name
        return await rounds.permit(definition.queue, name, grant)


def _seconds(period: timedelta | None) -> float | None:
    return None if period is None else period.total_seconds()
