"""Crash a workflow before and after every store call, resume it each time, and compare.

report = await explore_crashes(checkout, {"order": 7}, events={"approved": {"by": "ana"}})
assert not report.doubled
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from perdure.clock import Clock
from perdure.errors import StoreError
from perdure.events import StepStart
from perdure.registry import Definition
from perdure.run import Run
from perdure.runtime import Runtime
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

RUN = "explored"
_LEASE = timedelta(seconds=30)
_MOST_ROUNDS = 1000
_PATIENCE = 0.005
_HOWS: tuple[How, How] = ("before", "after")


class Exploration(msgspec.Struct, frozen=True):
    """What was found: how many crashes were survived, and which steps ran again after one.

    A step runs again when the crash came between its work and its record: so much is promised for a
    plain step. A transactional step is never among them once it has committed.
    """

    crashes: int
    doubled: Mapping[str, int]


class CrashFound(AssertionError):
    """A crash that the workflow did not survive as it should."""


async def explore_crashes(
    workflow: Definition[Any, Any],
    payload: object = None,
    *,
    events: Mapping[str, object] | None = None,
    store: Callable[[Clock], Store] | None = None,
    always_replay: bool = False,
) -> Exploration:
    """Run a workflow once cleanly and once for each crash there can be, and compare the ends.

    `events` are sent when the run waits for them. `store` makes a fresh store by a clock; the
    default is memory. Each crash kills the process before or after one store call; another process
    goes on when the lease has expired. A result or a history that differs is a `CrashFound`.
    """
    world = _World(workflow, payload, events or {}, store or _memory, always_replay)
    clean, calls, _ = await world.live(None, "before")
    doubled: Counter[str] = Counter()
    crashes = 0
    for number in range(1, calls + 1):
        for how in _HOWS:
            survived, _, starts = await world.live(number, how)
            _compare(clean, survived, f"a crash {how} store call {number} of {calls}")
            doubled.update({step: n - 1 for step, n in starts.items() if n > 1})
            crashes += 1
    return Exploration(crashes, dict(doubled))


def _memory(clock: Clock) -> Store:
    return MemoryStore(clock=clock)


class _World:
    """The outside of one workflow: its processes, its clock and who sends it events."""

    def __init__(
        self,
        workflow: Definition[Any, Any],
        payload: object,
        events: Mapping[str, object],
        store: Callable[[Clock], Store],
        always_replay: bool,
    ) -> None:
        self._workflow = workflow
        self._payload = payload
        self._events = events
        self._store = store
        self._always_replay = always_replay

    async def live(self, fail_at: int | None, how: How) -> tuple[Run, int, Counter[str]]:
        """Give the run's end, how many store calls the first process made, and the steps'
        starts.
        """
        clock = TestClock()
        starts: Counter[str] = Counter()
        inner = self._store(clock)
        faulty = FaultyStore(inner, fail_at=fail_at, how=how, error=_Crash, stays_down=True)
        try:
            run = await self._process(faulty, clock, starts)
            if run is None:
                await clock.advance(_LEASE * 2)
                run = await self._process(inner, clock, starts)
        finally:
            await inner.close()
        if run is None:
            raise CrashFound(f"{self._workflow!r} did not end after a crash {how} call {fail_at}")
        return run, len(faulty.calls), starts

    async def _process(self, store: Store, clock: TestClock, starts: Counter[str]) -> Run | None:
        def count(event: object) -> None:
            if isinstance(event, StepStart):
                starts[event.key] += 1

        runtime = Runtime(
            store,
            workflows=[self._workflow],
            clock=clock,
            lease_ttl=_LEASE,
            linger=0,
            on_event=count,
            always_replay=self._always_replay,
        )
        life = asyncio.ensure_future(self._live_on(runtime, clock))
        while not (await asyncio.wait([life], timeout=_PATIENCE))[0]:
            # It waits in memory, between two attempts of a step or beside a busy branch.
            await clock.advance(1)
        with suppress(_Crash):
            return life.result()
        return None

    async def _live_on(self, runtime: Runtime, clock: TestClock) -> Run:
        run = await runtime.trigger(self._workflow, self._payload, run_id=RUN)
        for _ in range(_MOST_ROUNDS):
            if run.over:
                return run
            await self._outside(runtime, clock, run)
            await runtime.sweep()
            now = await runtime.get_run(RUN)
            assert now is not None
            run = now
        raise CrashFound(f"{self._workflow!r} did not end in {_MOST_ROUNDS} rounds; it is {run!r}")

    async def _outside(self, runtime: Runtime, clock: TestClock, run: Run) -> None:
        """Send what the run waits for, or let time pass until it wakes."""
        for wait in run.pending:
            if wait.event is not None and wait.event in self._events:
                payload = self._events[wait.event]
                await runtime.signal(RUN, wait.event, payload, dedup_id=wait.id, wait=False)
                return
        wakes = [wait.wake_at for wait in run.pending if wait.wake_at is not None]
        pause = min(wakes) - clock.now() if wakes else _LEASE * 2
        await clock.advance(max(pause, timedelta(0)))


class _Crash(StoreError):
    """The process died here."""


def _compare(clean: Run, survived: Run, where: str) -> None:
    ends = [(run.status, repr(run.output), repr(run.error)) for run in (clean, survived)]
    if ends[0] != ends[1]:
        raise CrashFound(f"after {where} the run ended as {ends[1]}, and cleanly as {ends[0]}")
    before, after = _history(clean), _history(survived)
    if before != after:
        raise CrashFound(f"after {where} the history is {after}, and cleanly {before}")


def _history(run: Run) -> list[tuple[str, bool, str]]:
    return sorted(
        (step.kind, step.ok, repr(step.value if step.ok else step.error)) for step in run.history
    )
