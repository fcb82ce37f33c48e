"""What the engine reads from coroutines: the arguments of those that have not started."""

import asyncio
from typing import Any

from perdure.engine.tasks import arguments_of, unstarted


async def work(a: object, *rest: object, b: object = 2, **more: object) -> Any:
    def inner() -> object:
        return a  # makes `a` a variable that two functions share

    return inner()


async def test_the_arguments_of_a_coroutine_that_has_not_started_are_known() -> None:
    """Variables that are not arguments are not set yet."""
    coroutine = work(1, 3, c=4)
    assert dict(arguments_of(coroutine)) == {"a": 1, "rest": (3,), "b": 2, "more": {"c": 4}}
    assert await coroutine == 1


async def test_of_anything_else_no_arguments_are_known() -> None:
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
    found = list(unstarted([outer, 5, "text"]))
    assert found == [first, second, limited, outer]
    for each in found:
        each.close()
