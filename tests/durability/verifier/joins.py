"""Ways to run branches concurrently and to wait for all of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any

import anyio

from tests.durability.verifier.language import How

Branch = Callable[[], Awaitable[Any]]
Tasks = Sequence["asyncio.Task[Any]"]


async def join(how: How, branches: Sequence[Branch]) -> list[Any]:
    """Run all branches and return their values in order, or raise what one of them raised."""
    if how in _BRANCHES:
        return await _BRANCHES[how](branches)
    # Created in order, whatever the join does: branches are numbered by creation.
    tasks = [asyncio.ensure_future(_call(branch)) for branch in branches]
    for task in tasks:
        task.add_done_callback(retrieve)
    await _JOINS[how](tasks)
    return [task.result() for task in tasks]


def retrieve(task: "asyncio.Task[Any]") -> None:
    """Retrieve the exception of a task that is not awaited, so that it is not logged."""
    if not task.cancelled():
        task.exception()


async def _call(branch: Branch) -> Any:
    return await branch()


async def _gather(tasks: Tasks) -> None:
    await asyncio.gather(*tasks)


async def _collect(tasks: Tasks) -> None:
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _wait(tasks: Tasks) -> None:
    await asyncio.wait(tasks)


async def _first(tasks: Tasks) -> None:
    """Look at each task as soon as it has ended."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()


async def _exception(tasks: Tasks) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task in done:
            task.result()


async def _wait_for(tasks: Tasks) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), 3600)


async def _one_by_one(tasks: Tasks) -> None:
    for task in tasks:
        await task


async def _generator(tasks: Tasks) -> None:
    """Await the tasks in an async generator, whose own await cannot be seen from outside."""

    async def values() -> AsyncIterator[Any]:
        for task in tasks:
            yield await task

    async for _ in values():
        pass


async def _shield(tasks: Tasks) -> None:
    await asyncio.shield(asyncio.gather(*tasks))


async def _event(tasks: Tasks) -> None:
    done, left = asyncio.Event(), len(tasks)

    def ended(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    for task in tasks:
        task.add_done_callback(ended)
    await done.wait()


async def _condition(tasks: Tasks) -> None:
    changed, ended = asyncio.Condition(), 0

    async def watch(task: "asyncio.Task[Any]") -> None:
        nonlocal ended
        await asyncio.wait([task])
        async with changed:
            ended += 1
            changed.notify_all()

    watching = [asyncio.ensure_future(watch(task)) for task in tasks]
    async with changed:
        await changed.wait_for(lambda: ended == len(tasks))
    await asyncio.gather(*watching)


async def _queue(tasks: Tasks) -> None:
    queue: asyncio.Queue[object] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    for _ in tasks:
        await queue.get()


async def _taskgroup(branches: Sequence[Branch]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_call(branch)) for branch in branches]
    return [task.result() for task in tasks]


async def _anyio(branches: Sequence[Branch]) -> list[Any]:
    values: list[Any] = [None] * len(branches)

    async def keep(index: int, branch: Branch) -> None:
        values[index] = await branch()

    async with anyio.create_task_group() as group:
        for index, branch in enumerate(branches):
            group.start_soon(keep, index, branch)
    return values


async def _stream(branches: Sequence[Branch]) -> list[Any]:
    """Receive the values of branches from a stream of anyio, as they are sent."""
    values: list[Any] = [None] * len(branches)
    sender, receiver = anyio.create_memory_object_stream[tuple[int, Any]](1)

    async def send(index: int, branch: Branch) -> None:
        await sender.send((index, await branch()))

    async with sender, receiver, anyio.create_task_group() as group:
        for index, branch in enumerate(branches):
            group.start_soon(send, index, branch)
        for _ in branches:
            index, value = await receiver.receive()
            values[index] = value
    return values


class _Started:
    """A branch with a place in a set that depends on the time of the loop, not on its address.

    So asyncio starts the branches in another order each time, and a simulation can be repeated.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, None]], number: int) -> None:
        self._start = start
        self._hash = hash((asyncio.get_running_loop().time(), number))

    def __hash__(self) -> int:
        return self._hash

    def __await__(self) -> Generator[Any, None, None]:
        return self._start().__await__()


async def _as_completed(branches: Sequence[Branch]) -> list[Any]:
    """Let asyncio start the branches, which it does in the order of a set."""
    values: list[Any] = [None] * len(branches)

    async def keep(index: int, branch: Branch) -> None:
        values[index] = await branch()

    lines = [_Started(partial(keep, *each), each[0]) for each in enumerate(branches)]
    for ended in asyncio.as_completed(lines):
        await ended
    return values


async def _semaphore(branches: Sequence[Branch]) -> list[Any]:
    one_at_a_time = asyncio.Semaphore(1)

    async def guarded(branch: Branch) -> Any:
        async with one_at_a_time:
            return await branch()

    return await asyncio.gather(*(guarded(branch) for branch in branches))


async def _beside(branches: Sequence[Branch]) -> list[Any]:
    """Run the last branch in this task, beside the others."""
    tasks = [asyncio.ensure_future(_call(branch)) for branch in branches[:-1]]
    for task in tasks:
        task.add_done_callback(retrieve)
    own = await branches[-1]()
    return [*[await task for task in tasks], own]


_BRANCHES: dict[How, Callable[[Sequence[Branch]], Awaitable[list[Any]]]] = {
    "as_completed": _as_completed,
    "taskgroup": _taskgroup,
    "anyio": _anyio,
    "stream": _stream,
    "semaphore": _semaphore,
    "beside": _beside,
}
_JOINS: dict[How, Callable[[Tasks], Awaitable[None]]] = {
    "gather": _gather,
    "collect": _collect,
    "wait": _wait,
    "first": _first,
    "exception": _exception,
    "wait_for": _wait_for,
    "generator": _generator,
    "condition": _condition,
    "tasks": _one_by_one,
    "shield": _shield,
    "event": _event,
    "queue": _queue,
}
