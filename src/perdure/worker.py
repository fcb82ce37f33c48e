"""A worker claims what is due, runnable or orphaned, many at a time, and drives it.

    async with Worker(runtime, concurrency=100) as worker:
        await worker.serve()

Leases of all its runs are renewed together. A run whose process keeps dying is put off longer each
time, and parked as failed after a limit; one that cannot be driven harms no other. SIGTERM drains:
nothing new is claimed, what runs gets its time, and what is left is handed back.
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from perdure.arguments import check_whole
from perdure.clock import Duration, parse_duration
from perdure.driving import quietly
from perdure.errors import (
    InvalidArgument,
    InvalidDuration,
    PerdureError,
    RunFailed,
    StoreError,
)
from perdure.ownership import Session
from perdure.runtime import Runtime
from perdure.store import Grant, NotifyStore, can_notify, require_lease, require_schedule

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What a worker has done so far."""

    claimed: int = 0
    finished: int = 0
    failed_to_drive: int = 0
    taken_over: int = 0
    put_off: int = 0
    parked: int = 0
    handed_back: int = 0


class Worker:
    """Drives runs of a runtime's workflows, up to `concurrency` at once.

    It asks the store every `poll`, a little more or less, and at once when the store hints. `grace`
    is how long runs may go on when it drains. A run is given up as failed when `max_takeovers`
    processes in a row died with it.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        concurrency: int = 100,
        poll: Duration = 0.5,
        grace: Duration = 10,
        max_takeovers: int = 5,
    ) -> None:
        if not isinstance(runtime, Runtime):
            raise InvalidArgument("runtime", runtime, "a Runtime")
        self.runtime = runtime
        self.counters = Counters()
        self._store = require_schedule(runtime.store, "Worker")
        self._concurrency = check_whole(concurrency, "concurrency")
        self._poll = parse_duration(poll, "poll").total_seconds()
        if not self._poll:
            raise InvalidDuration("poll", poll, "a duration longer than nothing")
        self._grace = parse_duration(grace, "grace")
        self._max_takeovers = check_whole(max_takeovers, "max_takeovers")
        self._owner = f"worker-{runtime.random.getrandbits(64):016x}"
        self._runs: set[asyncio.Task[None]] = set()
        self._draining = False
        self._hungry = False
        self._wake: asyncio.Event = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._draining = False
        self._main = asyncio.Task(self._work(), loop=asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def serve(self) -> None:
        """Work until SIGTERM or SIGINT comes, then drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            if self._main is None:
                self._main = asyncio.Task(self._work(), loop=loop)
            await asyncio.wait([self._main])
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self.drain()

    async def drain(self) -> None:
        """Claim nothing more, let runs go on for the grace period, then hand the rest back."""
        self._stop()
        main, self._main = self._main, None
        if main is not None:
            await main

    def _stop(self) -> None:
        self._draining = True
        self._wake.set()

    @property
    def running(self) -> int:
        """How many runs are being driven just now."""
        return len(self._runs)

    async def _work(self) -> None:
        hints = self._listen()
        names = ", ".join(self.runtime.registry.names)
        logger.info("%s works on %s, %d at once", self._owner, names, self._concurrency)
        async with self.runtime.session() as session:
            try:
                while not self._draining:
                    await self._claim_and_wait(session)
                await self._finish()
            finally:
                if hints is not None:
                    hints.cancel()
                    await asyncio.wait([hints])
                logger.info("%s ends: %s", self._owner, self.counters)

    async def _claim_and_wait(self, session: Session) -> None:
        self._wake.clear()
        room = self._concurrency - len(self._runs)
        claimed: Sequence[Grant] = ()
        if room:
            try:
                await session.catch_up()
                claimed = await self._store.claim(
                    self._owner, self.runtime.lease_ttl, room, workflows=self.runtime.registry.names
                )
            except StoreError as error:
                logger.warning("the store cannot be asked for work (%s); asking again", error)
        for grant in claimed:
            self._start(session, grant)
        # As many as there was room for: there may be more.
        self._hungry = len(claimed) == room
        await self._pause()

    async def _pause(self) -> None:
        # A full worker looks again when a run ends; an idle one polls, with jitter, so that many
        # workers do not ask in step.
        pause = self._poll * (0.75 + self.runtime.random.random() / 2)
        woken = asyncio.Task(self._wake.wait(), loop=asyncio.get_running_loop())
        timer = asyncio.Task(self._sleep(pause), loop=asyncio.get_running_loop())
        try:
            await asyncio.wait([woken, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            timer.cancel()

    async def _sleep(self, seconds: float) -> None:
        await self.runtime.clock.sleep(seconds)

    def _start(self, session: Session, grant: Grant) -> None:
        self.counters.claimed += 1
        self.counters.taken_over += grant.takeovers > 0
        task = asyncio.Task(self._drive(session, grant), loop=asyncio.get_running_loop())
        self._runs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # A busy worker claims again when a quarter of its places are free: one claim for many runs.
        self._runs.discard(task)
        if self._hungry and self._concurrency - len(self._runs) >= -(-self._concurrency // 4):
            self._wake.set()

    async def _drive(self, session: Session, grant: Grant) -> None:
        try:
            if grant.takeovers > self._max_takeovers:
                return await self._park(session, grant)
            if grant.takeovers > 1:
                await self._put_off(grant)
            await self.runtime.driver.go_on(session, grant)
            self.counters.finished += 1
        except PerdureError as error:
            self.counters.failed_to_drive += 1
            logger.warning("run %r could not be driven: %s", grant.lease.id, error)
        except Exception:
            self.counters.failed_to_drive += 1
            logger.exception("run %r could not be driven", grant.lease.id)

    async def _put_off(self, grant: Grant) -> None:
        """Wait before a run whose processes keep dying, longer each time, well within its lease."""
        self.counters.put_off += 1
        pause = min(0.25 * 2**grant.takeovers, self.runtime.lease_ttl.total_seconds() / 2)
        logger.warning(
            "%d processes in a row died with run %r; going on with it in %.1fs",
            grant.takeovers, grant.lease.id, pause,
        )  # fmt: skip
        try:
            await self._sleep(pause)
        except asyncio.CancelledError:
            await quietly(require_lease(self.runtime.store).release([grant.lease]))
            raise

    async def _park(self, session: Session, grant: Grant) -> None:
        self.counters.parked += 1
        reason = RunFailed(
            f"{grant.takeovers} processes in a row died with run {grant.lease.id!r}; "
            "it is parked as failed. Mend the cause, then runtime.retry it"
        )
        logger.error("%s", reason)
        await self.runtime.driver.fail(session, grant, reason)

    async def _finish(self) -> None:
        if not self._runs:
            return
        logger.info("draining: %d runs have %s to finish", len(self._runs), self._grace)
        grace = asyncio.Task(
            self._sleep(self._grace.total_seconds()), loop=asyncio.get_running_loop()
        )
        everything = asyncio.Task(self._all_runs(), loop=asyncio.get_running_loop())
        await asyncio.wait([grace, everything], return_when=asyncio.FIRST_COMPLETED)
        grace.cancel()
        left = list(self._runs)
        for task in left:
            # A cancelled run keeps its journal and releases its lease: the next worker goes on.
            task.cancel()
        await asyncio.wait([everything])
        self.counters.handed_back += len(left)

    async def _all_runs(self) -> None:
        while self._runs:
            await asyncio.wait(tuple(self._runs))

    def _listen(self) -> "asyncio.Task[None] | None":
        if not can_notify(self._store):
            return None
        return asyncio.Task(self._hear(self._store), loop=asyncio.get_running_loop())

    async def _hear(self, store: NotifyStore) -> None:
        while True:
            try:
                async for _ in store.hints():
                    self._wake.set()
            except StoreError as error:
                logger.warning("hints ended (%s); polling goes on", error)
            await self._sleep(self._poll)
