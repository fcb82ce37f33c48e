"""A recorded failure is raised after other branches have shown how their steps are undone.

When it was first raised, they had come further. Replayed at once, it would make a group cancel
them before they call the steps that are to be undone.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from perdure import Runtime, Step, workflow
from perdure.stores import MemoryStore

Branch: TypeAlias = Callable[[Step, asyncio.Event], Coroutine[Any, Any, None]]


@workflow("other")
async def other(step: Step, payload: int) -> None:
    pass


async def charge(reserved: asyncio.Event) -> None:
    await reserved.wait()
    raise ValueError("no funds")


async def under_a_key(step: Step, reserved: asyncio.Event) -> None:
    await step("charge", lambda: charge(reserved), key="charge-1")


async def with_an_event(step: Step, reserved: asyncio.Event) -> None:
    await step("reserved", reserved.wait)
    await step.wait_for_event("paid", "paid", returns=int)


async def with_a_start(step: Step, reserved: asyncio.Event) -> None:
    await step("reserved", reserved.wait)
    await step.start("start", other, 2, run_id="taken")


@pytest.mark.parametrize("fail", [under_a_key, with_an_event, with_a_start])
async def test_other_branches_show_their_undos(fail: Branch) -> None:
    reserved, undone = asyncio.Event(), list[str]()

    async def reserve() -> str:
        await runtime.signal("trip", "paid", "not a number")
        reserved.set()
        return "seat"

    async def prepare_and_reserve(step: Step) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await step("reserve", reserve, undo=undone.append)

    @workflow("book")
    async def book(step: Step[None]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(step, reserved))
            group.create_task(prepare_and_reserve(step))

    runtime = Runtime(MemoryStore(), workflows=[book, other])
    await runtime.trigger(other, 1, run_id="taken")
    await runtime.trigger(book, run_id="trip")
    await runtime.sweep()
    run = await runtime.get_run("trip")
    assert run is not None
    assert (run.status, undone) == ("failed", ["seat"])
