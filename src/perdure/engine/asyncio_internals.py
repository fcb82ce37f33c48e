"""Everything that looks at asyncio's private parts, frames or code objects, except `unawaited`.

The engine must know some things that asyncio does not expose: which coroutine a task is waiting in,
so that a run whose branches only wait for each other can leave memory; whether a task was created
on behalf of `wait_for`, which starts one up to Python 3.11 and none after it, or of `as_completed`,
which starts several in the order of a set; whether the loop has anything else to run; and which
call a coroutine that has not started will make. This is read from attributes that have been the
same from Python 3.11 to 3.14, and that a test checks on each version:

- `Task._fut_waiter`: the future a task waits for, or None when the event loop is about to run it.
- `_GatheringFuture._children`: what a `gather` waits for.
- the closure of `shield`'s callback on its outer future, which holds the inner one.
- `cr_await` and `gi_yieldfrom`: the chain of coroutines below a task. It ends at an async
  generator, whose own await cannot be seen.
- the code objects of asyncio's and anyio's joins and primitives, and the futures in their frames.
- `cr_frame.f_locals` of a coroutine that has not started: the arguments of the call that made it.
- the local variable `fs` or `aws` of `as_completed`, and `awaitable` of `_wrap_awaitable`.
- `asyncio.coroutines._is_coroutine`: marks a function that returns a coroutine, up to Python 3.11.
- `BaseEventLoop._ready`: the callbacks that the loop runs next. Other loops do not have it.
- `BaseEventLoop._scheduled`: its timers, with the context of the code that set each (`_context`).
- the local variable `self` of the code that cancels a task or withdraws a cancellation: the
  `Timeout`, the `TaskGroup` or the cancel scope of anyio.

Whatever is not recognized counts as unknown. The caller then decides by time, and never guesses.
"""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, TypeAlias

from perdure.engine.tasks import POSITION, Future, Task


def awaited_future(task: Task) -> Future | None:
    """Return the future that a task waits for; None if the event loop is about to run it."""
    # Between the end of a future and the wake-up of its task, the task still refers to it.
    waiter: Future | None = getattr(task, "_fut_waiter", None)
    return None if waiter is None or waiter.done() else waiter


def awaits_only(task: Task, branches: Collection[Task]) -> bool:
    """Return whether a task is known to wait only for these tasks or an asyncio primitive."""
    waiter = awaited_future(task)
    if waiter is None:
        return False
    if _ends_with(waiter, branches):
        return True
    # Joins such as `asyncio.wait` await a future of their own; their frame has what it stands for.
    frame = _innermost_frame(task)
    join = None if frame is None else _joins().get(frame.f_code)
    if join is None or frame is None:
        return False
    return all(_ends_with(future, branches) for future in join(frame.f_locals))


def awaits_primitive(task: Task) -> bool:
    """Return whether a task waits for an asyncio primitive, which another task releases."""
    frame = _innermost_frame(task)
    return frame is not None and _joins().get(frame.f_code) is _primitive


def sleeps(task: Task) -> bool:
    """Return whether a task only sleeps, on an event loop that shows its timers."""
    frame = _innermost_frame(task)
    is_asleep = frame is not None and frame.f_code is _SLEEP
    return is_asleep and hasattr(task.get_loop(), "_scheduled")


def _ends_with(future: Future, branches: Collection[Task]) -> bool:
    """Return whether a future is done, or will be done when branches are."""
    if future.done() or future in branches:
        return True
    children: Iterable[Future] | None = getattr(future, "_children", None)
    if children is not None:
        return all(_ends_with(child, branches) for child in children)
    inner = _shielded(future)
    return inner is not None and _ends_with(inner, branches)


def _shielded(outer: Future) -> Future | None:
    """Return the future that `asyncio.shield` protects, given the one it returned."""
    # The outer future has no other reference to the inner one.
    for callback, *_ in getattr(outer, "_callbacks", None) or ():
        if getattr(callback, "__qualname__", "") == "shield.<locals>._outer_done_callback":
            names = callback.__code__.co_freevars
            inner: Future = callback.__closure__[names.index("inner")].cell_contents
            return inner
    return None


def place(task: Task) -> str:
    """Return a task's name, its function and the line it waits in, for log messages."""
    frame = _innermost_frame(task)
    name = f"{task.get_name()} ({getattr(coroutine_of(task), '__qualname__', '?')})"
    if frame is None:
        return name
    code = frame.f_code
    return f"{name} in {code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


def coroutine_of(task: Task) -> object:
    """Return the coroutine of a task; `None` if the task is done."""
    # An eager task that has ended before it was first suspended has no coroutine. Asked for it,
    # Python 3.12.1 crashes.
    return None if task.done() else task.get_coro()


def _innermost_frame(task: Task) -> FrameType | None:
    inner: Any = coroutine_of(task)
    while True:
        next_inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if next_inner is None or not (
            hasattr(next_inner, "cr_frame") or hasattr(next_inner, "gi_frame")
        ):
            break
        inner = next_inner
    return getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)


Join: TypeAlias = Callable[[dict[str, Any]], Iterable[Future]]

_WAIT = getattr(asyncio.tasks, "_wait", asyncio.wait).__code__
_WAIT_FOR = asyncio.wait_for.__code__  # noqa: TID251  # recognized, not called
_SLEEP = asyncio.sleep.__code__  # noqa: TID251  # recognized, not called
_ITERATOR: Any = getattr(asyncio.tasks, "_AsCompletedIterator", None)
# Since Python 3.13, it starts the tasks in the constructor of its iterator.
_AS_COMPLETED = (asyncio.as_completed if _ITERATOR is None else _ITERATOR.__init__).__code__
_STARTS = frozenset(
    {
        asyncio.BaseEventLoop.create_task.__code__,
        asyncio.ensure_future.__code__,
        getattr(asyncio.tasks, "_ensure_future", asyncio.ensure_future).__code__,
        # Before Python 3.12, the set comprehension of `as_completed` is a function.
        *(each for each in _AS_COMPLETED.co_consts if getattr(each, "co_name", "") == "<setcomp>"),
    }
)


def _primitive(_: dict[str, Any]) -> Iterable[Future]:
    """A primitive is released by another branch, so there is nothing else to wait for."""
    return ()


_GROUP: Join = lambda names: names["self"]._tasks  # noqa: E731  # a table of one-liners
_ASYNCIO_JOINS: dict[CodeType, Join] = {
    _WAIT: lambda names: names["fs"],
    asyncio.TaskGroup.__aexit__.__code__: _GROUP,
    # Python 3.13.5 and newer wait in an inner coroutine.
    getattr(asyncio.TaskGroup, "_aexit", asyncio.TaskGroup.__aexit__).__code__: _GROUP,
    _WAIT_FOR: lambda names: [names["fut"]],
    getattr(asyncio.tasks, "_cancel_and_wait", asyncio.wait).__code__: lambda names: [names["fut"]],
    asyncio.Event.wait.__code__: _primitive,
    asyncio.Lock.acquire.__code__: _primitive,
    asyncio.Semaphore.acquire.__code__: _primitive,
    asyncio.Condition.wait.__code__: _primitive,
    asyncio.Queue.get.__code__: _primitive,
    asyncio.Queue.put.__code__: _primitive,
}


def _joins() -> dict[CodeType, Join]:
    # Looked up each time, because it may be imported after this module, or never.
    anyio = sys.modules.get("anyio._backends._asyncio")
    if anyio is not None and (code := anyio.TaskGroup.__aexit__.__code__) not in _ASYNCIO_JOINS:
        _ASYNCIO_JOINS[code] = _GROUP
    return _ASYNCIO_JOINS


def creator_of_task() -> FrameType | None:
    """Return the frame for which the task factory that called the caller creates a task."""
    # Skips this function, its caller and the factory, then asyncio's functions that create tasks,
    # of which there are more or fewer in each version.
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code in _STARTS:
        frame = frame.f_back
    return frame


def is_wait_for(creator: FrameType | None) -> bool:
    """Return whether a task is created by `wait_for`."""
    return creator is not None and creator.f_code is _WAIT_FOR


def started_together(creator: FrameType | None) -> Iterable[Any] | None:
    """Return what was passed to `as_completed`, if that creates a task; `None` otherwise."""
    if creator is None or creator.f_code is not _AS_COMPLETED:
        return None
    names = creator.f_locals
    awaitables: Iterable[Any] = names["fs"] if "fs" in names else names["aws"]
    return awaitables


def unwrapped(work: Any) -> Any:
    """Return the awaitable that asyncio has wrapped in a coroutine, to make a task of it."""
    frame: FrameType | None = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
    if frame is None or frame.f_code.co_name != "_wrap_awaitable":
        return work
    return frame.f_locals["awaitable"]


def timers_where(is_wanted: Callable[[object], bool]) -> list[asyncio.TimerHandle]:
    """Return the timers that code at a wanted `POSITION` has set, next one first."""
    handles = getattr(asyncio.get_running_loop(), "_scheduled", ())
    timers: list[Any] = [timer for timer in handles if not timer.cancelled()]
    matching = [timer for timer in timers if is_wanted(timer._context.get(POSITION))]
    return sorted(matching, key=lambda timer: timer.when())


def fire(timer: Any) -> None:
    """Let a timer expire now."""
    scope = getattr(timer._callback, "__self__", None)
    if scope is not None and hasattr(scope, "deadline"):
        # A cancel scope of anyio, which compares its deadline with the clock.
        scope.deadline = -math.inf
    else:
        timer._run()
        # Otherwise the loop would run it again when its time comes.
        timer.cancel()


def arguments_of(work: object) -> Mapping[str, Any]:
    """Return the arguments of a coroutine that has not started; empty for anything else.

    Until a coroutine runs, the local variables in its frame are its arguments.
    """
    if not inspect.iscoroutine(work) or inspect.getcoroutinestate(work) != inspect.CORO_CREATED:
        return {}
    frame = work.cr_frame
    return {} if frame is None else frame.f_locals


def unstarted(values: Iterable[object]) -> Iterator[Coroutine[Any, Any, Any]]:
    """Yield the coroutines among these values, also in nested lists, that have not started.

    The arguments of a coroutine are yielded before it: closing `wait_for(step(…), 5)` alone would
    leave the coroutine of the step behind, and Python would warn that it was never awaited.
    """
    for each in flatten(values):
        if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
            yield from unstarted(arguments_of(each).values())
            yield each


def flatten(values: Iterable[object]) -> Iterator[Any]:
    """Yield the values, with lists and tuples flattened."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def mark_as_async(fn: Callable[..., Any]) -> None:
    """Mark a plain function as returning a coroutine, for frameworks that check before a call.

    Since Python 3.12 this can be declared to `inspect`; before, only to asyncio's own check.
    """
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(fn)
    else:
        fn._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # private


def has_ready_callbacks() -> bool | None:
    """Return whether the running loop has callbacks to run; `None` if it cannot be determined."""
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    return None if ready is None else bool(ready)


def canceller() -> object:
    """Return the object whose method cancels a task, or withdraws that, by calling the caller."""
    names = sys._getframe(2).f_locals
    # A cancel scope of anyio also cancels the tasks of scopes nested in it.
    return names.get("origin", names.get("self"))


def is_timeout(source: object) -> bool:
    """Return whether what cancels a task is a timeout of asyncio or anyio."""
    return isinstance(source, asyncio.Timeout) or getattr(source, "_deadline", math.inf) != math.inf
