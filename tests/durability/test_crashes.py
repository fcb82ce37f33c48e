"""Every crash there can be, before and after every store call, on many shapes of workflow."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from perdure import Cron, Err, Retry, Runtime, Step, workflow
from perdure.registry import Definition
from perdure.stores import sqlite
from perdure.testing.crashes import CrashFound, explore_crashes


async def double(x: int) -> int:
    return x * 2


async def refuse(x: int) -> int:
    raise ValueError(f"no {x}")


@workflow("sequential")
async def sequential(step: Step, payload: int) -> int:
    a = await step("a", double, payload)
    b = await step("b", double, a)
    return await step("c", double, b)


@workflow("parallel")
async def parallel(step: Step, payload: int) -> list[int]:
    async def branch(start: int) -> int:
        first = await step("work", double, start)
        return await step("work", double, first)

    return await asyncio.gather(branch(payload), branch(payload + 1), branch(payload + 2))


@workflow("group")
async def group(step: Step) -> list[int]:
    async with asyncio.TaskGroup() as tasks:
        ones = [tasks.create_task(step("one", double, n)) for n in range(3)]
    return [one.result() for one in ones]


@workflow("loop")
async def loop(step: Step) -> int:
    total = 0
    for n in range(4):
        total += await step("add", double, n)
    return total


@workflow("sleeps")
async def sleeps(step: Step) -> str:
    await step.sleep("nap", timedelta(days=1))
    await step("between", double, 1)
    await step.sleep("until nine", Cron("0 9 * * *", tz="Europe/Berlin"))
    return "rested"


@workflow("events")
async def events(step: Step) -> list[Any]:
    first = await step.wait_for_event("first", "go")
    await step("between", double, 2)
    late = await step.wait_for_event("never", "missing", timeout="2h")
    return [first, late]


@workflow("many waits")
async def many_waits(step: Step) -> list[Any]:
    return await asyncio.gather(
        step.sleep("nap", "1h"),
        step.wait_for_event("go", "go"),
        step("beside", double, 4),
    )


@workflow("race")
async def race(step: Step) -> tuple[str, Any]:
    return await step.race(
        "first",
        {
            "approved": lambda: step.wait_for_event("approval", "missing"),
            "late": lambda: step.sleep("limit", "3d"),
        },
    )


@workflow("retries")
async def retries(step: Step) -> int:
    async def flaky() -> int:
        if step.attempt < 3:
            raise ConnectionError("not yet")
        return step.attempt

    return await step("flaky", flaky, retry=Retry(attempts=3, delay="10s", jitter=False))


@workflow("caught")
async def caught(step: Step) -> str:
    try:
        await step("refused", refuse, 1)
    except ValueError as error:
        return await step("fallback", str.upper, str(error))
    return "unreachable"


@workflow("uncaught")
async def uncaught(step: Step) -> int:
    await step("fine", double, 1)
    return await step("refused", refuse, 2)


@workflow("returned error")
async def returned_error(step: Step) -> int:
    async def find() -> Err[str]:
        return Err("NOT_FOUND")

    return await step("find", find)


@workflow("all and map")
async def all_and_map(step: Step) -> tuple[dict[str, Any], list[int]]:
    both = await step.all({"x": lambda: double(1), "y": lambda: double(2)})
    mapped = await step.map("m", range(3), double, concurrency=2)
    return both, mapped


SHAPES: list[Definition[Any, Any]] = [
    sequential, parallel, group, loop, sleeps, events, many_waits, race, retries, caught,
    uncaught, returned_error, all_and_map,
]  # fmt: skip


@pytest.mark.parametrize("always_replay", [False, True], ids=["straight", "always_replay"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
async def test_a_crash_at_any_store_call_changes_nothing(
    shape: Definition[Any, Any], always_replay: bool
) -> None:
    """Whatever the process died between, the run ends as it would have without."""
    payload = 3 if shape.takes_payload else None
    report = await explore_crashes(
        shape, payload, events={"go": {"by": "ana"}}, always_replay=always_replay
    )
    assert report.crashes > 4


@workflow("transactional")
async def transactional(step: Step) -> int:
    async def pay(connection: Any, amount: int) -> int:
        await connection.execute("CREATE TABLE IF NOT EXISTS paid (amount INTEGER)")
        await connection.execute("INSERT INTO paid VALUES (?)", (amount,))
        ((count,),) = await connection.fetchall("SELECT COUNT(*) FROM paid")
        return int(count)

    before = await step("before", double, 1)
    paid = await step.transaction("pay", pay, before)
    return await step("after", double, paid)


async def test_a_crash_never_doubles_a_transactional_step() -> None:
    """Its writes and its record are there together or not at all: one row after any crash."""
    async with sqlite(":memory:") as store:
        run = await Runtime(store, workflows=[transactional]).trigger(transactional)
        assert run.output == 2
    report = await explore_crashes(
        transactional, store=lambda clock: sqlite(":memory:", clock=clock)
    )
    assert report.crashes > 4


async def test_the_report_names_steps_that_ran_twice() -> None:
    """A crash between a step's work and its record makes a plain step run again."""
    report = await explore_crashes(sequential, 1)
    assert set(report.doubled) == {"a", "b", "c"}


async def test_a_workflow_that_is_not_deterministic_is_found() -> None:
    """The explorer can fail: a result that depends on how often the function ran is no result."""
    runs = 0

    @workflow("forgetful")
    async def forgetful(step: Step) -> int:
        nonlocal runs
        runs += 1
        await step("a", double, 1)
        return runs

    with pytest.raises(CrashFound, match="ended as"):
        await explore_crashes(forgetful)
