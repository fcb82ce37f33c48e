"""A patient task keeps its cancellations until they are delivered."""

import asyncio
from typing import Any

import pytest

from perdure.engine.patient_task import PatientTask


async def requests_of(task: PatientTask, count: int) -> list[Any]:
    """Return the cancellations that a task keeps, once there are so many.

    Not after some milliseconds: a test that fails because the machine is busy leaves a task behind
    that cannot be cancelled, and the event loop does not end.
    """
    while len(task.requests) < count:
        await asyncio.sleep(0)
    return [*task.requests.values()]


async def test_a_cancellation_is_delivered_later() -> None:
    task = PatientTask(asyncio.Event().wait())
    await asyncio.sleep(0)
    assert task.cancel("enough")
    await asyncio.sleep(0.01)
    assert (task.done(), task.cancelling()) == (False, 0)
    (request,) = task.requests.values()
    task.deliver(request)
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task


async def test_a_timeout_that_is_left_in_time_cancels_nothing() -> None:
    has_left = asyncio.Event()

    async def work() -> str:
        async with asyncio.timeout(0):
            await has_left.wait()
        await asyncio.sleep(0)
        return "done"

    task = PatientTask(work())
    assert [each.is_soft for each in await requests_of(task, 1)] == [True]
    has_left.set()
    assert (await task, task.requests) == ("done", {})


async def test_a_timeout_is_distinguished_from_an_earlier_cancellation() -> None:
    async def work() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        return "after the timeout"

    task = PatientTask(work())
    await asyncio.sleep(0)
    task.cancel()
    hard, soft = sorted(await requests_of(task, 2), key=lambda each: each.is_soft)
    task.deliver(soft)
    assert (await task, hard.is_soft) == ("after the timeout", False)


async def test_a_task_group_takes_its_cancellation_back() -> None:
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
    assert [each.is_soft for each in await requests_of(task, 1)] == [False]
    has_left.set()
    assert (await task, task.requests) == ("done", {})


async def test_a_task_that_is_hurried_is_cancelled_at_once() -> None:
    task = PatientTask(asyncio.Event().wait())
    await asyncio.sleep(0)
    task.hurry()
    with pytest.raises(asyncio.CancelledError):
        await task
