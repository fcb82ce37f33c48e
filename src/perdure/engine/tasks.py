"""Tasks: start them outside a run, wait for their ends, and know where in a run code is."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, ContextVar
from itertools import count
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Task: TypeAlias = asyncio.Task[Any]
Future: TypeAlias = asyncio.Future[Any]
Args: TypeAlias = tuple[object, ...]
"""The arguments of a cancellation. Kept instead of the exception, which refers to its frames."""

POSITION: ContextVar[Any] = ContextVar("perdure_position", default=None)
"""Where the running code is in a run: a `Branch`, a `StepCall` inside a step's function, or None.

It is a `Reserved` only while the task of a named branch is created.

Tasks inherit it with their context, so it is right in eager tasks, callbacks and threads too.
"""

SECONDS_IF_BUSY = 10
"""After how many seconds tasks are cancelled again if they are busy, such as with a step."""


class Interrupted(asyncio.CancelledError):
    """The caller was cancelled during a write. The write was finished first: `answer` is its
    result.

    A user's code must see a plain `CancelledError`, since `asyncio.timeout` knows no subclasses of
    it, with the arguments of the cancellation: a scope of anyio recognizes its own by them.
    """

    def __init__(self, answer: Any, args: Sequence[object]) -> None:
        super().__init__(*args)
        self.answer = answer

    def plain(self) -> asyncio.CancelledError:
        """Return the cancellation that a user's code must see."""
        return asyncio.CancelledError(*self.args)


def args_of_both(first: Args | None, error: asyncio.CancelledError) -> Args:
    """Return the arguments of the one cancellation that is raised after two.

    One without arguments is not of a scope of anyio, so no scope must stop it.
    """
    return error.args if first is None or first else first


class outside_runs:  # noqa: N801  # a context manager, like contextlib.suppress
    """Runs code outside any run: tasks created in it are not branches.

    It is for what the engine calls besides the function: listeners, caches, stores. The number of
    tasks they start differs between activations, and must not affect the numbers of branches.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = POSITION.set(None)

    def __exit__(self, *_: object) -> None:
        POSITION.reset(self._token)


def detached(work: Coroutine[Any, Any, T], context: Context | None = None) -> "asyncio.Task[T]":
    """Start a task that belongs to no run, in a context or in a copy of the current one."""
    with outside_runs():
        return asyncio.get_running_loop().create_task(work, context=context)


async def finish(task: "asyncio.Task[T]", *, cancel_while: Callable[[], bool] = lambda: False) -> T:
    """Wait until a task has ended, even if the caller is cancelled in the meantime.

    The cancellation is then raised as `Interrupted`, with the task's result. It is passed on to the
    task only if `cancel_while` returns true.
    """
    args: Args | None = None
    while not task.done():
        try:
            # Not `await task`, which would pass a cancellation of the caller on to the task.
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            args = args_of_both(args, error)
            if cancel_while():
                task.cancel(*error.args)
    result = task.result()
    if args is not None:
        raise Interrupted(result, args)
    return result


async def complete(work: Coroutine[Any, Any, T]) -> T:
    """Await something to its end, in a task of its own; a cancellation is raised after that.

    It is for what a caller does because it was cancelled: a scope of anyio cancels again, and an
    ordinary await would then be cut off.
    """
    try:
        return await finish(detached(work))
    except Interrupted as interruption:
        raise interruption.plain() from None


async def cancel_and_wait(
    tasks: Iterable[Task], *, is_busy: Callable[[], object] = lambda: False
) -> None:
    """Cancel tasks and wait until they have ended; a task that swallows it is cancelled again.

    That happens after a second, or after ten while `is_busy` returns true. A cancellation of the
    caller is postponed until all have ended.
    """
    all_tasks = list(tasks)
    args: Args | None = None
    for number in count():
        pending = [task for task in all_tasks if not task.done()]
        if not pending:
            break
        if number % SECONDS_IF_BUSY == 0 or not is_busy():
            for task in pending:
                task.cancel()
        args = await _wait_a_second(pending, args)
    for task in all_tasks:
        # Marks it as retrieved, or asyncio would log it: it was recorded, or no code waits.
        exception_of(task)
    if args is not None:
        raise asyncio.CancelledError(*args)


async def _wait_a_second(tasks: Sequence[Task], args: Args | None) -> Args | None:
    """Wait for the end of tasks, up to a second even if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 1
    while (remaining := end - loop.time()) > 0 and not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks, timeout=remaining)
        except asyncio.CancelledError as error:
            args = args_of_both(args, error)
    return args


def exception_of(task: Task) -> BaseException | None:
    """Return the exception of a task that has ended; `None` if it returned or was cancelled.

    A cancelled task keeps its `CancelledError` until it is asked for, and with it the frames that
    it passed through. These refer to the task, so it would stay in memory until the next garbage
    collection.
    """
    try:
        return task.exception()
    except asyncio.CancelledError:
        return None


def current_task() -> Task | None:
    """Return the running task; None in a callback or in a thread without an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the thread of an event loop: at once if in that thread, otherwise soon."""
    try:
        is_in_loop = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_in_loop = False
    if is_in_loop:
        function()
    else:
        loop.call_soon_threadsafe(function)
