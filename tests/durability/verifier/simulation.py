"""One program in simulated time: processes on a faulty store in memory, thousands per minute.

The event loop's clock jumps to the next timer whenever nothing is left to do, so that waiting takes
no time and a seed reproduces a run. A killed process is one whose store calls never return and
whose log is closed; a paused one waits in its next store call for longer than its lease.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import Runtime, Worker
from perdure.clock import finite_seconds
from perdure.errors import StoreUnavailable
from perdure.store import Entry, Verdict
from perdure.stores.memory import MemoryStore
from tests.durability.verifier import language as lang
from tests.durability.verifier.checker import Evidence, Violation, check
from tests.durability.verifier.interpreter import World
from tests.durability.verifier.log import ErrorLog, Line, Witness
from tests.durability.verifier.operator import Outside
from tests.durability.verifier.report import Tally

LEASE = 1.0
TROUBLE = 4.0
DEADLINE = 120.0
COMMIT = 0.03
RUN = "run"
_TURN = 0.00005


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its address in memory.

    A task group cancels its tasks in the order of a set.
    """

    def __init__(self, *arguments: Any, number: int, **options: Any) -> None:
        # Set first, because asyncio puts the task into a set.
        self._number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when nothing is left to do, its clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self._simulated = 0.0
        self._numbers = count(1)
        self.set_task_factory(self._new_task)
        self._poll = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Return the simulated time."""
        return self._simulated

    def _new_task(self, _: object, work: Any, **options: Any) -> NumberedTask:
        return NumberedTask(work, loop=self, number=next(self._numbers), **options)

    def _jump(self, timeout: float | None) -> Any:
        # An iteration of the loop takes time too: a cancelled task group of anyio spins until its
        # branches have ended.
        self._simulated += max(timeout or 0, _TURN)
        return self._poll(0)


class LoopClock:
    """A `Clock` that shows the loop's time."""

    def now(self) -> datetime:
        """Return the simulated time of day."""
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        """Return the loop's time."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float | timedelta, /) -> None:
        """Sleep in simulated time."""
        await asyncio.sleep(finite_seconds(seconds))


class LedgerStore(MemoryStore):
    """A store in memory with transactions: rows that are committed together with an entry."""

    def __init__(self, clock: LoopClock) -> None:
        super().__init__(clock=clock)
        self.rows: list[tuple[str, str]] = []

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        """Commit what `work` inserts together with the entry it returns."""
        inserted: list[tuple[str, str]] = []
        entry = await work(inserted)
        await asyncio.sleep(COMMIT)
        [verdict] = await self.append([entry])
        if verdict is Verdict.ACCEPTED:
            self.rows += inserted
        return verdict


async def insert(connection: Any, run: str, path: str, token: str) -> None:
    """Insert a row of a transaction."""
    connection.append((path, token))


class Conditions(msgspec.Struct, frozen=True):
    """Under which conditions a program is run."""

    seed: str
    always_replay: bool
    suspend_after: float
    latency: float
    faults: float
    kills: float

    @classmethod
    def draw(cls, seed: str) -> "Conditions":
        """Return the conditions of a seed."""
        random = Random(f"conditions {seed}")
        return cls(
            seed=seed,
            always_replay=random.random() < 0.3,
            suspend_after=random.choice((0, 0.05, 0.2, 1)),
            latency=random.choice((0, 0.002, 0.02, 0.1)),
            faults=random.choice((0, 0, 0.01, 0.05)),
            kills=random.choice((0, 0, 0.3, 1)),
        )


class MemoryLog:
    """The log of one process; a dead process writes nothing."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = lines
        self.dead = False

    def write(self, line: Line) -> None:
        """Append a line."""
        if not self.dead:
            self._lines.append(line)


class Wire(Witness):
    """A process's connection to the store: slow, sometimes failing, paused, or dead."""

    def __init__(self, store: LedgerStore, log: MemoryLog, name: str, at: Conditions) -> None:
        super().__init__(store, log, name)
        self._random = Random(f"{at.seed} {name}")
        self._latency = at.latency
        self._watched = log
        self.faults = at.faults
        self._forever: list[asyncio.Future[None]] = []
        self.open = asyncio.Event()
        self.open.set()

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        if name.startswith("_") or name in ("capabilities", "close", "documents", "notifications"):
            return attribute

        async def verb(*arguments: Any, **options: Any) -> Any:
            await self._travel()
            # Commits are rare among the calls, and a lost reply to one is what breaks a run.
            faults = min(1, self.faults * (8 if name == "transact" else 1))
            fault = self._random.random() / faults if faults else 9
            if fault < 0.5:
                raise StoreUnavailable(f"{name} failed before it did anything")
            answer = await attribute(*arguments, **options)
            await self._travel()
            if fault < 1:
                raise StoreUnavailable(f"{name} failed after it had done its work")
            return answer

        return verb

    async def _travel(self) -> None:
        if self._latency:
            await asyncio.sleep(self._random.random() * self._latency)
        await self.open.wait()
        if self._watched.dead:
            # Referenced here, because a task without a reference may be garbage collected.
            self._forever.append(asyncio.get_running_loop().create_future())
            await self._forever[-1]


class Process:
    """A simulated process."""

    def __init__(self, simulation: "Simulation", name: str, at: Conditions) -> None:
        self.log = MemoryLog(simulation.lines)
        self.wire = Wire(simulation.store, self.log, name, at)
        world = World(name, self.log, healed=simulation.healed.__contains__, insert=insert)
        self.runtime = Runtime(
            self.wire,
            workflows=world.definitions(),
            clock=LoopClock(),
            lease_ttl=LEASE,
            suspend_after=at.suspend_after,
            always_replay=at.always_replay,
            random=Random(f"{at.seed} {name} engine"),
        )
        self._worker = Worker(self.runtime, poll=0.3, grace=0.3, max_crashes=10_000)

    def start(self) -> None:
        """Start working."""
        self._main = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        async with self._worker:
            await asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        self.log.dead = True

    async def pause(self) -> None:
        """Stop it for longer than its lease."""
        self.wire.open.clear()
        await asyncio.sleep(LEASE * 1.7)
        self.wire.open.set()

    async def drain(self) -> None:
        """Stop it gracefully."""
        self._main.cancel()
        await asyncio.wait([self._main])

    async def cut_off(self) -> None:
        """Let all its store calls fail for a while, before or after they took effect."""
        faults, self.wire.faults = self.wire.faults, 1
        await asyncio.sleep(0.2)
        self.wire.faults = faults


class Simulation:
    """A program, its processes, and its disturbances."""

    def __init__(self, program: lang.Body, at: Conditions, lines: list[Line], tally: Tally) -> None:
        self.at = at
        self.lines = lines
        self.store = LedgerStore(LoopClock())
        self.healed: set[str] = set()
        self._tally = tally
        self._random = Random(f"{at.seed} nemesis")
        self._started: list[Process] = []
        client = Process(self, "op", replace(at, latency=0, faults=0, always_replay=False))
        self._outside = Outside(
            client.runtime,
            RUN,
            program,
            client.log,
            heal=self.healed.add,
            random=Random(f"{at.seed} outside"),
        )

    def _start(self) -> Process:
        process = Process(self, f"w{len(self._started) + 1}", self.at)
        process.start()
        self._started.append(process)
        return process

    async def live(self) -> Evidence:
        """Run the program to its end, and return what happened."""
        nemesis = asyncio.ensure_future(self._trouble())
        await self._outside.see_to_the_end(TROUBLE, DEADLINE)
        await nemesis
        # Leftover tasks get a chance to undo the end.
        await asyncio.sleep(1)
        await self._outside.read()
        ends = self._outside.ends
        children = self._outside.children
        return Evidence(RUN, self._outside.program, self.lines, ends, self.store.rows, children)

    async def _trouble(self) -> None:
        processes = [self._start(), self._start()]
        loop = asyncio.get_running_loop()
        until = loop.time() + TROUBLE
        while self.at.kills and loop.time() < until and not self._outside.over:
            await asyncio.sleep(self._random.expovariate(self.at.kills * 2))
            number = self._random.randrange(2)
            if await self._harm(processes[number]):
                processes[number] = self._start()
        for process in processes:
            process.wire.faults = 0

    async def _harm(self, victim: Process) -> bool:
        """Do something to a process; return whether it has to be replaced."""
        match self._random.choice(("kill", "kill", "pause", "drain", "cut")):
            case "kill":
                self._tally.kills += 1
                victim.kill()
                return True
            case "pause":
                self._tally.pauses += 1
                await victim.pause()
            case "drain":
                self._tally.drains += 1
                await victim.drain()
                return True
            case _:
                self._tally.cuts += 1
                await victim.cut_off()
        return False


def simulate(
    program: lang.Body, at: Conditions, tally: Tally
) -> tuple[list[Violation], list[Line]]:
    """Run a program once; return its violations and the log."""
    loop = SimulatedLoop()
    loop.set_exception_handler(lambda *_: None)
    lines: list[Line] = []

    # Referenced until its tasks have ended: the loop holds no reference to waiting tasks.
    simulations: list[Simulation] = []

    async def live() -> Evidence:
        simulations.append(Simulation(program, at, lines, tally))
        return await simulations[0].live()

    tally.runs += 1
    try:
        with ErrorLog(MemoryLog(lines), "op", RUN):
            return check(loop.run_until_complete(live())), lines
    finally:
        _close(loop)


def _close(loop: SimulatedLoop) -> None:
    """End every task, including those of dead processes, and close the loop."""
    for _ in range(20):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1))
    loop.close()
