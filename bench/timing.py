"""The clock of the measurements, and the unit for what needs no store: an iteration of the event
loop.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

now = time.perf_counter


async def timed(work: Awaitable[Any]) -> float:
    """Return how many seconds it takes."""
    began = now()
    await work
    return now() - began


async def loop_turn(turns: int = 3000) -> float:
    """Return the seconds of one `await asyncio.sleep(0)`."""
    began = now()
    for _ in range(turns):
        await asyncio.sleep(0)
    return (now() - began) / turns
