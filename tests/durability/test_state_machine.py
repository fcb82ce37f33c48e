"""Processes that trigger, sweep, signal, crash, cancel, retry and prune, and operators who pause,
resume, wake, signal, skip and rewind, in any order.

After every action: recorded successes have not changed, epochs have grown, every event is in an
inbox or was consumed exactly once, runs that are over have not changed, and no act was recorded
twice. Finally, every run ends with the correct result.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure import Runtime, Step, workflow
from perdure.errors import AlreadyRunning, Refused, RunNotFound, StoreError
from perdure.operations import Operations
from perdure.runtime.definition import Definition
from perdure.snapshot import is_over, rest_status
from perdure.store import Delivery, Grant, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore

TTL = timedelta(seconds=30)
IDS = ("a", "b", "c")
PART = st.sampled_from(["step", "step", "fail", "sleep", "event", "both", "pair", "race"])

ids = st.sampled_from(IDS)
places = st.integers(0, 1)
verbs = st.sampled_from(["pause", "unpause", "wake", "retry", "op signal", "skip", "rewind"])
kinds = st.one_of(st.sampled_from(["sweep", "resume", "cancel", "retry", "signal"]), verbs)
programs = st.lists(PART, min_size=1, max_size=4)


class Died(StoreError):
    """The process crashed here."""


class Wire(FaultyStore):
    """A process's connection to the store: other processes run during its calls, and every grant
    and every accepted record is logged.
    """

    def __init__(self, store: MemoryStore, world: "World", seed: int) -> None:
        super().__init__(store, error=Died, stays_down=True)
        self._world = world
        self._turns = Random(seed)
        self._pause_at: int | None = None
        self._going = asyncio.Event()
        self._going.set()

    def pause_at(self, call: int) -> None:
        """Pause the process at the given call from now on, as SIGSTOP would."""
        self._pause_at = len(self.calls) + call

    def unpause(self) -> None:
        """Continue the process as if nothing had happened."""
        self._pause_at = None
        self._going.set()

    def die_at(self, call: int, *, after: bool) -> None:
        """Crash the process at the given call from now on."""
        self.fail_at = self._count + call
        self._how = "after" if after else "before"

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        for _ in range(self._turns.randrange(3)):
            await asyncio.sleep(0)
        if self._pause_at is not None and len(self.calls) >= self._pause_at:
            self._going.clear()
        await self._going.wait()
        answer = await super()._pass(verb, *arguments, **options)
        if verb in ("acquire", "claim"):
            self._world.granted(answer)
        if verb == "append":
            self._world.written(arguments[0], answer)
        return answer


class World:
    """The store, its processes, and what must be true of them."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.store = MemoryStore(clock=self.clock)
        self.processes: list[Runtime] = []
        self.broken = True
        self.wires = 0
        self.sent = 0
        # What went wrong inside a step or a store call. An exception there would be taken for an
        # error of the step or the store.
        self.wrongs: list[str] = []
        # By run: the last epoch, successes, events (certainly or possibly delivered), and the end.
        self.epochs: dict[str, int] = {}
        self.successes: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[int, bool]] = {}
        self.ends: dict[str, Any] = {}
        # Runs that an operator has rewound: their owner may do that later.
        self.rewound: set[str] = set()
        self.definition = self._definition()
        for place in range(2):
            self.start(place)

    def start(self, place: int) -> None:
        """Start a new process in a slot."""
        self.wires += 1
        wire = Wire(self.store, self, self.wires)
        process = Runtime(
            wire, workflows=[self.definition], clock=self.clock, lease_ttl=TTL, suspend_after=0
        )
        self.processes[place : place + 1] = [process]

    def _definition(self) -> Definition[Any, Any]:
        @workflow("program")
        async def program(step: Step, payload: list[str]) -> list[Any]:
            return [await self.part(step, n, kind) for n, kind in enumerate(payload)]

        return program

    async def part(self, step: Step, n: int, kind: str) -> Any:
        """Execute one part of a program."""
        match kind:
            case "step":
                return await step(f"{n}", self.effect, step.run_id, f"{n}")
            case "fail":
                return await step(f"{n}", self.fail, step.run_id, f"{n}")
            case "sleep":
                return await step.sleep(f"{n}", "1h")
            case "event":
                return await step.wait_for_event(f"{n}", "go")
            case "both":
                return await asyncio.gather(
                    step.wait_for_event(f"{n}", "go"),
                    step(f"{n} beside", self.effect, step.run_id, f"{n} beside"),
                )
            case "pair":
                return await asyncio.gather(
                    step.wait_for_event(f"{n} one", "go"), step.wait_for_event(f"{n} two", "go")
                )
            case _:
                return await step.race(
                    f"{n}",
                    {
                        "event": lambda: step.wait_for_event(f"{n} go", "go"),
                        "late": lambda: step.sleep(f"{n} late", "2h"),
                    },
                )

    async def effect(self, run_id: str, key: str) -> str:
        """Check that a recorded step does not run again."""
        await asyncio.sleep(0)
        if key in self.successes.get(run_id, {}) and run_id not in self.rewound:
            self.wrongs.append(f"{key} of {run_id} ran again")
        return key

    async def fail(self, run_id: str, key: str) -> str:
        """Fail while the world is broken."""
        if self.broken:
            raise ConnectionError(key)
        return await self.effect(run_id, key)

    def granted(self, grants: list[Grant | None]) -> None:
        """Check that epochs grow."""
        for grant in grants:
            if isinstance(grant, Grant):
                lease = grant.lease
                if lease.epoch <= self.epochs.get(lease.id, 0):
                    self.wrongs.append(f"an epoch of {lease.id} came twice")
                self.epochs[lease.id] = lease.epoch

    def written(self, entries: Any, verdicts: Any) -> None:
        """Check that only the newest epoch writes."""
        for entry, verdict in zip(entries, verdicts, strict=True):
            if verdict is Verdict.ACCEPTED and entry.epoch != self.epochs[entry.id]:
                self.wrongs.append(f"a stale owner wrote to {entry.id}")

    def forget(self, id: str) -> None:
        """Forget a deleted run: its id may be used again."""
        for known in (self.successes, self.events, self.ends):
            known.pop(id, None)
        self.rewound.discard(id)

    async def settle(self, *works: Awaitable[Any]) -> list[Any]:
        """Run coroutines concurrently; short waits in memory elapse."""
        tasks = [asyncio.ensure_future(work) for work in works]
        for _ in range(200):
            await self.clock.advance(0)
            if all(task.done() for task in tasks):
                break
            await self.clock.advance(0.3)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in done:
            # A retry of a run whose owner has died raises AlreadyRunning until the lease expires.
            expected = Died | RunNotFound | AlreadyRunning | Refused
            if isinstance(answer, BaseException) and not isinstance(answer, expected):
                raise answer
        return done

    async def signal(self, place: int, id: str, dedup_id: str | None) -> None:
        """Send an event with a unique number."""
        self.sent += 1
        number = self.sent
        known = self.events.setdefault(id, {})
        duplicate = dedup_id is not None and f"{dedup_id}" in self.dedups(id)
        if not duplicate:
            known[number] = False
        process = self.processes[place]
        answer = await process.signal(id, "go", number, dedup_id=dedup_id, wait=number % 2 == 0)
        match answer.delivery:
            case Delivery.DELIVERED:
                known[number] = True
            case _:
                known.pop(number, None)

    async def operate(self, place: int, id: str, verb: str) -> None:
        """Let an operator change a run."""
        operations = Operations(self.processes[place].store, clock=self.clock)
        match verb:
            case "op signal":
                self.sent += 1
                self.events.setdefault(id, {})[self.sent] = False
                await operations.signal(id, "go", self.sent, by="op")
            case "skip":
                await self._skip(operations, id)
            case "rewind":
                await self._rewind(operations, id)
            case _:
                await getattr(operations, verb)(id, by="op")

    async def _skip(self, operations: Operations, id: str) -> None:
        """Skip the first step that failed."""
        snapshot = await self.store.load(id)
        steps: Any = {} if snapshot is None else snapshot["steps"]
        failed = [key for key, record in steps.items() if not record["ok"]]
        if failed:
            await operations.skip_step(id, failed[0], by="op")

    async def _rewind(self, operations: Operations, id: str) -> None:
        """Rewind a run to its first record; what it had recorded may be made again."""
        snapshot = await self.store.load(id)
        if snapshot is None or not snapshot["steps"]:
            return
        # It may be rewound although the operator's process dies.
        self.successes.pop(id, None)
        self.ends.pop(id, None)
        self.events[id] = dict.fromkeys(self.events.get(id, {}), False)
        self.rewound.add(id)
        await operations.rewind(id, next(iter(snapshot["steps"])), by="op")

    def dedups(self, id: str) -> set[str]:
        """Return the dedup ids that the store knows for a run."""
        run = self.store._backend.runs.get(id)
        return set() if run is None else set(run.dedup_ids)

    async def check(self) -> None:
        """Check everything that must be true between two actions."""
        assert self.wrongs == []
        for id in [id for id in self.successes if await self.store.load(id) is None]:
            self.forget(id)
        for line in await self.store.list():
            snapshot = await self.store.load(line.id)
            assert snapshot is not None
            self._check_successes(line.id, snapshot["steps"])
            self._check_end(line.id, snapshot)
            self._check_acts(snapshot)
            await self._check_events(line.id, snapshot["steps"])

    def _check_successes(self, id: str, steps: Any) -> None:
        known = self.successes.setdefault(id, {})
        if id in self.rewound:
            # A rewind that was requested may be applied at any time.
            known.clear()
        for key, record in known.items():
            assert _core(steps.get(key)) == _core(record), f"{key} of {id} changed: {steps}"
        known.update({key: record for key, record in steps.items() if record["ok"]})

    def _check_acts(self, snapshot: Any) -> None:
        acts = snapshot["metadata"].get("acts", [])
        assert len({act["id"] for act in acts}) == len(acts), "an act was recorded twice"

    def _check_end(self, id: str, snapshot: Any) -> None:
        end = None if id in self.rewound else self.ends.get(id)
        assert end is None or end == snapshot, f"{id} was over, and changed"
        if rest_status(snapshot) in ("completed", "cancelled"):
            self.ends[id] = snapshot

    async def _check_events(self, id: str, steps: Any) -> None:
        records = [
            record
            for record in steps.values()
            # One whose event was handed to another wait is only a mark.
            if record.get("kind") == "event" and record.get("value") and record.get("unclaimed", 1)
        ]
        taken = [record["value"] for record in records]
        messages = await self.store.inbox(id)
        inbox = [int(message.payload) for message in messages if message.name == "go"]
        events = self.events.get(id, {})
        assert len({*taken, *inbox}) == len(taken) + len(inbox), "an event counts twice"
        assert {*taken, *inbox} <= set(events), "an event that was not sent"
        surely = {number for number, sure in events.items() if sure and id not in self.rewound}
        assert surely <= {*taken, *inbox}, "an event was lost"


def _core(record: Any) -> Any:
    """Return a record without the mark that its event was handed to another wait."""
    return {**record, "unclaimed": ""} if record and "unclaimed" in record else record


class Machine(RuleBasedStateMachine):
    """The actions of the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world = self.runner.run(self._make())
        self.paused: list[tuple[Wire, asyncio.Task[Any]]] = []

    async def _make(self) -> World:
        return World()

    def do(self, *works: Callable[[], Awaitable[Any]]) -> list[Any]:
        async def together() -> list[Any]:
            return await self.world.settle(*(work() for work in works))

        return self.runner.run(together())

    def _work(self, kind: str, place: int, id: str) -> Callable[[], Awaitable[Any]]:
        process = self.world.processes[place]
        match kind:
            case "sweep":
                return process.sweep
            case "resume":
                return lambda: process.resume(id)
            case "cancel":
                return lambda: process.cancel(id, reason="enough")
            case "retry":
                return lambda: process.retry(id)
            case "signal":
                return lambda: self.world.signal(place, id, None)
            case verb:
                return lambda: self.world.operate(place, id, verb)

    @rule(place=places, id=ids, program=programs, wait=st.booleans())
    def trigger(self, place: int, id: str, program: list[str], wait: bool) -> None:
        process = self.world.processes[place]
        self.do(
            lambda: process.trigger("program", program, run_id=id, wait=wait, if_exists="return")
        )

    @rule(place=places)
    def sweep(self, place: int) -> None:
        self.do(self._work("sweep", place, ""))

    @rule(place=places, id=ids, dedup_id=st.sampled_from([None, "x", "y"]))
    def signal(self, place: int, id: str, dedup_id: str | None) -> None:
        self.do(lambda: self.world.signal(place, id, dedup_id))

    @rule(seconds=st.sampled_from([1, 31, 3600, 7200]))
    def advance(self, seconds: int) -> None:
        self.runner.run(self.world.clock.advance(seconds))

    @rule(kind=st.sampled_from(["resume", "retry"]), place=places, id=ids)
    def continue_run(self, kind: str, place: int, id: str) -> None:
        self.do(self._work(kind, place, id))

    @rule(place=places, id=ids)
    @precondition(lambda self: self.world.clock.monotonic() > 3000)
    def cancel(self, place: int, id: str) -> None:
        self.do(self._work("cancel", place, id))

    @rule(verb=verbs, place=places, id=ids)
    def operate(self, verb: str, place: int, id: str) -> None:
        self.do(lambda: self.world.operate(place, id, verb))

    @rule(first=kinds, second=kinds, id=ids)
    def at_once(self, first: str, second: str, id: str) -> None:
        self.do(self._work(first, 0, id), self._work(second, 1, id))

    @rule(kind=kinds, id=ids, place=places, call=st.integers(1, 8), after=st.booleans())
    def crash(self, kind: str, id: str, place: int, call: int, after: bool) -> None:
        wire: Any = self.world.processes[place].store
        wire.die_at(call, after=after)
        self.do(self._work(kind, place, id))
        self.world.start(place)

    @rule(id=ids, program=programs, place=places, call=st.integers(1, 6), after=st.booleans())
    def crash_at_trigger(
        self, id: str, program: list[str], place: int, call: int, after: bool
    ) -> None:
        process = self.world.processes[place]
        wire: Any = process.store
        wire.die_at(call, after=after)
        self.do(lambda: process.trigger("program", program, run_id=id, if_exists="return"))
        self.world.start(place)

    @rule(kind=st.sampled_from(["sweep", "resume", "retry"]), id=ids, place=places,
          turns=st.integers(0, 30))  # fmt: skip
    def interrupt(self, kind: str, id: str, place: int, turns: int) -> None:
        async def interrupted() -> None:
            task = asyncio.ensure_future(self._work(kind, place, id)())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError, RunNotFound):
                await task

        self.do(interrupted)

    @rule(kind=kinds, id=ids, place=places, call=st.integers(0, 8))
    def pause(self, kind: str, id: str, place: int, call: int) -> None:
        wire: Any = self.world.processes[place].store
        wire.pause_at(call)
        work = self._work(kind, place, id)

        async def begin() -> None:
            task = asyncio.ensure_future(work())
            self.paused.append((wire, task))
            for _ in range(200):
                await asyncio.sleep(0)

        self.runner.run(begin())
        self.world.start(place)

    @rule(id=ids, program=programs, call=st.integers(1, 6))
    def overtake(self, id: str, program: list[str], call: int) -> None:
        """Pause a process during its first steps, and continue it when another one owns the run."""
        process = self.world.processes[0]
        wire: Any = process.store
        wire.pause_at(call)

        async def overtaken() -> None:
            first = asyncio.ensure_future(
                process.trigger("program", program, run_id=id, if_exists="return")
            )
            await self.world.clock.advance(TTL + timedelta(seconds=1))
            second = asyncio.ensure_future(self.world.processes[1].sweep())
            await asyncio.sleep(0)
            wire.unpause()
            await asyncio.gather(first, second)

        self.do(overtaken)
        self.world.start(0)

    @rule()
    @precondition(lambda self: self.paused)
    def go_on_after_pause(self) -> None:
        wire, task = self.paused.pop(0)

        async def finish() -> None:
            wire.unpause()
            await task

        self.do(finish)

    @rule()
    def mend(self) -> None:
        self.world.broken = not self.world.broken

    @rule()
    def prune(self) -> None:
        self.do(lambda: self.world.store.prune(timedelta(hours=3)))

    @invariant()
    def all_is_well(self) -> None:
        self.runner.run(self.world.check())

    def teardown(self) -> None:
        """Check that one remaining process brings every run to its end."""
        self.world.broken = False
        self.world.start(0)
        try:
            while self.paused:
                self.go_on_after_pause()
            for _ in range(40):
                self.runner.run(self.world.clock.advance("2h"))
                self.sweep(0)
                for id in self._open_runs():
                    self.operate("unpause", 0, id)
                    self.signal(0, id, None)
                    self.continue_run("retry", 0, id)
                if not self._open_runs():
                    break
            assert self._open_runs() == []
            self.all_is_well()
        finally:
            self.runner.close()

    def _open_runs(self) -> list[str]:
        lines = self.runner.run(self._list())
        return [line.id for line in lines if not is_over(line.status) or line.status == "failed"]

    async def _list(self) -> Any:
        return await self.world.store.list()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
