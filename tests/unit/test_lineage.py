"""Identity: a step is known by its name and its branch, whatever the order in which things happen.

Each shape below is a workflow whose parallel branches call the same step ids. The weather (how
often everything yields before, between and inside steps) is drawn from a seed: a run in one weather
is cut off at some step, and another one, in another weather, goes on from its snapshot.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from perdure import Ok, Retry, Snapshot, Step, Workflow
from perdure.errors import RunOver

SEEDS = 300


class World:
    """What steps do, and how long everything takes."""

    def __init__(self, seed: int) -> None:
        self._weather = Random(seed)
        self.ran: Counter[str] = Counter()

    async def delay(self) -> None:
        for _ in range(self._weather.randrange(4)):
            await asyncio.sleep(0)

    async def work(self, thing: str) -> str:
        await self.delay()
        self.ran[thing] += 1
        return thing

    async def line(self, step: Step, name: str) -> list[str]:
        """Three steps under two ids; only the thunk knows which line they belong to."""
        done = []
        for n, id in enumerate(("load", "load", "save")):
            await self.delay()
            done.append(await step(id, lambda n=n: self.work(f"{name}{n}")))
        return done


def steps_of(name: str) -> list[str]:
    return [f"{name}0", f"{name}1", f"{name}2"]


Shape = Callable[[Step, World], Awaitable[Any]]


async def gathered(step: Step, world: World) -> Any:
    return await asyncio.gather(*(world.line(step, name) for name in "abc"))


async def grouped(step: Step, world: World) -> Any:
    async with asyncio.TaskGroup() as group:
        lines = [group.create_task(world.line(step, name)) for name in "abc"]
    return [line.result() for line in lines]


async def created(step: Step, world: World) -> Any:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(world.line(step, "a"))
        own = await world.line(step, "b")
        await world.delay()
        second = group.create_task(world.line(step, "c"))
    return [first.result(), own, second.result()]


async def nested(step: Step, world: World) -> Any:
    async def pair(name: str) -> Any:
        await world.delay()
        own = world.line(step, name)
        return await asyncio.gather(own, *(world.line(step, f"{name}.{n}-") for n in "12"))

    return await asyncio.gather(pair("a"), pair("b"))


async def inside_a_step(step: Step, world: World) -> Any:
    async def pair(name: str) -> Any:
        return await asyncio.gather(world.line(step, f"{name}1-"), world.line(step, f"{name}2-"))

    return [await step("pair", lambda name=name: pair(name)) for name in "ab"]


async def named(step: Step, world: World) -> Any:
    found = await step.all({name: lambda name=name: world.line(step, name) for name in "abc"})
    return [found[name] for name in "abc"]


async def named_inside_a_step(step: Step, world: World) -> Any:
    return await step("all", lambda: named(step, world))


async def mapped(step: Step, world: World) -> Any:
    return await step.map("each", "abcde", lambda name: world.line(step, name), concurrency=2)


async def mapped_inside_a_step(step: Step, world: World) -> Any:
    return await step("all", lambda: mapped(step, world))


async def called_at_once(step: Step, world: World) -> Any:
    calls = [step("work", lambda name=name: world.work(name)) for name in "abcd"]
    return await asyncio.gather(*calls)


async def waited_for(step: Step, world: World) -> Any:
    async def patient(name: str) -> list[str]:
        return await asyncio.wait_for(world.line(step, name), timeout=60)

    return [await patient("a"), *await asyncio.gather(patient("b"), patient("c"))]


async def keyed(step: Step, world: World) -> Any:
    """Whichever branch comes first runs the keyed step, and its inner steps are the same ones."""

    async def shared(name: str) -> Any:
        await world.delay()
        return await step("shared", lambda: world.line(step, "s"), key="k")

    return await asyncio.gather(shared("a"), shared("b"))


SHAPES: list[tuple[Shape, Any]] = [
    (gathered, [steps_of(name) for name in "abc"]),
    (grouped, [steps_of(name) for name in "abc"]),
    (created, [steps_of(name) for name in "abc"]),
    (nested, [[steps_of(f"{name}{n}") for n in ("", ".1-", ".2-")] for name in "ab"]),
    (inside_a_step, [[steps_of(f"{name}{n}-") for n in (1, 2)] for name in "ab"]),
    (named, [steps_of(name) for name in "abc"]),
    (named_inside_a_step, [steps_of(name) for name in "abc"]),
    (mapped, [steps_of(name) for name in "abcde"]),
    (mapped_inside_a_step, [steps_of(name) for name in "abcde"]),
    (called_at_once, list("abcd")),
    (waited_for, [steps_of(name) for name in "abc"]),
    (keyed, [steps_of("s"), steps_of("s")]),
]


async def cut_off(shape: Shape, world: World, after: int) -> Snapshot:
    """Run a shape until so many steps are done, or to its end; give the snapshot of that moment."""
    workflow = Workflow("shape")
    taken = [workflow.snapshot()]
    enough = asyncio.get_running_loop().create_future()

    def take(event: Any) -> None:
        if len(taken) <= after:
            taken.append(event.snapshot)
        if len(taken) > after and not enough.done():
            enough.set_result(None)

    workflow.subscribe(take)
    running = asyncio.create_task(workflow.run(lambda_of(shape, world)))
    await asyncio.wait([running, enough], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait([running])
    enough.cancel()
    restored: Snapshot = json.loads(json.dumps(taken[-1]))
    return restored


def lambda_of(shape: Shape, world: World) -> Callable[[Step], Awaitable[Any]]:
    async def run(step: Step) -> Any:
        return await shape(step, world)

    return run


def recorded_by(snapshot: Snapshot) -> set[str]:
    return {
        record["value"] for record in snapshot["steps"].values() if type(record["value"]) is str
    }


@pytest.mark.parametrize(("shape", "expected"), SHAPES, ids=lambda it: getattr(it, "__name__", ""))
async def test_branches_replay_right_in_any_order(shape: Shape, expected: Any) -> None:
    """Every call gets its own record back, in whatever order branches come, and no recorded step
    runs again.
    """
    for seed in range(SEEDS):
        snapshot = await cut_off(shape, World(seed), after=Random(seed).randrange(12))
        world = World(seed + SEEDS)
        resumed = Workflow("shape", snapshot=snapshot, on_unknown_steps="error")
        assert await resumed.run(lambda_of(shape, world)) == Ok(expected), f"seed {seed}"
        again = recorded_by(snapshot) & world.ran.keys()
        assert not again, f"seed {seed}: {again} ran again"
        assert set(world.ran.values()) <= {1}


async def test_an_id_that_looks_like_a_repeat_is_none() -> None:
    """`x#2` by name and the second `x` are two steps."""

    async def body(step: Step) -> list[int]:
        return [await step(id, lambda n=n: n) for n, id in enumerate(("x", "x#2", "x", "x#2"))]

    first = Workflow("w")
    assert await first.run(body) == Ok([0, 1, 2, 3])
    assert await Workflow("w", snapshot=first.snapshot()).run(body) == Ok([0, 1, 2, 3])


async def test_ids_with_slashes_stay_in_their_branch() -> None:
    """An id is a name and not a path, whatever is in it."""

    async def body(step: Step) -> list[Any]:
        async def outer() -> str:
            return await step("x", lambda: "inside 1/y")

        async def line() -> str:
            return await step("y", lambda: step("x", lambda: "inside y of branch 1"))

        return [await asyncio.create_task(line()), await step("1/y", outer)]

    first = Workflow("w")
    seen = await first.run(body)
    assert seen == Ok(["inside y of branch 1", "inside 1/y"])


async def test_wait_for_is_no_branch() -> None:
    """It starts a task in Python 3.11 and none in later ones: a run must not know which."""

    async def body(step: Step) -> list[int]:
        async def line() -> int:
            return await step("x", lambda: 1)

        return [await asyncio.wait_for(line(), 60), await step("x", lambda: 2)]

    workflow = Workflow("w")
    assert await workflow.run(body) == Ok([1, 2])
    assert list(workflow.snapshot()["steps"]) == ["x", "x#2"]
    assert not any("branch" in record for record in workflow.snapshot()["steps"].values())


async def test_listeners_are_no_branches() -> None:
    """What listeners start beside a run does not move the numbers of its branches."""
    ran: list[str] = []

    async def body(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", lambda: ran.append(name) or name)

        await step("first", lambda: None)
        return await asyncio.gather(line("a"), line("b"))

    async def save(event: object) -> None:
        await asyncio.sleep(0)

    first = Workflow("w", on_event=lambda event: asyncio.ensure_future(save(event)))
    first.subscribe(save)
    first.subscribe(save, mode="async")
    await first.run(body)
    await first.flush()
    ran.clear()
    assert await Workflow("w", snapshot=first.snapshot()).run(body) == Ok(["a", "b"])
    assert ran == []


async def test_caches_are_no_branches() -> None:
    """A cache that works with tasks of its own is no part of the function."""
    ran: list[str] = []

    class TaskCache:
        async def get(self, key: str) -> None: ...

        async def set(self, key: str, record: object) -> None:
            await asyncio.create_task(asyncio.sleep(0))

        async def delete(self, key: str) -> None: ...

    async def body(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", lambda: ran.append(name) or name)

        await step("first", lambda: None, key="first")
        return await asyncio.gather(line("a"), line("b"))

    first = Workflow("w", cache=TaskCache())
    await first.run(body)
    ran.clear()
    assert await Workflow("w", snapshot=first.snapshot()).run(body) == Ok(["a", "b"])
    assert ran == []


async def test_a_run_inside_a_step_has_branches_of_its_own() -> None:
    """The same ids inside and outside do not meet."""

    async def inner(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", lambda: name)

        return await asyncio.gather(line("inner a"), line("inner b"))

    async def outer(step: Step) -> list[Any]:
        found = await step("x", lambda: Workflow("inner").run(inner))
        return [found, await step("x", lambda: "outer")]

    assert await Workflow("outer").run(outer) == Ok([["inner a", "inner b"], "outer"])


async def test_the_loops_own_task_factory_is_kept() -> None:
    """It makes the tasks during a run, and stands alone again afterwards."""
    made: list[str] = []

    def factory(loop: Any, coro: Any, **options: Any) -> Any:
        made.append(coro.__name__)
        return asyncio.Task(coro, loop=loop, **options)

    async def line(step: Step) -> int:
        return await step("x", lambda: 1)

    async def body(step: Step) -> list[int]:
        return await asyncio.gather(line(step), line(step))

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        assert await Workflow("w").run(body) == Ok([1, 1])
        assert made == ["line", "line"]
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)


async def test_a_step_after_the_end_is_refused() -> None:
    """A branch that nobody awaited finds the run over, with an error that says which step."""
    started: list[asyncio.Task[Any]] = []

    async def body(step: Step) -> None:
        async def forgotten() -> None:
            await asyncio.sleep(0)
            await step("late", lambda: None)

        started.append(asyncio.create_task(forgotten()))

    await Workflow("w").run(body)
    with pytest.raises(RunOver, match="'late'"):
        await started[0]


async def test_a_retry_tries_the_failed_steps_inside_it_again() -> None:
    """What made the attempt fail runs again; what it finished answers from its record."""
    ran: Counter[str] = Counter()

    async def flaky() -> int:
        ran["flaky"] += 1
        if ran["flaky"] < 3:
            raise ValueError("not yet")
        return ran["flaky"]

    async def body(step: Step) -> int:
        async def outer() -> int:
            await step("done", lambda: ran.update(["done"]))
            return await step("flaky", flaky)

        return await step("outer", outer, retry=Retry(5, delay=0))

    assert await Workflow("w").run(body) == Ok(3)
    assert ran == {"done": 1, "flaky": 3}
