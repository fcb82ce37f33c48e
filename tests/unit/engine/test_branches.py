"""A step is identified by its name and its branch, whatever the order of execution.

Each shape below is a workflow whose parallel branches call the same step ids. How often a branch
yields before, between and inside steps is drawn from a seed: a run is stopped after some step, and
another run, with other delays, resumes from its snapshot.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from functools import partial
from random import Random
from typing import Any

import pytest

from perdure import Err, Ok, Snapshot, Step, Workflow
from perdure.errors import NestedStep, RunOver

SEEDS = 300


class World:
    """What the steps do, and how often each branch yields."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.ran: Counter[str] = Counter()

    async def delay(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def work(self, name: str) -> str:
        await self.delay()
        self.ran[name] += 1
        return name

    async def line(self, step: Step, name: str) -> list[str]:
        """Run three steps under two ids.

        The name is not an argument of the steps: the record of another line would not be refused.
        """
        values: list[str] = []
        for n, id in enumerate(("load", "load", "save")):
            await self.delay()
            values.append(await step(id, partial(self.work, f"{name}{n}")))
        return values


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
    values = await step.all({name: partial(world.work, name) for name in "abc"})
    return [values[name] for name in "abc"]


async def mapped(step: Step, world: World) -> Any:
    return await step.map("each", "abcde", world.work, concurrency=2)


async def called_concurrently(step: Step, world: World) -> Any:
    calls = [step("work", partial(world.work, name)) for name in "abcd"]
    return await asyncio.gather(*calls)


async def timed(step: Step, world: World) -> Any:
    async def with_timeout(name: str) -> list[str]:
        return await asyncio.wait_for(world.line(step, name), timeout=60)

    return [await with_timeout("a"), *await asyncio.gather(with_timeout("b"), with_timeout("c"))]


async def as_completed(step: Step, world: World) -> Any:
    """Asyncio puts the coroutines into a set, and starts them in its order."""
    lines = [world.line(step, name) for name in "abcd"]
    return sorted([await line for line in asyncio.as_completed(lines)])


class Line:
    """An object that can be awaited, which is not a coroutine."""

    def __init__(self, line: Awaitable[list[str]]) -> None:
        self._line = line

    def __await__(self) -> Generator[Any, None, list[str]]:
        return self._line.__await__()


async def awaitables_as_completed(step: Step, world: World) -> Any:
    first = asyncio.create_task(world.line(step, "a"))
    lines: list[Awaitable[list[str]]] = [Line(world.line(step, name)) for name in "bcd"]
    return sorted([await line for line in asyncio.as_completed([*lines, first])])


async def calls_as_completed(step: Step, world: World) -> Any:
    """A call of a step has its identity before it is started."""
    calls = {step("work", partial(world.work, name)) for name in "abcd"}
    return sorted([await call for call in asyncio.as_completed(calls)])


async def keyed(step: Step, world: World) -> Any:
    """The first branch to call the keyed step runs it, and the other gets its value."""

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
    (called_concurrently, list("abcd")),
    (timed, [steps_of(name) for name in "abc"]),
    (as_completed, [steps_of(name) for name in "abcd"]),
    (awaitables_as_completed, [steps_of(name) for name in "abcd"]),
    (calls_as_completed, list("abcd")),
    (keyed, ["s", "s"]),
]


async def interrupt(shape: Shape, world: World, after: int) -> Snapshot:
    """Run a shape until `after` steps are recorded, or to its end; return the snapshot then."""
    workflow = Workflow("shape")
    snapshots = [workflow.snapshot()]
    enough = asyncio.get_running_loop().create_future()

    def keep(event: Any) -> None:
        if len(snapshots) <= after:
            snapshots.append(event.snapshot)
        if len(snapshots) > after and not enough.done():
            enough.set_result(None)

    workflow.subscribe(keep)
    running = asyncio.create_task(workflow.run(body_of(shape, world)))
    await asyncio.wait([running, enough], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait([running])
    enough.cancel()
    restored: Snapshot = json.loads(json.dumps(snapshots[-1]))
    return restored


def body_of(shape: Shape, world: World) -> Callable[[Step], Awaitable[Any]]:
    async def run(step: Step) -> Any:
        return await shape(step, world)

    return run


def recorded_values(snapshot: Snapshot) -> set[str]:
    """Return the strings that steps recorded; no step of a shape fails."""
    records: list[Any] = list(snapshot["steps"].values())
    return {record["value"] for record in records if type(record["value"]) is str}


@pytest.mark.parametrize(("shape", "expected"), SHAPES, ids=lambda it: getattr(it, "__name__", ""))
async def test_each_call_gets_its_own_record_in_any_order_of_execution(
    shape: Shape, expected: Any
) -> None:
    """No recorded step runs again."""
    for seed in range(SEEDS):
        snapshot = await interrupt(shape, World(seed), after=Random(seed).randrange(12))
        world = World(seed + SEEDS)
        resumed = Workflow("shape", snapshot=snapshot, on_unknown_steps="error")
        assert await resumed.run(body_of(shape, world)) == Ok(expected), f"seed {seed}"
        again = recorded_values(snapshot) & world.ran.keys()
        assert not again, f"seed {seed}: {again} ran again"
        assert set(world.ran.values()) <= {1}


async def test_an_id_with_a_number_sign_is_not_a_repeated_id() -> None:
    """The step `x#2` and the second call of `x` are two steps."""

    async def same(n: int) -> int:
        return n

    async def body(step: Step) -> list[int]:
        ids = ("x", "x#2", "x", "x#2")
        return [await step(id, partial(same, n)) for n, id in enumerate(ids)]

    first = Workflow("w")
    assert await first.run(body) == Ok([0, 1, 2, 3])
    assert await Workflow("w", snapshot=first.snapshot()).run(body) == Ok([0, 1, 2, 3])


async def test_an_id_with_a_slash_is_not_a_path() -> None:
    """It belongs to the branch that called it."""

    async def body(step: Step) -> list[Any]:
        async def line() -> str:
            return await step("y", lambda: "y of branch 1")

        return [await asyncio.create_task(line()), await step("1/y", lambda: "1/y of the root")]

    first = Workflow("w")
    assert await first.run(body) == Ok(["y of branch 1", "1/y of the root"])
    again = Workflow("w", snapshot=first.snapshot())
    assert await again.run(body) == Ok(["y of branch 1", "1/y of the root"])


@pytest.mark.parametrize("collect", [iter, set])
async def test_branches_without_an_order_are_refused(collect: Callable[[Any], Any]) -> None:
    """A replay could not tell which of them has which records."""
    world = World(0)

    async def function(step: Step) -> None:
        lines = [world.line(step, name) for name in "ab"]
        with closing(lines[0]), closing(lines[1]):
            for line in asyncio.as_completed(collect(lines)):
                await line

    result = await Workflow("unordered").run(function)
    assert isinstance(result, Err)
    assert "as_completed starts them in any order" in str(result.error)
    assert not world.ran


async def test_wait_for_is_not_a_branch() -> None:
    """It creates a task in Python 3.11 but not in later versions; keys must not depend on that."""

    async def body(step: Step) -> list[int]:
        async def line() -> int:
            return await step("x", lambda: 1)

        return [await asyncio.wait_for(line(), 60), await step("x", lambda: 2)]

    workflow = Workflow("w")
    assert await workflow.run(body) == Ok([1, 2])
    assert list(workflow.snapshot()["steps"]) == ["x", "x#2"]
    assert not any("branch" in record for record in workflow.snapshot()["steps"].values())


async def test_tasks_of_listeners_are_not_branches() -> None:
    """They do not change the numbers of the run's branches."""
    ran: list[str] = []

    async def work(name: str) -> str:
        ran.append(name)
        return name

    async def body(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", partial(work, name))

        await step("first", lambda: None)
        return list(await asyncio.gather(line("a"), line("b")))

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


async def test_tasks_of_a_cache_are_not_branches() -> None:
    """They do not change the numbers of the run's branches."""
    ran: list[str] = []

    class TaskCache:
        async def get(self, key: str) -> None: ...

        async def set(self, key: str, record: object) -> None:
            await asyncio.create_task(asyncio.sleep(0))

        async def delete(self, key: str) -> None: ...

    async def work(name: str) -> str:
        ran.append(name)
        return name

    async def body(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", partial(work, name))

        await step("first", lambda: None, key="first")
        return list(await asyncio.gather(line("a"), line("b")))

    first = Workflow("w", cache=TaskCache())
    await first.run(body)
    ran.clear()
    assert await Workflow("w", snapshot=first.snapshot()).run(body) == Ok(["a", "b"])
    assert ran == []


async def test_a_run_inside_a_step_has_its_own_branches() -> None:
    """The same ids can be used inside and outside."""

    async def inner(step: Step) -> list[str]:
        async def line(name: str) -> str:
            return await step("x", lambda: name)

        return list(await asyncio.gather(line("inner a"), line("inner b")))

    async def outer(step: Step) -> list[Any]:
        values = await step("x", lambda: Workflow("inner").run(inner))
        return [values, await step("x", lambda: "outer")]

    assert await Workflow("outer").run(outer) == Ok([["inner a", "inner b"], "outer"])


async def test_the_task_factory_of_the_loop_is_kept() -> None:
    """It creates the tasks of a run, and is installed again afterwards."""
    created_tasks: list[str] = []

    def factory(loop: Any, coro: Any, **options: Any) -> Any:
        created_tasks.append(coro.__name__)
        return asyncio.Task(coro, loop=loop, **options)

    async def line(step: Step) -> int:
        return await step("x", lambda: 1)

    async def body(step: Step) -> list[int]:
        return list(await asyncio.gather(line(step), line(step)))

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        assert await Workflow("w").run(body) == Ok([1, 1])
        assert created_tasks == ["line", "line"]
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)


async def test_a_branch_that_is_not_awaited_ends_with_the_run() -> None:
    """It is cancelled, and steps that it calls after that are refused."""
    refused: list[BaseException] = []

    async def body(step: Step) -> None:
        async def forgotten() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                with pytest.raises(RunOver, match="'late'") as caught:
                    await step("late", lambda: None)
                refused.append(caught.value)

        task = asyncio.create_task(forgotten())
        await asyncio.sleep(0)
        assert not task.done()

    assert await Workflow("w").run(body) == Ok(None)
    assert len(refused) == 1


async def test_a_step_cannot_contain_a_step() -> None:
    """Neither its function nor a task of it may call one; the error shows the alternatives."""

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
    """The function of another run cannot record steps in this one."""

    async def outer(step: Step) -> object:
        async def inner(_: Step) -> object:
            return await step("other", lambda: 1)

        return await step("run", lambda: Workflow("inner").run(inner))

    result = await Workflow("outer").run(outer)
    assert isinstance(result, Err)
    assert "handle of" in str(result.error)
