"""Crash a workflow before and after every store call, resume it each time, and compare.

report = await explore_crashes(checkout, {"order": 7}, events={"approved": {"by": "ana"}})
report.assert_once("charge")
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from perdure.clock import Clock
from perdure.engine.middleware import Middleware
from perdure.errors import InvalidArgument, Refused, StoreError
from perdure.events import StepStart
from perdure.runtime.client import Client
from perdure.runtime.definition import Definition
from perdure.runtime.run import Run, Wait
from perdure.runtime.runtime import Runtime
from perdure.runtime.schedule_workflow import SCHEDULE_WORKFLOW
from perdure.schedules import Schedule, next_time, timing_of
from perdure.store import Store, SupportedVersions, require_schedule
from perdure.stores.memory import MemoryStore
from perdure.testing._differences import difference
from perdure.testing._expected_logs import without_expected_logs
from perdure.testing.clock import TestClock
from perdure.testing.faults import Call, FaultyStore, How

Answer: TypeAlias = Callable[[Client, Wait], Awaitable[object]]
Compare: TypeAlias = Literal["values", "shape"] | Callable[[Run, Run], None]

RUN = "explored"
_LEASE = timedelta(seconds=30)
_MAX_ROUNDS = 1000
_MAX_RUNS = 10_000
_MAX_TIME = timedelta(minutes=5)
_TIMES = 3
_SCHEDULES = (SupportedVersions(SCHEDULE_WORKFLOW.name, 1, SCHEDULE_WORKFLOW.version),)
_FOREVER = datetime(9999, 1, 1, tzinfo=UTC)
_HOWS: tuple[How, How] = ("before", "after")


class Exploration(msgspec.Struct, frozen=True):
    """The crashes that a workflow survived, and the steps that ran again after them.

    `steps` are the ids of the steps that ran. `repeats` maps each step to the crashes after which
    its function was called again, once per call. This happens if the crash was between a step's
    work and its record: a plain step runs at least once. A committed transaction never runs again;
    an uncommitted one had no effect and is not counted, nor is a step that was cancelled because
    its branch lost a race.
    """

    crashes: int
    steps: frozenset[str]
    repeats: Mapping[str, Sequence[str]]

    @property
    def doubled(self) -> Mapping[str, int]:
        """How often each step ran again over all crashes, for steps that did."""
        return {step: len(crashes) for step, crashes in self.repeats.items()}

    def assert_once(self, step: str) -> None:
        """Raise an `AssertionError` that names the crashes after which the step ran again."""
        if step not in self.steps:
            known_steps = ", ".join(map(repr, sorted(self.steps))) or "none"
            raise InvalidArgument("step", step, f"the id of a step that ran: {known_steps}")
        crashes = [*dict.fromkeys(self.repeats.get(step, ()))]
        if crashes:
            crash_lines = "".join(f"\n  {crash}" for crash in crashes)
            raise AssertionError(f"step {step!r} ran again after{crash_lines}")


class CrashFound(AssertionError):
    """A run whose outcome was different after a crash."""


async def explore_crashes(
    workflow: Definition[Any, Any],
    payload: object = None,
    *,
    events: Mapping[str, object] | None = None,
    answers: Mapping[str, Answer] | None = None,
    deps: object = None,
    around: Sequence[Middleware] = (),
    store: Callable[[Clock], Store] | None = None,
    always_replay: bool = False,
    compare: Compare = "values",
    workflows: Sequence[Definition[Any, Any]] = (),
    schedule: Schedule | None = None,
) -> Exploration:
    """Run a workflow once without a crash and once for each possible crash, and compare.

    `workflows` are the workflows that it starts as child runs: crashes happen before and after each
    store call of all these runs, and all of them are compared. `events` are sent when a run waits
    for them. `answers` maps the ids of approvals and callbacks to functions that answer them, given
    a client and the wait: `lambda client, wait: client.approve(wait.token, by="ana")`. `deps` and
    `around` have the same meaning as in `Runtime`; each process enters `deps`. `store` returns a
    new store with the given clock; by default, a memory store. Each crash ends the process before
    or after one store call; another process continues when the lease has expired. `CrashFound` is
    raised if a run ends differently from the run without a crash. `compare` defines what must be
    equal: `"values"` compares the outcome and the whole history, `"shape"` ignores values, for
    steps that return a time or a random id. A function is called with both runs, the one without a
    crash first, and raises `AssertionError` if they differ.

    With a `schedule`, the runs of its first three times are explored, and crashes also happen at
    the store calls of the schedule itself. The schedule must catch up the times that pass while no
    process runs, about a minute.
    """
    known_workflows = [workflow, *(each for each in workflows if each is not workflow)]
    start, messages = _start_of(payload, schedule), (events or {}, answers or {})
    world = _World(
        known_workflows,
        start,
        *messages,
        deps,
        tuple(around),
        store or _memory,
        always_replay,
    )
    return await _explore(world, _comparison(compare))


def _start_of(payload: object, schedule: Schedule | None) -> "_Trigger":
    if schedule is None:
        return _Trigger(payload)
    if not isinstance(schedule, Schedule):
        raise InvalidArgument("schedule", schedule, 'a Schedule, such as Schedule(every="1h")')
    return _ScheduleTrigger(payload, schedule)


async def _explore(world: "_World", check: Callable[[Run, Run, str], None]) -> Exploration:
    repeats: defaultdict[str, list[str]] = defaultdict(list)
    crashes = 0
    with without_expected_logs(_Crash) as logs:
        clean = await world.run_trial(None, "before")
        logs.is_learning = False
        for number, how in product(range(1, len(clean.calls) + 1), _HOWS):
            recovered = await world.run_trial(number, how)
            description = _describe(clean.calls, number, how)
            _check_same_runs(clean, recovered, description)
            for one, other in zip(clean.runs, recovered.runs, strict=True):
                check(one, other, description)
            for step in _repeated_steps(clean, recovered):
                repeats[step].append(description)
            # A workflow that depends on real time may make fewer store calls the second time.
            crashes += recovered.crashed
    return Exploration(crashes, frozenset(start.step for start in clean.starts), dict(repeats))


def _memory(clock: Clock) -> Store:
    return MemoryStore(clock=clock)


def _describe(calls: Sequence[Call], number: int, how: How) -> str:
    return f"a crash {how} store call {number} of {len(calls)} ({calls[number - 1].verb})"


class _Start(NamedTuple):
    """The call of a step's function."""

    run_id: str
    step: str
    key: str


class _Trial(NamedTuple):
    """A run from its trigger to its end, with at most one crash in between, and its child runs.

    `runs` begins with the run itself. `calls` are the store calls of the first process, `crashed`
    is set if it crashed at one of them, and `recorded` are the runs and keys of the steps that were
    recorded by then. `starts` counts the calls of step functions.
    """

    runs: Sequence[Run]
    calls: Sequence[Call]
    crashed: bool
    starts: Counter[_Start]
    recorded: frozenset[tuple[str, str]]


def _check_same_runs(clean: _Trial, survived: _Trial, description: str) -> None:
    before, after = ([run.id for run in life.runs] for life in (clean, survived))
    if before != after:
        raise CrashFound(f"after {description} there are the runs {after}, and without it {before}")


def _repeated_steps(clean: _Trial, survived: _Trial) -> Iterator[str]:
    """Yield the id of each step call that ran again after the crash."""
    kinds = {(run.id, step.key): step.kind for run in survived.runs for step in run.history}
    for start, times in (survived.starts - clean.starts).items():
        # A step that was cancelled by a lost race has no record.
        place = start.run_id, start.key
        kind = kinds.get(place)
        if kind == "step" or (kind == "transaction" and place in survived.recorded):
            yield from [start.step] * times


class _Trigger:
    """Starts one run."""

    def __init__(self, payload: object) -> None:
        self._payload = payload

    async def begin(self, runtime: Runtime, workflow: Definition[Any, Any]) -> None:
        await runtime.trigger(workflow, self._payload, run_id=RUN)

    async def is_over(self, reader: Client) -> bool:
        """Return whether no more runs will be started."""
        return True

    async def next_time(self, reader: Client) -> datetime | None:
        """Return when the next run may be started, if that is known."""
        return None


class _ScheduleTrigger(_Trigger):
    """Creates a schedule with three times, the same in every run of the workflow."""

    def __init__(self, payload: object, schedule: Schedule) -> None:
        super().__init__(payload)
        now = TestClock().now()
        if schedule.start_at is None:
            # Later than the start of the second process: an interval is counted from here.
            schedule = replace(schedule, start_at=now + _LEASE * 4)
        timing, time = timing_of(schedule, now), now
        for _ in range(_TIMES):
            time = next_time(timing, time) or time
        self._options: Any = {**msgspec.structs.asdict(schedule), "end_at": time}

    async def begin(self, runtime: Runtime, workflow: Definition[Any, Any]) -> None:
        await runtime.schedule(RUN, workflow, self._payload, **self._options)

    async def is_over(self, reader: Client) -> bool:
        (info,) = await reader.schedules()
        return not (info.next_times or info.buffered)

    async def next_time(self, reader: Client) -> datetime | None:
        due = await require_schedule(reader.store).due(_FOREVER, 1, supports=_SCHEDULES)
        return due[0].wake_at if due else None


class _World:
    """The environment of one workflow: its processes, its clock and the sender of its events."""

    def __init__(
        self,
        workflows: Sequence[Definition[Any, Any]],
        start: _Trigger,
        events: Mapping[str, object],
        answers: Mapping[str, Answer],
        deps: object,
        around: Sequence[Middleware],
        store: Callable[[Clock], Store],
        always_replay: bool,
    ) -> None:
        self._workflows = workflows
        self._workflow = workflows[0]
        self._start = start
        self._events = events
        self._answers = answers
        self._deps = deps
        self._around = around
        self._store = store
        self._always_replay = always_replay

    async def run_trial(self, fail_at: int | None, how: How) -> _Trial:
        """Run the workflow in a process that crashes at a store call, then in another one."""
        clock = TestClock()
        starts: Counter[_Start] = Counter()
        recorded: frozenset[tuple[str, str]] = frozenset()
        inner = self._store(clock)
        first = FaultyStore(inner, fail_at=fail_at, how=how, error=_Crash, stays_down=True)
        try:
            runs = await self._process(inner, first, clock, starts)
            if runs is None:
                recorded = await _recorded_steps(inner)
                await clock.advance(_LEASE * 2)
                runs = await self._process(inner, FaultyStore(inner), clock, starts)
        finally:
            await inner.close()
        if runs is None:
            raise CrashFound(f"{self._workflow!r} did not end after a crash {how} call {fail_at}")
        return _Trial(runs, first.calls, first.failed, starts, recorded)

    async def _process(
        self, inner: Store, store: FaultyStore, clock: TestClock, starts: Counter[_Start]
    ) -> list[Run] | None:
        def count(event: object) -> None:
            # After its crash, a process starts no more steps.
            if isinstance(event, StepStart) and not store.failed:
                starts[_Start(event.run_id, event.step, event.key)] += 1

        runtime = Runtime(
            store,
            workflows=self._workflows,
            deps=self._deps,
            around=self._around,
            clock=clock,
            lease_ttl=_LEASE,
            suspend_after=0,
            on_event=count,
            always_replay=self._always_replay,
        )
        with suppress(_Crash):
            # The run may wait in memory, between two attempts of a step or beside a busy branch.
            # The clock stands still during a store call: otherwise a slow thread would add lease
            # renewals, and the calls of two runs could not be compared.
            return await clock.run(
                self._run_to_end(runtime, store, inner, clock),
                limit=_MAX_TIME,
                is_busy=lambda: store.in_flight > 0,
            )
        return None

    async def _run_to_end(
        self, runtime: Runtime, store: FaultyStore, inner: Store, clock: TestClock
    ) -> list[Run]:
        """Return all runs once they have ended; reads through `inner` are not counted as calls."""
        reader = Client(inner, workflows=self._workflows, clock=clock)
        runs: list[Run] = []
        async with runtime:
            await self._start.begin(runtime, self._workflow)
            for _ in range(_MAX_ROUNDS):
                runs = await _all_runs(reader)
                next_time = await self._start.next_time(reader)
                if all(run.over for run in runs) and await self._start.is_over(reader):
                    return runs
                # A run that waits for another run is woken by that run, not by time, and a run that
                # a schedule has started is due.
                is_alone = next_time is None and len(runs) == 1
                if is_alone or not await runtime.sweep():
                    if store.failed:
                        # A sweep only logs the failure, but time must not pass for a dead process.
                        raise _Crash
                    await self._wake(
                        runtime, clock, [run for run in runs if not run.over], next_time
                    )
                    await runtime.sweep()
        run = next((run for run in runs if not run.over), None)
        if run is None:
            text = f"the schedule of {self._workflow!r} did not end in {_MAX_ROUNDS} rounds"
            raise CrashFound(text)
        waits = ", ".join(repr(wait.id) for wait in run.pending) or "nothing"
        raise CrashFound(
            f"{self._workflow!r} did not end in {_MAX_ROUNDS} rounds: {run.id!r} is "
            f"{run.status} and waits for {waits}. Are all of its events in `events`?"
        )

    async def _wake(
        self, runtime: Runtime, clock: TestClock, runs: Sequence[Run], next_time: datetime | None
    ) -> None:
        """Send an event that a run waits for, or advance the clock to the next wake time."""
        waits = [(run.id, wait) for run in runs for wait in run.pending]
        for run_id, wait in waits:
            if wait.event is not None and wait.event in self._events:
                payload = self._events[wait.event]
                await runtime.signal(run_id, wait.event, payload, dedup_id=wait.id, wait=False)
                return
            if wait.id in self._answers:
                # The wait was answered just before the crash, or has expired.
                with suppress(Refused):
                    await self._answers[wait.id](runtime, wait)
                return
        wakes = [wait.wake_at for _, wait in waits if wait.wake_at is not None]
        wakes += [] if next_time is None else [next_time]
        pause = min(wakes) - clock.now() if wakes else _LEASE * 2
        await clock.advance(max(pause, timedelta(0)))


async def _all_runs(reader: Client) -> list[Run]:
    """Return all stored runs, the explored one first, the others by id."""
    ids = {summary.id for summary in await reader.list_runs(limit=_MAX_RUNS)} - {RUN}
    runs = [await reader.get_run(run_id) for run_id in (RUN, *sorted(ids))]
    return [run for run in runs if run is not None]


async def _recorded_steps(store: Store) -> frozenset[tuple[str, str]]:
    """Return the runs and keys of all recorded steps."""
    summaries = await store.list(limit=_MAX_RUNS)
    snapshots = [(summary.id, await store.load(summary.id)) for summary in summaries]
    return frozenset(
        (run_id, key)
        for run_id, snapshot in snapshots
        if snapshot is not None
        for key in snapshot["steps"]
    )


class _Crash(StoreError):
    """The process crashes here."""


def _comparison(compare: Compare) -> Callable[[Run, Run, str], None]:
    """Return a function that compares a run with the one without a crash."""
    if not callable(compare) and compare not in ("values", "shape"):
        raise InvalidArgument("compare", compare, '"values", "shape" or a function of two runs')

    def check(clean: Run, survived: Run, description: str) -> None:
        if callable(compare):
            try:
                compare(clean, survived)
            except AssertionError as error:
                raise CrashFound(f"after {description}: {error}") from error
        elif diff := difference(clean, survived, values=compare == "values"):
            raise CrashFound(f"after {description} the run differs:\n{diff}")

    return check
