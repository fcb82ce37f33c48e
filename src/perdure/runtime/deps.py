"""The dependencies of a runtime: entered on first use, shared, and exited after the last."""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from typing import Any, TypeAlias, TypeGuard

from perdure.engine.function import as_deps
from perdure.engine.tasks import Task, detached
from perdure.errors import InvalidArgument, PerdureError

logger = logging.getLogger(__name__)

ContextManager: TypeAlias = AbstractAsyncContextManager[Any]

_EXPECTED = "a value, an async context manager, or a function without arguments that returns one"
_HINT = "Decorate an async generator function with contextlib.asynccontextmanager"
_ENTERED_AGAIN = (
    "The deps of the runtime were entered before. If the context manager can be entered only once, "
    "pass a function that returns a new one, or use the runtime inside: async with runtime"
)


class Dependencies:
    """The value of `step.deps`, which is given directly or by an async context manager.

    As a context manager, this counts its users, which share one entry per event loop: most clients
    and connections belong to the loop in which they were opened.
    """

    def __init__(self, source: object) -> None:
        self._open = _opener(source)
        self._value = as_deps(source)
        # Most runtimes have plain values, so one context manager serves all of their runs.
        self._plain = nullcontext(self._value)
        self._entries: dict[asyncio.AbstractEventLoop, _Entry] = {}
        self._hint = ""

    async def __aenter__(self) -> None:
        if self._open is None:
            return
        entry = self._shared_entry(self._open)
        entry.users += 1
        try:
            await entry.wait_until_entered()
        except BaseException:
            await self._leave(entry)
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            await self._leave(self._entries[asyncio.get_running_loop()])

    def in_use(self) -> AbstractContextManager[Any]:
        """Return the value for a run that the current task executes; the deps must be entered."""
        if self._open is None:
            return self._plain
        return self._entries[asyncio.get_running_loop()].in_use()

    def _shared_entry(self, open: Callable[[], ContextManager]) -> "_Entry":
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is None or not entry.users:
            # An entry that is being exited is not shared; the next one begins when it has ended.
            entry = self._entries[loop] = _Entry(open, entry, self._hint)
            entry.task.add_done_callback(lambda _: self._forget(loop))
            self._hint = _ENTERED_AGAIN if _is_context_manager(self._value) else ""
        return entry

    async def _leave(self, entry: "_Entry") -> None:
        entry.users -= 1
        if not entry.users:
            await entry.close()
            self._forget(asyncio.get_running_loop())

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        entry = self._entries.get(loop)
        if entry is not None and not entry.users and entry.task.done():
            del self._entries[loop]


class _Entry:
    """One entry of a context manager, in its own task.

    A cancel scope must be exited by the task that entered it, and the first user is rarely the
    last.
    """

    def __init__(
        self, open: Callable[[], ContextManager], previous: "_Entry | None", hint: str
    ) -> None:
        self.users = 0
        self._runs: set[Task] = set()
        self._run_ended = asyncio.Event()
        self._hint = hint
        self._value: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unused = asyncio.Event()
        previous_task = None if previous is None else previous.task
        self.task: asyncio.Task[None] = detached(self._live(open, previous_task))

    @property
    def value(self) -> Any:
        """What the context manager returned."""
        return self._value.result()

    async def wait_until_entered(self) -> None:
        """Wait until it is entered, or raise its error; cancelling one caller affects no other."""
        await asyncio.wait([self._value])
        self._value.result()

    async def close(self) -> None:
        """Exit, or stop entering, and wait until that is done."""
        self._unused.set()
        if not self._value.done():
            self.task.cancel()
        await asyncio.wait([self.task])

    @contextmanager
    def in_use(self) -> Generator[Any]:
        """Register the current task as one that uses the value."""
        task = asyncio.current_task()
        assert task is not None, "a run is executed by a task"
        self._runs.add(task)
        try:
            yield self.value
        finally:
            self._runs.discard(task)
            self._run_ended.set()

    async def _live(self, open: Callable[[], ContextManager], previous: Task | None) -> None:
        try:
            if previous is not None:
                await asyncio.wait([previous])
            async with open() as value:
                self._value.set_result(as_deps(value))
                await self._wait_until_unused()
            if not self._unused.is_set():
                logger.error("the deps of a runtime ended while they were in use")
        except Exception as error:  # noqa: BLE001  # the user's context manager
            self._fail(error)
        finally:
            if not self._value.done():
                text = "the deps of a runtime were not entered: their task was cancelled"
                self._value.set_exception(PerdureError(text))
            # Marks the exception as retrieved: every caller may have been cancelled.
            self._value.exception()

    def _fail(self, error: Exception) -> None:
        if not self._value.done():
            if self._hint:
                error.add_note(self._hint)
            self._value.set_exception(error)
            return
        phase = "on exit" if self._unused.is_set() else "while in use"
        logger.error("the deps of a runtime failed %s", phase, exc_info=error)

    async def _wait_until_unused(self) -> None:
        try:
            await self._unused.wait()
        except asyncio.CancelledError:
            # When the event loop closes, all tasks are cancelled at once, and the runs must end
            # first. If only this task is cancelled, by a task group of the user, there is nothing
            # to wait for.
            while any(task.cancelling() for task in self._runs):
                self._run_ended.clear()
                await self._run_ended.wait()
            raise


def _opener(source: object) -> Callable[[], ContextManager] | None:
    """Return a factory of context managers to enter, or `None` for a plain value."""
    if _is_context_manager(source):
        return lambda: source
    if not _is_function(source):
        return None
    if not _takes_no_arguments(source):
        raise InvalidArgument("deps", source, _EXPECTED)
    if inspect.iscoroutinefunction(source) or inspect.isasyncgenfunction(source):
        raise InvalidArgument("deps", source, _EXPECTED, _HINT)
    return lambda: _check_context_manager(source())


def _is_context_manager(value: object) -> TypeGuard[ContextManager]:
    return hasattr(type(value), "__aenter__") and hasattr(type(value), "__aexit__")


def _is_function(value: object) -> TypeGuard[Callable[..., object]]:
    """Return whether this is a function; any other callable object is a value."""
    if isinstance(value, type):
        return hasattr(value, "__aenter__")
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def _takes_no_arguments(fn: Callable[..., object]) -> bool:
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return False
    return True


def _check_context_manager(value: object) -> ContextManager:
    if not _is_context_manager(value):
        raise InvalidArgument("deps()", value, "an async context manager", _HINT)
    return value
