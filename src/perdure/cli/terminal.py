"""Read keys on a terminal, and wait with a timeout."""

import asyncio
import os
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from perdure.clock import SystemClock
from perdure.engine.tasks import detached

if sys.platform != "win32":
    import termios
    import tty

T = TypeVar("T")


@contextmanager
def keys(queue: asyncio.Queue[str]) -> Generator[None, None, None]:
    """Put each key that is pressed on a terminal into a queue."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)
    loop.add_reader(terminal, lambda: queue.put_nowait(os.read(terminal, 1).decode("latin-1")))
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def within(seconds: float, waiting: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, or raise `TimeoutError` and cancel it."""
    task, timer = detached(waiting), detached(SystemClock().sleep(seconds))
    try:
        await asyncio.wait([task, timer], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError(f"not finished after {seconds:g} s")
        return task.result()
    finally:
        timer.cancel()
        task.cancel()
