"""What the engine reads from coroutines, tasks and timers."""

import asyncio
import sys
from typing import Any

import anyio
import pytest

from perdure.engine.asyncio_internals import (
    arguments_of,
    awaits_primitive,
    coroutine_of,
    fire,
    sleeps,
    timers_where,
    unstarted,
)
from perdure.engine.tasks import POSITION


async def work(a: object, *rest: object, b: object = 2, **more: object) -> Any:
    def inner() -> object:
        return a  # makes `a` a variable that two functions share

    return inner()


async def test_the_arguments_of_a_coroutine_that_has_not_started_are_known() -> None:
    """Variables that are not arguments are not set yet."""
    coroutine = work(1, 3, c=4)
    assert dict(arguments_of(coroutine)) == {"a": 1, "rest": (3,), "b": 2, "more": {"c": 4}}
    assert await coroutine == 1


async def test_the_arguments_of_anything_else_are_unknown() -> None:
    """Once a coroutine has started, its variables are its own."""

    async def suspended(a: int) -> None:
        await asyncio.sleep(0)

    task = asyncio.create_task(suspended(1))
    await asyncio.sleep(0)
    ended = work(1)
    await ended
    assert [arguments_of(each) for each in (task.get_coro(), ended, task, 5)] == [{}] * 4
    await task


async def test_coroutines_among_the_arguments_are_found_first() -> None:
    """Also those in lists."""
    first, second = work(1), work(2)
    limited = asyncio.wait_for(second, 1)
    outer = work([first, 3], limited)
    coroutines = list(unstarted([outer, 5, "text"]))
    assert coroutines == [first, second, limited, outer]
    for each in coroutines:
        each.close()


async def test_a_task_has_its_coroutine_until_it_is_done() -> None:
    coroutine = work(1)
    task = asyncio.create_task(coroutine)
    assert coroutine_of(task) is coroutine
    await task
    assert coroutine_of(task) is None


if sys.version_info >= (3, 12):

    async def test_a_task_that_was_done_when_it_was_created_has_no_coroutine() -> None:
        """Python 3.12.1 crashes in `get_coro` of such a task."""
        task = asyncio.Task(work(1), loop=asyncio.get_running_loop(), eager_start=True)
        assert coroutine_of(task) is None
        assert await task == 1


class TestTimers:
    """Timers that code at a position has set, and that can be made to fire."""

    async def fired(self, work: Any) -> Any:
        token = POSITION.set("here")
        task = asyncio.create_task(work)
        POSITION.reset(token)
        while not (timers := timers_where(lambda position: position == "here")):
            await asyncio.sleep(0)
        fire(timers[0])
        async with asyncio.timeout(10):
            return await task

    async def test_a_sleep_ends(self) -> None:
        assert await self.fired(asyncio.sleep(60, "slept")) == "slept"

    async def test_a_timeout_comes(self) -> None:
        with pytest.raises(TimeoutError):
            await self.fired(asyncio.wait_for(asyncio.Event().wait(), 60))

    async def test_a_scope_of_anyio_is_cancelled(self) -> None:
        async def work() -> str:
            with anyio.move_on_after(60):
                await asyncio.Event().wait()
            return "moved on"

        assert await self.fired(work()) == "moved on"

    async def test_it_is_known_what_a_task_waits_for(self) -> None:
        tasks = [
            asyncio.create_task(asyncio.sleep(60)),
            asyncio.create_task(asyncio.Event().wait()),
        ]
        await asyncio.sleep(0)
        assert [sleeps(task) for task in tasks] == [True, False]
        assert [awaits_primitive(task) for task in tasks] == [False, True]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
