"""What the engine reads from coroutines, tasks and timers, and how it delays cancellations."""

import asyncio
from typing import Any

import anyio
import pytest

from perdure.engine.tasks import (
    POSITION,
    PatientTask,
    arguments_of,
    awaits_primitive,
    fire,
    sleeps,
    timers_where,
    unstarted,
)


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


class TestPatientTasks:
    """Their cancellations are delayed until they are delivered."""

    async def test_a_cancellation_is_delivered_later(self) -> None:
        task = PatientTask(asyncio.Event().wait())
        await asyncio.sleep(0)
        assert task.cancel("enough")
        await asyncio.sleep(0.01)
        assert (task.done(), task.cancelling()) == (False, 0)
        (request,) = task.requests.values()
        task.deliver(request)
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task

    async def test_a_timeout_that_is_left_in_time_cancels_nothing(self) -> None:
        has_left = asyncio.Event()

        async def work() -> str:
            async with asyncio.timeout(0):
                await has_left.wait()
            await asyncio.sleep(0)
            return "done"

        task = PatientTask(work())
        await asyncio.sleep(0.01)
        assert [each.is_soft for each in task.requests.values()] == [True]
        has_left.set()
        assert (await task, task.requests) == ("done", {})

    async def test_a_timeout_is_distinguished_from_an_earlier_cancellation(self) -> None:
        async def work() -> str:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            return "after the timeout"

        task = PatientTask(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.01)
        hard, soft = sorted(task.requests.values(), key=lambda each: each.is_soft)
        task.deliver(soft)
        assert (await task, hard.is_soft) == ("after the timeout", False)

    async def test_a_task_group_takes_its_cancellation_back(self) -> None:
        has_left = asyncio.Event()

        async def fail() -> None:
            raise ValueError("planned")

        async def work() -> str:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
                    await has_left.wait()
            except ExceptionGroup:
                return "done"
            return "not cancelled"

        task = PatientTask(work())
        await asyncio.sleep(0.01)
        assert [each.is_soft for each in task.requests.values()] == [False]
        has_left.set()
        assert (await task, task.requests) == ("done", {})

    async def test_a_task_that_is_hurried_is_cancelled_at_once(self) -> None:
        task = PatientTask(asyncio.Event().wait())
        await asyncio.sleep(0)
        task.hurry()
        with pytest.raises(asyncio.CancelledError):
            await task


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
