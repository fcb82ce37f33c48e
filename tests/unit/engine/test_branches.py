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

from perdure import Err, Ok, Snapshot, Step, Workflow
from perdure.errors import NestedStep, RunOver

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


async def named(step: Step, world: World) -> Any:
    found = await step.all({name: lambda name=name: world.work(name) for name in "abc"})
    return [found[name] for name in "abc"]


async def mapped(step: Step, world: World) -> Any:
    return await step.map("each", "abcde", world.work, concurrency=2)


async def called_at_once(step: Step, world: World) -> Any:
    calls = [step("work", lambda name=name: world.work(name)) for name in "abcd"]
    return await asyncio.gather(*calls)


async def waited_for(step: Step, world: World) -> Any:
    async def patient(name: str) -> list[str]:
        return await asyncio.wait_for(world.line(step, name), timeout=60)

    return [await patient("a"), *await asyncio.gather(patient("b"), patient("c"))]


async def keyed(step: Step, world: World) -> Any:
    """Whichever branch comes first runs the keyed step, and the other gets its value."""

    async def shared(name: str) -> Any:
        await world.delay()
        return await step("shared", lambda: world.work("s"), key="k")

    return await asyncio.gather(shared("a"), shared("b"))


SHAPES: list[tuple[Shape, Any]] = [
    (gathered, [steps_of(name) for name in "abc"]),
    (grouped, [steps_of(name) for name in "abc"]),
    (created, [steps_of(name) for name in "abc"]),
    (nested, [[steps_of(f"{name}{n}") for n in ("", ".1-", ".2-")] for name in "ab"]),
    (named, list("abc")),
    (mapped, list("abcde")),
    (called_at_once, list("abcd")),
    (waited_for, [steps_of(name) for name in "abc"]),
    (keyed, ["s", "s"]),
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
        async def line() -> str:
            return await step("y", lambda: "y of branch 1")

        return [await asyncio.create_task(line()), await step("1/y", lambda: "1/y of the root")]

    first = Workflow("w")
    assert await first.run(body) == Ok(["y of branch 1", "1/y of the root"])
    again = Workflow("w", snapshot=first.snapshot())
    assert await again.run(body) == Ok(["y of branch 1", "1/y of the root"])


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


async def test_a_branch_that_nobody_awaited_ends_with_the_run() -> None:
    """It is cancelled, and the steps it calls while it unwinds are refused."""
    refused: list[BaseException] = []

    async def body(step: Step) -> None:
        async def forgotten() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                with pytest.raises(RunOver, match="'late'") as caught:
                    await step("late", lambda: None)
                refused.append(caught.value)

        left = asyncio.create_task(forgotten())
        await asyncio.sleep(0)
        assert not left.done()

    assert await Workflow("w").run(body) == Ok(None)
    assert len(refused) == 1


async def test_a_step_cannot_contain_a_step() -> None:
    """Not in its function, nor in a task that it starts; the error shows what to do instead."""

    async def body(step: Step) -> list[str]:
        async def direct() -> object:
            return await step("inner", lambda: 1)

        async def in_a_task() -> object:
            return await asyncio.create_task(step.sleep("nap", 0))

        errors = []
        for fn in (direct, in_a_task):
            try:
                await step("outer", fn, errors=[NestedStep])
            except NestedStep as error:
                errors.append(str(error))
        return errors

    first, second = (await Workflow("w").run(body)).unwrap()
    assert "'inner' was called inside the function of step 'outer'" in first
    assert "Call both from the workflow function" in second


async def test_a_handle_belongs_to_its_run() -> None:
    """Another run's function cannot record its steps in this one."""

    async def outer(step: Step) -> object:
        async def inner(_: Step) -> object:
            return await step("theirs", lambda: 1)

        return await step("run", lambda: Workflow("inner").run(inner))

    result = await Workflow("outer").run(outer)
    assert isinstance(result, Err)
    assert "handle of" in str(result.error)
