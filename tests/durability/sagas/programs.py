"""Random programs with undos, an interpreter for them, and a model of what they may do.

A program is JSON: a list of nodes, each a list that begins with its kind.

    ["do", id, undo, ok]       a step; undo is "", "ok", "flaky" or "broken"
    ["saga", id, nodes, caught]
    ["all" | "gather" | "group", [nodes, …]]
    ["race", id, [nodes, …]]
    ["map", id, items, failing]
    ["sleep", id, duration]    ["wait", id]    ["cancel", id]    ["caught", nodes]
    ["raise"] or ["raise", id], after a step
"""

import asyncio
from random import Random
from typing import Any

from perdure import Client, Retry, Run, Step, durable, workflow
from perdure.clock import Clock, SystemClock
from perdure.errors import RollbackFailed
from perdure.snapshot.rollback import UNDO
from perdure.store import Store
from perdure.stores import MemoryStore

Node = list[Any]
Effect = tuple[str, str, str]


class World:
    """What the steps of a program did, in order: what, to which step, with which key."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.clock: Clock = SystemClock()
        self.store: Store = MemoryStore()

    def open(self, clock: Clock) -> Store:
        """Start a new process."""
        self.effects = []
        self.clock, self.store = clock, MemoryStore(clock=clock)
        return self.store

    def use(self, store: Store) -> None:
        """Start a new process on a store with the system clock."""
        self.effects = []
        self.clock, self.store = SystemClock(), store

    def note(self, what: str, id: str) -> None:
        self.effects.append((what, id, durable.current().idempotency_key))

    async def cancel(self, run_id: str) -> None:
        await Client(self.store, clock=self.clock).cancel(run_id, reason="asked for")
        # The run is cancelled here when it renews its lease, unless its process has crashed.
        await self.clock.sleep(120)


WORLD = World()


class Planned(Exception):
    """A failure that the program asks for."""


async def do(id: str, ok: bool) -> str:
    WORLD.note("do", id)
    # As with a service: a branch that is cancelled does not come to record another step.
    for _ in range(5):
        await asyncio.sleep(0)
    if not ok:
        raise Planned(id)
    return id


async def undo(id: str) -> None:
    WORLD.note("undo", id)


async def flaky_undo(id: str) -> None:
    WORLD.note("try", id)
    if durable.current().attempt < 3:
        raise Planned(id)
    WORLD.note("undo", id)


async def broken_undo(id: str) -> None:
    WORLD.note("try", id)
    raise Planned(f"undo of {id}")


UNDOS: dict[str, Any] = {"": None, "ok": undo, "flaky": flaky_undo, "broken": broken_undo}


async def interpret(step: Step, nodes: list[Node]) -> None:
    for kind, *arguments in nodes:
        await HANDLERS[kind](step, *arguments)


async def _do(step: Step, id: str, undo: str, ok: bool) -> None:
    await step(id, do, id, ok, undo=UNDOS[undo])


async def _saga(step: Step, id: str, nodes: list[Node], caught: bool) -> None:
    try:
        async with step.saga(id, undo_retry=Retry(3, delay=0)):
            await interpret(step, nodes)
    except Exception:
        if not caught:
            raise


async def _all(step: Step, parts: list[list[Node]]) -> None:
    await step.all(*(interpret(step, nodes) for nodes in parts))


async def _gather(step: Step, parts: list[list[Node]]) -> None:
    await asyncio.gather(*(interpret(step, nodes) for nodes in parts))


async def _group(step: Step, parts: list[list[Node]]) -> None:
    async with asyncio.TaskGroup() as group:
        for nodes in parts:
            group.create_task(interpret(step, nodes))


async def _race(step: Step, id: str, parts: list[list[Node]]) -> None:
    await step.race(id, *(interpret(step, nodes) for nodes in parts))


async def _map(step: Step, id: str, items: int, failing: int) -> None:
    async def each(n: int) -> str:
        if n == failing:
            # Others are recorded before it.
            await WORLD.clock.sleep(1)
        return await do(f"{id}[{n}]", n != failing)

    await step.map(id, range(items), each, concurrency=2, undo=undo)


async def _sleep(step: Step, id: str, duration: str) -> None:
    await step.sleep(id, duration)


async def _wait(step: Step, id: str) -> None:
    await step.wait_for_event(id, "go")


async def _cancel(step: Step, id: str) -> None:
    await step(id, WORLD.cancel, step.run_id)


async def _raise(step: Step, id: str = "") -> None:
    if id:
        # In a branch, others come as far as they were when this was recorded.
        await step(id, do, id, True)
    raise Planned("the function")


async def _caught(step: Step, nodes: list[Node]) -> None:
    try:
        await interpret(step, nodes)
    except Exception:  # noqa: BLE001  # the program asks for it
        return


HANDLERS: dict[str, Any] = {
    "do": _do,
    "saga": _saga,
    "all": _all,
    "gather": _gather,
    "group": _group,
    "race": _race,
    "map": _map,
    "sleep": _sleep,
    "wait": _wait,
    "cancel": _cancel,
    "raise": _raise,
    "caught": _caught,
}


@workflow("saga-program", deadline="1d")
async def program(step: Step, nodes: list[Any]) -> str:
    """Run a program."""
    await interpret(step, nodes)
    return "done"


def draw(seed: int) -> list[Node]:
    """Return the program of a seed."""
    return _Author(Random(seed)).program()


def in_real_time(nodes: Any) -> Any:
    """Return a program with short sleeps; one that sleeps past its deadline still does."""
    if not isinstance(nodes, list):
        return nodes
    if nodes[:1] == ["sleep"]:
        return [*nodes[:2], {"1m": "20ms", "1h": "60ms"}.get(nodes[2], "1m")]
    return [in_real_time(node) for node in nodes]


class _Author:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._ids = 0

    def program(self) -> list[Node]:
        nodes = self._nodes(self._random.randint(2, 4), depth=2)
        last = self._random.choice(["fail", "fail", "raise", "cancel", "late", "well"])
        ends: dict[str, list[Node]] = {
            "fail": [["do", self._id(), "", False]],
            "raise": [["raise"]],
            "cancel": [["cancel", self._id()]],
            "late": [["sleep", self._id(), "2d"]],
            "well": [],
        }
        return [*nodes, *ends[last]]

    def _id(self) -> str:
        self._ids += 1
        return f"s{self._ids}"

    def _nodes(self, most: int, depth: int) -> list[Node]:
        return [self._node(depth) for _ in range(self._random.randint(1, most))]

    def _node(self, depth: int) -> Node:
        random = self._random
        if depth == 0 or random.random() < 0.45:
            return self._leaf()
        kind = random.choice(["saga", "saga", "all", "gather", "group", "race", "map", "caught"])
        if kind == "saga":
            return ["saga", self._id(), self._nodes(3, depth - 1), random.random() < 0.5]
        if kind == "map":
            return ["map", self._id(), 3, random.choice([-1, -1, 1])]
        if kind == "caught":
            return ["caught", self._nodes(2, depth - 1)]
        parts = [self._nodes(2, depth - 1) for _ in range(2)]
        return ["race", self._id(), parts] if kind == "race" else [kind, parts]

    def _leaf(self) -> Node:
        random = self._random
        if random.random() < 0.15:
            return ["sleep", self._id(), "1h"]
        if random.random() < 0.05:
            return ["raise", self._id()]
        undo = random.choice(["ok", "ok", "ok", "flaky", "broken", ""])
        return ["do", self._id(), undo, random.random() > 0.12]


def broken_in(nodes: Any) -> list[str]:
    """Return the ids of the steps of a program whose undo does not work."""
    if not isinstance(nodes, list):
        return []
    if nodes[:1] == ["do"]:
        return [nodes[1]] if nodes[2] == "broken" else []
    return [id for node in nodes for id in broken_in(node)]


A, B, C = (["do", id, "ok", True] for id in "abc")
FAIL, LATER, SOON, WAIT = (
    ["do", "f", "", False],
    ["sleep", "x", "1h"],
    ["sleep", "y", "1m"],
    ["wait", "w"],
)

NAMED: dict[str, list[Node]] = {
    "a branch that lost a race": [["race", "r", [[A, LATER], [SOON]]], B, ["raise"]],
    "a step that lost a race": [["race", "r", [[A, LATER], [SOON]]], ["cancel", "c"]],
    "a scope in a branch that lost": [
        ["race", "r", [[["saga", "s", [A, B, LATER], False]], [SOON]]],
        C,
        FAIL,
    ],
    "items after one that failed": [["map", "m", 4, 0]],
    "branches that a failure cancels": [["group", [[SOON, FAIL], [A, B, LATER], [C]]]],
    "branches that the function cancels": [
        ["group", [[SOON, ["raise"]], [["gather", [[A], [B]]], LATER], [C]]]
    ],
    "a scope whose branches it cancels": [
        ["saga", "s", [["group", [[SOON, ["raise"]], [["gather", [[A], [B]]], LATER]]]], True],
        C,
        FAIL,
    ],
    "a race that failed": [["race", "r", [[A, ["gather", [[B], [C]]], LATER], [SOON, FAIL]]]],
    "a scope with a race that failed": [
        ["saga", "s", [["race", "r", [[A, LATER], [SOON, FAIL]]]], True],
        B,
        ["cancel", "d"],
    ],
    "nested scopes": [["saga", "s", [A, ["saga", "t", [B], False], C, FAIL], True], ["raise"]],
    "scopes in branches": [
        ["all", [[["saga", "s", [A, FAIL], True]], [["saga", "t", [B], True]], [C]]],
        ["sleep", "late", "2d"],
    ],
    "undos that fail": [
        ["do", "a", "broken", True],
        ["saga", "s", [["do", "b", "broken", True], ["do", "c", "flaky", True], FAIL], False],
    ],
}
"""Programs for what is easily forgotten."""


def check(run: Run, effects: list[Effect], crashes: int) -> None:
    """Raise `AssertionError` if a run that is over has not undone what it had to."""
    records = {step.key: step for step in run.history}
    marked = [step.key for step in run.history if step.undo]
    undone = [key for key in marked if UNDO + key in records and records[UNDO + key].ok]
    sagas: list[Any] = [step.value for step in run.history if step.kind == "saga"]
    in_sagas = [key for saga in sagas for key in saga["undoes"]]
    assert len(set(in_sagas)) == len(in_sagas), "a step is undone by one scope"
    failed = run.error.failures if isinstance(run.error, RollbackFailed) else {}
    if run.status == "completed":
        assert run.rollback is None
        assert set(undone) <= set(in_sagas), "a completed run undoes only the steps of scopes"
        assert {UNDO + key for key in in_sagas} <= set(records), "a scope is undone completely"
    else:
        assert set(marked) == set(undone) | set(failed), "each step is undone or reported"
        assert set(failed) <= set(broken_in(run.payload)), "only a broken undo is reported"
    _check_effects(effects, set(undone), crashes)
    _check_order(run, marked, in_sagas, sagas)
    at_the_end = [key for key in undone if key not in in_sagas]
    _check_nothing_begins(effects, at_the_end)


def _check_effects(effects: list[Effect], undone: set[str], crashes: int) -> None:
    """Each step that was undone was undone once, and once more at most if a process crashed."""
    did = [id for what, id, _ in effects if what == "undo"]
    assert undone <= set(did), "undone means undone"
    assert crashes or undone == set(did), "what was undone is recorded"
    for id in set(did):
        assert did.count(id) <= 1 + crashes, f"{id} was undone {did.count(id)} times"
        keys = {key for what, each, key in effects if each == id and what in ("undo", "try")}
        assert len(keys) == 1, "an undo has one idempotency key"
        assert keys.isdisjoint(key for what, each, key in effects if what == "do" and each == id)


def _check_order(run: Run, marked: list[str], in_sagas: list[str], sagas: list[Any]) -> None:
    undos = [step.key.removeprefix(UNDO) for step in run.history if step.key.startswith(UNDO)]
    groups = [saga["undoes"] for saga in sagas]
    groups.append([key for key in marked if key not in in_sagas])
    for group in groups:
        order = [key for key in undos if key in group]
        assert order == sorted(order, key=marked.index, reverse=True), "the last one comes first"


def _check_nothing_begins(effects: list[Effect], at_the_end: list[str]) -> None:
    """When the run as a whole is undone, no more steps begin."""
    first = next(
        (n for n, each in enumerate(effects) if each[:2] in {("undo", k) for k in at_the_end}), None
    )
    if first is not None:
        assert [each for each in effects[first:] if each[0] == "do"] == [], "no step begins"
