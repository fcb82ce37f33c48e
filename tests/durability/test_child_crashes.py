"""Every possible crash of a parent and of its children, before and after every store call."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from perdure import Run, Runtime, Step, Worker, workflow
from perdure.errors import RunFailed, StoreError
from perdure.runtime.definition import Definition
from perdure.store import Message, Store
from perdure.stores import sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock, explore_crashes


async def double(n: int) -> int:
    return n * 2


async def refuse() -> int:
    raise ValueError("no")


@workflow("child")
async def child(step: Step, n: int) -> int:
    return await step("double", double, n)


@workflow("sleeper")
async def sleeper(step: Step, n: int) -> int:
    await step.sleep("nap", "1h")
    return await step("double", double, n)


@workflow("failing")
async def failing(step: Step) -> int:
    return await step("refuse", refuse)


@workflow("nested")
async def nested(step: Step, n: int) -> int:
    return await step.call("inner", child, n) + await step.call("inner", child, n + 1)


@workflow("calls")
async def calls(step: Step, n: int) -> int:
    first = await step.call("first", child, n)
    return await step.call("second", nested, first)


@workflow("fans out")
async def fans_out(step: Step, n: int) -> list[int]:
    return list(await step.all(*(step.call(f"child {i}", sleeper, i) for i in range(n))))


@workflow("starts")
async def starts(step: Step, n: int) -> list[int]:
    refs = [await step.start("child", child, i) for i in range(n)]
    await step.sleep("meanwhile", "1h")
    return [await step.result("result", ref) for ref in refs]


@workflow("maps")
async def maps(step: Step, n: int) -> list[int]:
    doubled = await step.map_runs("double", child, range(n))
    return [*doubled, await step("after", double, 1)]


@workflow("catches")
async def catches(step: Step) -> str:
    try:
        await step.call("try", failing)
    except RunFailed as failed:
        return f"{failed.run_id}: {failed.__cause__!r}"
    return "?"


@workflow("leaves children")
async def leaves_children(step: Step) -> str:
    await step.start("cancelled", sleeper, 1)
    await step.start("abandoned", sleeper, 2, on_parent_end="abandon")
    return "done"


@workflow("races")
async def races(step: Step) -> str:
    winner, _ = await step.race("either", step.call("slow", sleeper, 1), step.sleep("s", "1m"))
    await step("after", double, 1)
    return str(winner)


@workflow("continues")
async def continues(step: Step, n: int) -> int:
    total = n + await step.call("add", child, 1)
    if total < 4:
        await step.continue_as_new(total)
    return total


@workflow("cancels itself")
async def fails_beside(step: Step) -> int:
    async def late() -> int:
        await step.sleep("late", "1m")
        raise ValueError("no")

    await asyncio.gather(step.call("slow", sleeper, 1), late())
    return 0


CASES: list[tuple[Definition[Any, Any], Any]] = [
    (calls, 1),
    (fans_out, 2),
    (starts, 2),
    (maps, 3),
    (catches, None),
    (leaves_children, None),
    (races, None),
    (continues, 0),
    (fails_beside, None),
]
OTHERS: list[Definition[Any, Any]] = [child, sleeper, failing, nested]


def same_outcome(clean: Run, survived: Run) -> None:
    """How far a child came before it was cancelled is not determined."""
    assert survived.status == clean.status
    assert survived.output == clean.output
    assert repr(survived.error) == repr(clean.error)
    if clean.status != "cancelled":
        assert [step.key for step in survived.history] == [step.key for step in clean.history]


@pytest.mark.parametrize(("parent", "payload"), CASES, ids=lambda case: getattr(case, "name", ""))
async def test_no_crash_changes_the_outcome(parent: Definition[Any, Any], payload: object) -> None:
    report = await explore_crashes(parent, payload, workflows=OTHERS, compare=same_outcome)
    assert report.crashes > 10


@pytest.mark.parametrize(("parent", "payload"), CASES, ids=lambda case: getattr(case, "name", ""))
async def test_no_crash_changes_the_outcome_if_each_step_is_replayed(
    parent: Definition[Any, Any], payload: object
) -> None:
    await explore_crashes(
        parent, payload, workflows=OTHERS, always_replay=True, compare=same_outcome
    )


async def test_no_crash_changes_the_outcome_on_sqlite(tmp_path: Path) -> None:
    numbers = iter(range(10_000))

    report = await explore_crashes(
        calls,
        1,
        workflows=OTHERS,
        store=lambda clock: sqlite(tmp_path / f"{next(numbers)}.db", clock=clock),
    )
    assert report.crashes > 10


async def test_a_run_knows_its_parent_and_its_children() -> None:
    runtime = Runtime(MemoryStore(), workflows=[leaves_children, sleeper, maps, child])
    async with Worker(runtime):
        await runtime.trigger(leaves_children, run_id="p", wait=False)
        await runtime.result("p", timeout="5s")
        await runtime.trigger(maps, 2, run_id="m", wait=False)
        await runtime.result("m", timeout="5s")
    parent, started = await runtime.get_run("p"), await runtime.get_run("p/1/abandoned")
    mapped = await runtime.get_run("m")
    assert parent is not None
    assert started is not None
    assert mapped is not None
    assert parent.children == ("p/1/cancelled", "p/1/abandoned")
    assert started.parent == "p"
    assert started.tags == {}
    assert mapped.children == ()
    assert {step.run for step in mapped.history if step.kind == "start"} == {"m/1/double"}
    ids = [run.id for run in await runtime.list_runs(prefix="m/1/double/")]
    assert sorted(ids) == ["m/1/double/0", "m/1/double/1"]


class TaskStore(MemoryStore):
    """A store that reads inboxes in tasks of its own, as some drivers do."""

    async def inbox(
        self, id: str, /, *, after: str | None = None, limit: int | None = None
    ) -> Sequence[Message]:
        return await asyncio.create_task(super().inbox(id, after=after, limit=limit))


@workflow("maps, then branches")
async def maps_then_branches(step: Step) -> None:
    await step.map_runs("double", child, range(2))

    async def branch(id: str) -> None:
        await step(id, double, 1)

    await asyncio.gather(branch("left"), branch("right"))


async def test_reading_the_results_of_a_map_moves_no_branches() -> None:
    runtime = Runtime(TaskStore(), workflows=[maps_then_branches, child])
    async with Worker(runtime):
        await runtime.trigger(maps_then_branches, run_id="p", wait=False)
        await runtime.result("p", timeout="5s")
    run = await runtime.get_run("p")
    assert run is not None
    assert {step.key: step.branch for step in run.history[-2:]} == {"left": "1", "right": "2"}


async def test_a_parent_gets_the_end_that_its_child_has() -> None:
    """The end is durable before it is reported: a second execution could return something else."""
    executions = iter(range(10_000))

    @workflow("counts")
    async def counts(step: Step) -> int:
        return next(executions)

    @workflow("asks")
    async def asks(step: Step) -> list[int]:
        return [await step.call("one", counts), *await step.map_runs("two", counts, [None] * 2)]

    async def crash_at(number: int) -> bool:
        """Crash at a store call, continue, and return whether there was such a call."""
        clock = TestClock()
        store = MemoryStore(clock=clock)
        dying = FaultyStore(store, fail_at=number, how="after", error=StoreError, stays_down=True)
        with suppress(StoreError):
            await settle(dying, clock)
        await clock.advance("1h")
        runtime = await settle(store, clock)
        outputs = [await runtime.result(f"p/1/{call}") for call in ("one", "two/0", "two/1")]
        assert await runtime.result("p") == outputs
        return dying.failed

    async def settle(store: Store, clock: TestClock) -> Runtime:
        runtime = Runtime(store, workflows=[asks, counts], clock=clock)
        await runtime.trigger(asks, run_id="p", wait=False)
        while await runtime.sweep():
            pass
        return runtime

    number = 1
    while await crash_at(number):
        number += 1
    assert number > 20
