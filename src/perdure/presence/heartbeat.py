"""The heartbeat of a worker: writes what the worker does, and reads the operators' switches.

It is independent of the worker's runs. A failure is logged once until it succeeds again; a worker
without a heartbeat works as well as any other.
"""

import asyncio
import logging
import platform
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self, TypeVar, get_args

from perdure.clock import parse_iso
from perdure.durable.in_flight import StepInFlight
from perdure.durable.leases import LeasedRun
from perdure.durable.owners import process_of
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.errors import InvalidArgument
from perdure.limits import LimitOf, limit_name
from perdure.presence import documents
from perdure.presence.definitions import describe_definition
from perdure.presence.documents import DeclaredLimit, Throughput, WorkerPresence
from perdure.presence.keys import worker_id
from perdure.presence.switches import Switches, read_switches_of
from perdure.presence.tally import HourTally
from perdure.runtime.definition import Definition
from perdure.runtime.runtime import Runtime
from perdure.runtime.settlement import SettledRun
from perdure.snapshot import is_over
from perdure.store import SearchStore, require_schedule
from perdure.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL, JITTER = 10.0, 0.2
"""The seconds between two heartbeats, and by how much they are randomly shortened."""

MOST_STEPS = 100
"""The maximum number of steps in flight in a heartbeat, longest first."""

MAX_DEPTH = 1000
"""The maximum number of due runs of a queue that are counted each minute."""

DAY = timedelta(days=1)


class Activity(NamedTuple):
    """What a worker is doing: slots, started runs, counters, queues and limits."""

    slots: int
    running: int
    draining: bool
    runs: Sequence[LeasedRun]
    counters: dict[str, int]
    queues: tuple[str, ...] = ("",)
    limits: tuple[DeclaredLimit, ...] = ()


class Heartbeat:
    """Writes the documents of one worker while it is entered, and reads its switches.

    The switches are read when it is entered, so that a worker starts with them; `on_switches` is
    called whenever they were read. A worker that is started again enters it again.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: SearchStore,
        owner: str,
        look: Callable[[], Activity],
        on_switches: Callable[[Switches], None],
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._store = store
        self._owner = owner
        self._id = worker_id(owner)
        self._find_due = require_schedule(runtime.store, "Worker").due
        self._look = look
        self._on_switches = on_switches
        process = process_of(owner)
        assert process is not None, "the owner id of a worker names its process"
        self._host, self._pid = process.host, int(process.pid)
        self._started_at = runtime.clock.now()
        self._hour = HourTally(self._started_at)
        self._finished_hours: list[HourTally] = []
        self._described_at: datetime | None = None
        self._has_failed = self._is_logged = self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._started_at, self._is_stopped = self._clock.now(), False
        if self._hour.is_over(self._started_at):
            self._hour = HourTally(self._started_at)
        self._hour.resume(self._started_at)
        await self._try(self._read_switches())
        self._task = detached(self._beat_forever())
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if self._task is not None:
            await cancel_and_wait([self._task])
        if kind is None:
            # In this order, so that a worker that is killed in between is not shown as lost.
            await self._try(self._write_end())
            await self._try(documents.delete_worker(self._store, self._id))

    def count(self, workflow: str, created_at: str, settled_run: SettledRun) -> None:
        """Count a run that the worker has released, if it is over."""
        if is_over(settled_run.status):
            milliseconds = _milliseconds_since(created_at, self._clock.now())
            self._hour.add(workflow, settled_run.status, milliseconds, settled_run.data)

    async def _beat(self) -> None:
        """Write what the worker is doing, and apply the switches."""
        await self.show()
        await self._try(self._read_switches())
        now = self._clock.now()
        if self._hour.is_minute_over(now):
            await self._end_minute(now)
            await self._try(self._write_throughput())
        if self._described_at is None or now - self._described_at >= DAY:
            self._described_at = now
            for definition in self._runtime.registry.definitions:
                await self._try(self._write_definition(definition, now))

    async def show(self) -> None:
        """Write what the worker is doing, without waiting for the next heartbeat."""
        await self._try(self._write_presence())

    async def _beat_forever(self) -> None:
        await self._try(self._write_throughput())
        while True:
            self._has_failed = False
            await self._beat()
            self._is_logged = self._has_failed
            jitter = JITTER * self._runtime.random.random()
            await self._clock.sleep(INTERVAL * (1 - jitter))

    async def _try(self, work: Awaitable[T]) -> T | None:
        try:
            return await work
        except Exception as error:  # noqa: BLE001  # no store error may harm a run
            level = logging.DEBUG if self._is_logged else logging.WARNING
            self._is_logged = self._has_failed = True
            logger.log(level, "the heartbeat of worker %s failed: %r", self._id, error)
            return None

    async def _read_switches(self) -> None:
        names, activity = self._runtime.registry.names, self._look()
        queues = [name for name in activity.queues if name]
        kinds: tuple[LimitOf, ...] = get_args(LimitOf)
        limits = {limit_name(name, kind) for name in queues for kind in kinds}
        limits.update(limit.name for limit in activity.limits)
        self._on_switches(
            await read_switches_of(self._store, self._id, names, queues, sorted(limits))
        )

    async def _write_presence(self) -> None:
        await documents.write_worker(self._store, self._presence(self._look()))

    async def _end_minute(self, now: datetime) -> None:
        depths, activity = await self._depths(now), self._look()
        self._hour.end_minute(now, activity.slots, activity.running, depths)
        if self._hour.is_over(now):
            self._finished_hours.append(self._hour)
            self._hour = HourTally(now)

    async def _depths(self, now: datetime) -> dict[str, int]:
        """Return how many runs wait for a worker like this one, by queue."""
        due_runs = await self._try(
            self._find_due(now, MAX_DEPTH, supports=self._runtime.registry.supported_versions)
        )
        return {} if due_runs is None else {"": len(due_runs)}

    async def _write_definition(self, definition: Definition[Any, Any], now: datetime) -> None:
        document = describe_definition(definition, now, self._runtime.driver.keep)
        await documents.write_definition(self._store, document)

    async def _write_throughput(self) -> None:
        while self._finished_hours:
            await documents.write_throughput(self._store, self._throughput(self._finished_hours[0]))
            del self._finished_hours[0]
        await documents.write_throughput(self._store, self._throughput(self._hour))

    async def _write_end(self) -> None:
        activity = self._look()
        self._hour.end_minute(self._clock.now(), activity.slots, activity.running, {})
        self._is_stopped = True
        await self._write_throughput()

    def _presence(self, activity: Activity) -> WorkerPresence:
        runs = activity.runs
        steps = sorted((each for run in runs for each in run.steps_in_flight()), key=_start_of)
        owners = dict.fromkeys([self._owner, *(run.lease.owner for run in runs if run.lease)])
        return WorkerPresence(
            host=self._host,
            pid=self._pid,
            started_at=self._started_at,
            id=self._id,
            seen_at=self._clock.now(),
            perdure=__version__,
            python=platform.python_version(),
            workflows=tuple(self._runtime.registry.supported_versions),
            queues=activity.queues,
            limits=activity.limits,
            slots=activity.slots,
            running=activity.running,
            draining=activity.draining,
            counters=activity.counters,
            owners=tuple(owners),
            steps=tuple(steps[:MOST_STEPS]),
        )

    def _throughput(self, hour: HourTally) -> Throughput:
        return Throughput(
            host=self._host,
            pid=self._pid,
            started_at=self._started_at,
            worker=self._id,
            owner=self._owner,
            hour=hour.hour,
            seen_at=self._clock.now(),
            stopped=self._is_stopped,
            workflows=hour.workflows(),
            minutes=tuple(hour.minutes),
        )


def _start_of(step: StepInFlight) -> datetime:
    return step.since


def _milliseconds_since(created_at: str, now: datetime) -> float | None:
    """Return the time since a run was created, if that is known."""
    if not created_at:
        return None
    try:
        return (now - parse_iso(created_at)).total_seconds() * 1000
    except InvalidArgument:
        return None
