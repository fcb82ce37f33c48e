"""Call a step's function: awaited, in a thread or in place, with or without a timeout."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

from perdure.clock import Clock
from perdure.engine.tasks import detached
from perdure.errors import InvalidArgument

_IN_PLACE, _AWAITED, _THREADED = range(3)
_styles: dict[object, int] = {}
_async_code: set[object] = set()


def is_awaited(fn: Any) -> bool:
    """Return whether a step's function is known to be async, as most are."""
    try:
        return fn.__code__ in _async_code
    except AttributeError:
        return False


async def invoke(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a step's function: async functions and lambdas in place, any other in a thread."""
    code = getattr(fn, "__code__", None)
    style = _styles.get(code) if code is not None else None
    if style is None:
        style = _call_style(fn)
        if code is not None:
            _styles[code] = style
            if style == _AWAITED:
                _async_code.add(code)
    if style == _AWAITED:
        return await fn(*args)
    if style == _IN_PLACE:
        value = fn(*args)
    else:
        value = await asyncio.to_thread(_in_thread, fn, args)
        # Since Python 3.13, awaiting a thread that has already ended does not yield. What it asked
        # the loop to do, such as a report, must happen before the step ends.
        await asyncio.sleep(0)  # noqa: TID251  # no time passes: one iteration of the loop
    return await value if inspect.isawaitable(value) else value


def _in_thread(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except StopIteration as error:
        # A future cannot hold a StopIteration: its waiter would never be woken.
        raise RuntimeError("a step's function raised StopIteration") from error


def _call_style(fn: Callable[..., Any]) -> int:
    while isinstance(fn, partial):
        fn = fn.func
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        # An exception that can be recorded as it is, since it becomes the failure of the step.
        name = getattr(fn, "__name__", "the function")
        raise TypeError(f"{name} is a generator: a step records one value, such as a list of all")
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        return _AWAITED
    return _IN_PLACE if getattr(fn, "__name__", "") == "<lambda>" else _THREADED


def not_callable(id: str, fn: object) -> InvalidArgument:
    """Return the error for a step that was given something that cannot be called."""
    if inspect.iscoroutine(fn):
        fn.close()
    expected = "a function, not a coroutine" if inspect.isawaitable(fn) else "a function"
    return InvalidArgument(
        "fn",
        fn,
        expected,
        f"Write step({id!r}, function, argument) or step({id!r}, lambda: function(argument)): "
        "a step that is already recorded must not be called at all",
    )


class Elapsed(Exception):
    """The time ran out first."""


async def with_timeout(clock: Clock, timeout: timedelta, work: Awaitable[Any]) -> Any:
    """Await `work`; if `timeout` passes on the clock first, cancel it and raise `Elapsed`."""
    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    has_elapsed = False

    async def watch() -> None:
        nonlocal has_elapsed
        await clock.sleep(timeout)
        has_elapsed = True
        task.cancel()

    timer = detached(watch())
    try:
        return await work
    except asyncio.CancelledError:
        # If there is one more than ours, the caller was cancelled too, and must not see a timeout
        # instead.
        if has_elapsed and task.cancelling() <= cancels + 1:
            raise Elapsed from None
        raise
    finally:
        timer.cancel()
        if has_elapsed:
            # Restore the caller's count, which an `asyncio.timeout` around the step compares.
            task.uncancel()
