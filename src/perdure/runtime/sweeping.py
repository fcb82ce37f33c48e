"""Continue due runs in the calling process, without a worker."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from perdure.clock import Clock
from perdure.durable.owners import new_owner
from perdure.durable.permits import Permits
from perdure.durable.session import Session
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.runtime.driver import Driver
from perdure.runtime.rounds import Rounds, Turn
from perdure.runtime.run import Run
from perdure.runtime.settlement import SettledRun
from perdure.store import Grant, Refusal, require_queues

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Continues runs that are due at `now`; those that cannot be continued are logged.

    `run_after` awaits the execution of a run with this id, and returns the run.
    """

    driver: Driver
    session: Session
    clock: Clock
    now: datetime
    run_after: Callable[[str, Awaitable[SettledRun | None]], Awaitable[Run]]

    async def continue_runs(self, run_ids: Sequence[str]) -> list[Run]:
        """Continue these runs, except those that another process owns."""
        runs = await asyncio.gather(*map(self._continue_one, run_ids))
        return [run for run in runs if run is not None]

    async def continue_queues(self, limit: int) -> list[Run]:
        """Continue runs in queues, in turn and within the limits, until none is left."""
        driver, now = self.driver, self.now
        store = require_queues(driver.store, "a queue")
        versions = driver.registry.supported_versions
        owner, ttl = new_owner(driver.random), driver.lease_ttl
        rounds = Rounds(Permits(store, self.session.leases, self.clock, ttl, owner))
        rounds.serve(driver.registry.queues.values())

        async def claim(number: int, queues: Mapping[str, int]) -> list[Grant]:
            due_runs = await store.due(now, number, supports=versions, queues=queues)
            answers = [await self.session.acquire(driver.request(run.id)) for run in due_runs]
            return [each for each in answers if isinstance(each, Grant)]

        runs: dict[str, Run] = {}
        try:
            while len(runs) < limit:
                rounds.begin()
                turns = await rounds.take(limit - len(runs), versions, claim, now)
                await rounds.return_unneeded()
                results = await asyncio.gather(*map(self._continue_turn, turns))
                new = {run.id: run for run in results if run is not None}
                if new.keys() <= runs.keys():
                    break
                runs.update(new)
        finally:
            await rounds.return_idle()
        return list(runs.values())

    async def _continue_turn(self, turn: Turn) -> Run | None:
        task = detached(self._continue(turn.grant))
        if turn.hold is not None:
            turn.hold.on_lost = task.cancel
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            await cancel_and_wait([task])
            turn.end()

    async def _continue_one(self, run_id: str) -> Run | None:
        try:
            grant = await self.session.acquire(self.driver.request(run_id))
        except Exception:
            logger.exception("run %r could not be continued", run_id)
            return None
        return None if isinstance(grant, Refusal) else await self._continue(grant)

    async def _continue(self, grant: Grant) -> Run | None:
        run_id = grant.lease.id
        try:
            execution = self.driver.continue_run(self.session, grant, not_before=self.now)
            return await self.run_after(run_id, execution)
        except Exception:
            logger.exception("run %r could not be continued", run_id)
            return None
