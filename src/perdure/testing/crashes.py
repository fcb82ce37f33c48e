"""Crash a workflow before and after every store call, resume it each time, and compare.

report = await explore_crashes(checkout, {"order": 7}, events={"approved": {"by": "ana"}})
report.assert_once("charge")
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.clock import Clock
from perdure.errors import InvalidArgument, StoreError
from perdure.events import StepStart
from perdure.runtime.definition import Definition
from perdure.runtime.run import Run
from perdure.runtime.runtime import Runtime
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing._differences import difference
from perdure.testing._expected_logs import without_expected_logs
from perdure.testing.clock import TestClock
from perdure.testing.faults import Call, FaultyStore, How

Compare: TypeAlias = Literal["values", "shape"] | Callable[[Run, Run], None]

RUN = "explored"
_LEASE = timedelta(seconds=30)
_MAX_ROUNDS = 1000
_MAX_TIME = timedelta(minutes=5)
_HOWS: tuple[How, How] = ("before", "after")


class Exploration(msgspec.Struct, frozen=True):
    """The crashes that a workflow survived, and after which of them a step ran again.

    `steps` are the ids of the steps that ran. `repeats` contains for each of them the crashes after
    which its function was called again, once per call. This happens if the crash was between a
    step's work and its record: a plain step runs at least once. A transaction that was committed
    never runs again; one that was not has had no effect and is not counted, and neither is a step
    that was cancelled because its branch lost a race.
    """

    crashes: int
    steps: frozenset[str]
    repeats: Mapping[str, Sequence[str]]

    @property
    def doubled(self) -> Mapping[str, int]:
        """How often each step ran again, over all crashes; only steps that did."""
        return {step: len(crashes) for step, crashes in self.repeats.items()}

    def assert_once(self, step: str) -> None:
        """Raise an `AssertionError` that names the crashes after which the step ran again."""
        if step not in self.steps:
            known = ", ".join(map(repr, sorted(self.steps))) or "none"
            raise InvalidArgument("step", step, f"the id of a step that ran: {known}")
        crashes = [*dict.fromkeys(self.repeats.get(step, ()))]
        if crashes:
            listed = "".join(f"\n  {crash}" for crash in crashes)
            raise AssertionError(f"step {step!r} ran again after{listed}")


class CrashFound(AssertionError):
    """A run whose outcome was different after a crash."""


async def explore_crashes(
    workflow: Definition[Any, Any],
    payload: object = None,
    *,
    events: Mapping[str, object] | None = None,
    deps: object = None,
    store: Callable[[Clock], Store] | None = None,
    always_replay: bool = False,
    compare: Compare = "values",
) -> Exploration:
    """Run a workflow once without a crash and once for each possible crash, and compare.

    `events` are sent when the run waits for them. `deps` are those of `Runtime`; each process
    enters them. `store` returns a new store with the given clock; by default, a memory store. Each
    crash ends the process before or after one store call; another process continues when the lease
    has expired. If a run ends differently than without the crash, `CrashFound` is raised.
    `compare` defines what must be equal: `"values"` is the outcome and the whole history,
    `"shape"` leaves out the values, for steps that return a time or a random id. A function is
    called with both runs, the one without a crash first, and raises `AssertionError`.
    """
    check = _comparison(compare)
    world = _World(workflow, payload, events or {}, deps, store or _memory, always_replay)
    repeats: defaultdict[str, list[str]] = defaultdict(list)
    crashes = 0
    with without_expected_logs(_Crash) as logs:
        clean = await world.live(None, "before")
        logs.is_learning = False
        for number, how in product(range(1, len(clean.calls) + 1), _HOWS):
            survived = await world.live(number, how)
            where = _describe(clean.calls, number, how)
            check(clean.run, survived.run, where)
            for step in _repeated(clean, survived):
                repeats[step].append(where)
            # A workflow that depends on real time may call the store less often the second time.
            crashes += survived.crashed
    return Exploration(crashes, frozenset(step for step, _ in clean.starts), dict(repeats))


def _memory(clock: Clock) -> Store:
    return MemoryStore(clock=clock)


def _describe(calls: Sequence[Call], number: int, how: How) -> str:
    return f"a crash {how} store call {number} of {len(calls)} ({calls[number - 1].verb})"


class _Life(NamedTuple):
    """A run from its trigger to its end, with at most one crash in between.

    `calls` are the store calls of the first process, `crashed` is whether it crashed at one of
    them, `recorded` are the keys of the steps that were recorded by then. `starts` counts the calls
    of step functions, by step id and key.
    """

    run: Run
    calls: Sequence[Call]
    crashed: bool
    starts: Counter[tuple[str, str]]
    recorded: frozenset[str]


def _repeated(clean: _Life, survived: _Life) -> Iterator[str]:
    """Return the id of each step call that ran again after the crash."""
    kinds = {step.key: step.kind for step in survived.run.history}
    for (step, key), times in (survived.starts - clean.starts).items():
        # A step that was cancelled by a lost race has no record.
        kind = kinds.get(key)
        if kind == "step" or (kind == "transaction" and key in survived.recorded):
            yield from [step] * times


class _World:
    """The environment of one workflow: its processes, its clock and the sender of its events."""

    def __init__(
        self,
        workflow: Definition[Any, Any],
        payload: object,
        events: Mapping[str, object],
        deps: object,
        store: Callable[[Clock], Store],
        always_replay: bool,
    ) -> None:
        self._workflow = workflow
        self._payload = payload
        self._events = events
        self._deps = deps
        self._store = store
        self._always_replay = always_replay

    async def live(self, fail_at: int | None, how: How) -> _Life:
        """Run the workflow in a process that crashes at a store call, then in another one."""
        clock = TestClock()
        starts: Counter[tuple[str, str]] = Counter()
        recorded: frozenset[str] = frozenset()
        inner = self._store(clock)
        first = FaultyStore(inner, fail_at=fail_at, how=how, error=_Crash, stays_down=True)
        try:
            run = await self._process(first, clock, starts)
            if run is None:
                snapshot = await inner.load(RUN)
                recorded = frozenset(snapshot["steps"] if snapshot is not None else ())
                await clock.advance(_LEASE * 2)
                run = await self._process(FaultyStore(inner), clock, starts)
        finally:
            await inner.close()
        if run is None:
            raise CrashFound(f"{self._workflow!r} did not end after a crash {how} call {fail_at}")
        return _Life(run, first.calls, first.failed, starts, recorded)

    async def _process(
        self, store: FaultyStore, clock: TestClock, starts: Counter[tuple[str, str]]
    ) -> Run | None:
        def count(event: object) -> None:
            # After its crash a process starts no more steps.
            if isinstance(event, StepStart) and not store.failed:
                starts[event.step, event.key] += 1

        runtime = Runtime(
            store,
            workflows=[self._workflow],
            deps=self._deps,
            clock=clock,
            lease_ttl=_LEASE,
            suspend_after=0,
            on_event=count,
            always_replay=self._always_replay,
        )
        with suppress(_Crash):
            # The run may wait in memory, between two attempts of a step or beside a busy branch.
            # The clock stands still during a store call: a slow thread would add renewals, and the
            # calls of two lives could not be compared.
            return await clock.run(
                self._run_to_end(runtime, clock),
                limit=_MAX_TIME,
                is_busy=lambda: store.in_flight > 0,
            )
        return None

    async def _run_to_end(self, runtime: Runtime, clock: TestClock) -> Run:
        async with runtime:
            run = await runtime.trigger(self._workflow, self._payload, run_id=RUN)
            for _ in range(_MAX_ROUNDS):
                if run.over:
                    return run
                await self._wake(runtime, clock, run)
                await runtime.sweep()
                current = await runtime.get_run(RUN)
                assert current is not None
                run = current
        waits = ", ".join(repr(wait.id) for wait in run.pending) or "nothing"
        raise CrashFound(
            f"{self._workflow!r} did not end in {_MAX_ROUNDS} rounds: it is {run.status} and "
            f"waits for {waits}. Are all of its events in `events`?"
        )

    async def _wake(self, runtime: Runtime, clock: TestClock, run: Run) -> None:
        """Send the event that the run waits for, or advance the clock to its wake time."""
        for wait in run.pending:
            if wait.event is not None and wait.event in self._events:
                payload = self._events[wait.event]
                await runtime.signal(RUN, wait.event, payload, dedup_id=wait.id, wait=False)
                return
        wakes = [wait.wake_at for wait in run.pending if wait.wake_at is not None]
        pause = min(wakes) - clock.now() if wakes else _LEASE * 2
        await clock.advance(max(pause, timedelta(0)))


class _Crash(StoreError):
    """The process crashes here."""


def _comparison(compare: Compare) -> Callable[[Run, Run, str], None]:
    """Return a function that compares a run with the one without a crash."""
    if not callable(compare) and compare not in ("values", "shape"):
        raise InvalidArgument("compare", compare, '"values", "shape" or a function of two runs')

    def check(clean: Run, survived: Run, where: str) -> None:
        if callable(compare):
            try:
                compare(clean, survived)
            except AssertionError as error:
                raise CrashFound(f"after {where}: {error}") from error
        elif diff := difference(clean, survived, values=compare == "values"):
            raise CrashFound(f"after {where} the run differs:\n{diff}")

    return check
