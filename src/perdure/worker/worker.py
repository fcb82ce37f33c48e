"""The worker, which claims, executes and releases runs."""

import asyncio
import logging
import signal
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from typing import Self

from perdure.clock import Duration, parse_duration
from perdure.durable.handoff import Slots
from perdure.durable.owners import new_owner
from perdure.durable.session import Session
from perdure.durable.timers import wait_until_set
from perdure.engine.middleware import let_work
from perdure.engine.tasks import detached
from perdure.errors import InvalidArgument, InvalidDuration, StoreError
from perdure.presence.heartbeat import Activity, Heartbeat
from perdure.presence.keys import worker_id
from perdure.presence.switches import Switches
from perdure.runtime.rounds import Turn
from perdure.runtime.runtime import Runtime
from perdure.store import (
    LeaseRequest,
    Refusal,
    RunSummary,
    SupportedVersions,
    can_notify,
    can_search,
    require_lease,
    require_schedule,
)
from perdure.validation import check_int
from perdure.worker.claims import Claims
from perdure.worker.context import WorkerContext
from perdure.worker.counters import Counters
from perdure.worker.handoffs import Handoffs
from perdure.worker.pace import SECOND_LOOK, Pace
from perdure.worker.runs import WorkerRuns
from perdure.worker.takeover import left_behind

logger = logging.getLogger("perdure.worker")


class Worker:
    """Executes runs of a runtime's workflows, up to `concurrency` at once.

    ```python
    async with Worker(runtime):  # in a process of its own: await Worker(runtime).serve()
        receipt = await runtime.result("order-1", timeout="30s")
    ```

    It asks the store for work about every `poll`, and at once when the store sends a notification
    or this process creates a run. A store without notifications is polled more often while there is
    work: 20 ms after work was found, then after a tenth of the time since. `grace` is how long runs
    may continue while the worker drains. A run is paused if `max_crashes` processes in a row died
    before it wrote an entry.

    `queues` are the names of the queues it serves; "" stands for runs in no queue. By default, it
    serves the queues of its workflows, and runs in no queue.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        concurrency: int = 100,
        poll: Duration = 0.5,
        grace: Duration = 10,
        max_crashes: int = 5,
        queues: Collection[str] | None = None,
    ) -> None:
        if not isinstance(runtime, Runtime):
            raise InvalidArgument("runtime", runtime, "a Runtime")
        self.runtime = runtime
        self.counters = Counters()
        self._store = require_schedule(runtime.store, "Worker")
        self._concurrency = check_int(concurrency, "concurrency")
        self._poll = parse_duration(poll, "poll").total_seconds()
        if not self._poll:
            raise InvalidDuration("poll", poll, "a positive duration")
        self._pace = Pace(self._store, runtime.clock, runtime.random, self._poll)
        self._grace = parse_duration(grace, "grace")
        self._max_crashes = check_int(max_crashes, "max_crashes")
        self._owner = new_owner(runtime.random)
        self._claims = Claims(runtime, self._owner, queues)
        self._runs: WorkerRuns | None = None
        self._handoffs: Handoffs | None = None
        self._paused_workflows: frozenset[str] = frozenset()
        self._heartbeat: Heartbeat | None = None
        if can_search(store := runtime.store):
            self._heartbeat = Heartbeat(runtime, store, self._owner, self._activity, self._obey)
        self._draining = self._until_idle = self._is_declared = False
        self._signals = 0
        self._hurry: asyncio.Event = asyncio.Event()
        self._hungry = self._is_claiming = False
        self._wake: asyncio.Event = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The unique name of the worker: host, process id and six digits."""
        return worker_id(self._owner)

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def serve(self) -> None:
        """Work until SIGTERM or SIGINT arrives, then drain; a second signal ends the grace period.

        It also returns when an operator has drained the worker.
        """
        loop = asyncio.get_running_loop()
        # Before the signal handlers: while the dependencies are entered, a signal ends the process.
        main = self._main or await self._begin()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
            await asyncio.wait([main])
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self.drain()

    async def run_until_idle(self) -> None:
        """Work until no run is due and none is running, or until a signal arrives.

        Runs that wait, and runs of paused workflows and queues, are left as they are; but it waits
        for runs that a limit keeps from starting.
        """
        self._until_idle = True
        self._wake.set()
        try:
            await self.serve()
        finally:
            self._until_idle = False

    async def _begin(self) -> asyncio.Task[None]:
        """Start working, unless the runtime's dependencies cannot be entered."""
        self._draining, self._signals = False, 0
        self._hurry.clear()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.runtime.driver.deps)
            self._main = detached(self._work(stack.pop_all()))
        return self._main

    async def drain(self) -> None:
        """Claim no more runs, let runs continue for the grace period, then release the rest."""
        self._stop()
        main, self._main = self._main, None
        if main is not None:
            await main

    def _stop(self) -> None:
        self._draining = True
        if self._handoffs is not None:
            self._handoffs.close()
        self._wake.set()

    def _signalled(self) -> None:
        self._signals += 1
        self._stop()
        if self._signals > 1:
            self._hurry.set()

    @property
    def concurrency(self) -> int:
        """How many runs it executes at once."""
        return self._concurrency

    @property
    def is_draining(self) -> bool:
        """Whether it no longer claims runs."""
        return self._draining

    @property
    def running(self) -> int:
        """How many runs are currently being executed."""
        return 0 if self._runs is None else len(self._runs)

    async def _work(self, entered_deps: AsyncExitStack) -> None:
        if names := ", ".join(self.runtime.registry.names):
            logger.info("%s executes %s, up to %d runs at once", self.id, names, self._concurrency)
        else:
            logger.warning("%s executes nothing: pass workflows=[…] to its Runtime", self.id)
        try:
            async with (
                entered_deps,
                self.runtime.session() as session,
                asyncio.TaskGroup() as tasks,
            ):
                runs = self._runs = self._new_runs(session, tasks)
                self._claims.start(session)
                listener = tasks.create_task(self._listen())
                async with AsyncExitStack() as stack:
                    if self._heartbeat is not None:
                        await stack.enter_async_context(self._heartbeat)
                    context = WorkerContext(self, session)
                    await let_work(
                        self.runtime.around, context, lambda: self._claim_and_finish(runs)
                    )
                listener.cancel()
        except ExceptionGroup as errors:
            # Only claiming can fail here; a run that cannot be executed is logged.
            raise errors.exceptions[0] from None
        finally:
            logger.info("%s stopped: %s", self.id, self.counters)

    def _new_runs(self, session: Session, tasks: asyncio.TaskGroup) -> WorkerRuns:
        on_rest = None if self._heartbeat is None else self._heartbeat.count
        return WorkerRuns(
            self.runtime,
            session,
            tasks,
            self.counters,
            self._max_crashes,
            on_rest,
            self._claim_if_worthwhile,
        )

    async def _claim_and_finish(self, runs: WorkerRuns) -> None:
        await self._claim_until_stopped(runs)
        await self._finish(runs)
        await self._claims.return_idle()

    async def _claim_until_stopped(self, runs: WorkerRuns) -> None:
        handoffs = self._handoffs = self._new_handoffs(runs)
        runs.session.workers.add(handoffs)
        try:
            await self._take_over(runs)
            while not self._draining:
                await self._claim_and_wait(runs)
        finally:
            handoffs.close()
            runs.session.workers.discard(handoffs)

    async def _claim_and_wait(self, runs: WorkerRuns) -> None:
        self._wake.clear()
        # Read before the claim: a run that ends in the meantime may have made another one due.
        room = self._free_slots
        was_idle = room == self._concurrency
        self._is_claiming = True
        try:
            claimed = await self._claim_and_start(runs, room) if room else 0
        finally:
            self._is_claiming = False
        if not room:
            await self._claims.return_idle()
        # A full batch means that there may be more due runs.
        self._hungry = claimed == room
        if claimed:
            self._pace.note_work()
        is_blocked = self._claims.pause is not None
        if self._until_idle and was_idle and claimed == 0 and not is_blocked:
            self._stop()
        else:
            await self._pause(self._is_woken_again(claimed))

    async def _claim_and_start(self, runs: WorkerRuns, room: int) -> int | None:
        """Start the claimed runs; return their number, or `None` if claiming failed."""
        turns = await self._claim(runs.session, room)
        if turns is None:
            return None
        for turn in turns:
            await runs.accept(turn)
        return len(turns)

    async def _claim(self, session: Session, room: int) -> Sequence[Turn] | None:
        """Return the claimed runs, or `None` if claiming failed."""
        try:
            await session.leases.catch_up()
            if not self._is_declared:
                await self.runtime.declare_schedules()
                await self.runtime.declare_retention()
                self._is_declared = True
            if not (versions := self._unpaused_versions):
                return ()
            return await self._claims.take(room, versions)
        except StoreError as error:
            logger.warning("claiming failed (%s); retrying", error)
            return None

    @property
    def _unpaused_versions(self) -> Sequence[SupportedVersions]:
        versions = self.runtime.registry.all_supported_versions
        if not self._paused_workflows:
            return versions
        return [each for each in versions if each.workflow not in self._paused_workflows]

    def _is_woken_again(self, claimed: int | None) -> bool:
        """Return whether the worker was woken during this claim, probably for the same runs.

        A run that becomes due is announced by this process and by the store. Claiming again at once
        would find nothing, and delay the runs that were just claimed. But the wake-up may be for
        another run, so the worker checks again soon.
        """
        has_all = bool(claimed) and not self._hungry and not self._draining
        return has_all and self._wake.is_set()

    @property
    def _free_slots(self) -> int:
        """How many runs it could execute besides those that it executes or was promised."""
        reserved = 0 if self._handoffs is None else self._handoffs.reserved
        return self._concurrency - self.running - reserved

    def _new_handoffs(self, runs: WorkerRuns) -> Handoffs:
        return Handoffs(
            self._store, runs, self._unused_slots, self._note_notification, self._note_handoff
        )

    def _unused_slots(self) -> Slots:
        # A claim may fill all free slots. While there may be more due runs, these come first.
        is_full = self._is_claiming or self._hungry
        count = 0 if is_full else self._free_slots
        return self._claims.slots(count, self._paused_workflows)

    def _note_handoff(self, has_freed_slots: bool) -> None:
        self._pace.note_work()
        if has_freed_slots and self._hungry:
            self._wake.set()

    def _note_notification(self) -> None:
        # Even if another process claims the run first: more may follow.
        self._pace.note_work()
        self._wake.set()

    async def _take_over(self, runs: WorkerRuns) -> None:
        """Continue the runs of processes on this machine that no longer exist."""
        names = {each.workflow for each in self._unpaused_versions}
        try:
            async with aclosing(left_behind(self._store, names)) as orphans:
                async for run in orphans:
                    if self._free_slots < 1:
                        return
                    if self._claims.serves(run.queue):
                        await self._take_over_run(runs, run)
        except StoreError as error:
            logger.warning("looking for runs of dead processes failed (%s)", error)

    async def _take_over_run(self, runs: WorkerRuns, run: RunSummary) -> None:
        request = LeaseRequest(run.id, self._owner, self.runtime.lease_ttl, instead_of=run.owner)
        grant = await runs.session.acquire(request)
        if isinstance(grant, Refusal):
            return
        if grant.queue:
            # It has to wait for its turn again, as there may be no permit for it.
            await require_lease(self._store).release([grant.lease])
        else:
            await runs.accept(Turn(grant))

    async def _pause(self, is_woken_again: bool) -> None:
        # A full worker claims again when runs end. An idle one polls.
        pause = self._pace.pause()
        if self._claims.pause is not None and self.running < self._concurrency:
            pause = min(pause, self._claims.pause)
        if is_woken_again:
            self._wake.clear()
            pause = min(pause, SECOND_LOOK)
        started_at = self.runtime.clock.monotonic()
        await wait_until_set(self._wake, self.runtime.clock, pause)
        self._pace.note_pause(pause, started_at)

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.clock.sleep(seconds)

    def _claim_if_worthwhile(self, has_returned_permits: bool) -> None:
        """Claim again if the end of a run makes that worthwhile."""
        is_last = self._until_idle and not self.running
        # Its permits are for another run of the queue.
        is_permitted = has_returned_permits and not self._hungry
        # A busy worker claims again when a quarter of its slots are free, so that one claim serves
        # many runs.
        free_slots = self._concurrency - self.running
        if is_last or is_permitted or (self._hungry and free_slots >= -(-self._concurrency // 4)):
            self._wake.set()

    async def _finish(self, runs: WorkerRuns) -> None:
        """Let runs end within the grace period; cancel the others, which keep their records."""
        if not runs:
            return
        logger.info("draining: %d runs have %s to finish", len(runs), self._grace)
        # Before anything is written, which takes long if the store is unavailable.
        grace = detached(self._sleep(self._grace.total_seconds()))
        if self._heartbeat is not None:
            await self._heartbeat.show()
        all_ended, hurry = detached(self._all_ended(runs)), detached(self._hurry.wait())
        await asyncio.wait([grace, all_ended, hurry], return_when=asyncio.FIRST_COMPLETED)
        grace.cancel()
        hurry.cancel()
        runs.release()
        await asyncio.wait([all_ended])

    async def _all_ended(self, runs: WorkerRuns) -> None:
        while runs:
            await runs.wait_for_next()
            await self._claims.return_idle()

    def _activity(self) -> Activity:
        return Activity(
            self._concurrency,
            self.running,
            self._draining,
            [] if self._runs is None else self._runs.active_runs(),
            asdict(self.counters),
            self._claims.names,
            self._claims.limits(),
        )

    def _obey(self, switches: Switches) -> None:
        self._claims.obey(switches)
        if switches.paused != self._paused_workflows:
            names = ", ".join(sorted(switches.paused)) or "none"
            logger.info("%s claims no runs of paused workflows: %s", self.id, names)
            self._paused_workflows = switches.paused
            self._wake.set()
        if switches.drains(self.id) and not self._draining:
            logger.info("%s is drained by an operator", self.id)
            self._stop()

    async def _listen(self) -> None:
        """Wake the worker when the store sends a notification; polling finds missed ones."""
        store = self._store
        while can_notify(store):
            try:
                async for _ in store.notifications():
                    self._wake.set()
            except StoreError as error:
                logger.warning("notifications failed (%s); polling continues", error)
            except Exception:
                # Perhaps a bug of the store; it must not stop the worker.
                logger.exception("notifications failed; polling continues")
            await self._sleep(self._poll)
