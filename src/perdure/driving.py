"""How a function is driven over a leased run, and whose sessions it is driven in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import Any, TypeAlias

from perdure.clock import Clock, Duration, parse_duration
from perdure.errors import Cancelled, InvalidArgument, PerdureError
from perdure.function import conduct
from perdure.ownership import Home, Session
from perdure.result import Err, Result
from perdure.step import Step
from perdure.store import Store

logger = logging.getLogger(__name__)

Body: TypeAlias = Callable[[Step], Awaitable[Any]]

LEASE_TTL = timedelta(seconds=30)

_sessions: dict[tuple[int, int, timedelta], Session] = {}


async def drive(home: Home, body: Body) -> Result[Any, Any] | None:
    """Run the function in a task of its own until it ends; None when it was put to rest or lost."""
    execution = home.execution
    execution.home = home
    task = asyncio.Task(conduct(execution, body), loop=asyncio.get_running_loop())
    home.main = task
    try:
        await _ended(task)
    except asyncio.CancelledError:
        # What the function catches does not matter: it begins no further step.
        execution.break_off(Cancelled(home.id, "the task that ran it was cancelled"))
        await _unwind(task)
        raise
    finally:
        await home.parking.close()
        if execution.lineage.tasks:
            await _unwind(*execution.lineage.tasks)
    if execution.broken is not None:
        if not task.cancelled() and (error := task.exception()) is not None and not home.suspended:
            logger.debug("run %r unwound with %r", home.id, error)
        return None
    if task.cancelled():
        return Err(Cancelled(home.id, "the function cancelled itself"))
    return task.result()


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Wait for a task without cancelling it when the waiting is cancelled."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    await ended


async def _unwind(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def borrow(store: Store, clock: Clock, lease_ttl: timedelta) -> Session:
    """Give the session of this store and event loop; enter it to use it."""
    loop = asyncio.get_running_loop()
    key = (id(store), id(loop), lease_ttl)
    session = _sessions.get(key)
    # A loop that was closed in the middle of a run may have left its session, and its address.
    if session is None or session.idle or session.loop is not loop:
        session = _sessions[key] = Session(store, clock, lease_ttl)
        session.on_idle = lambda: _sessions.pop(key, None)
    return session


def new_owner(random: Random) -> str:
    """Give a name that no other owner has."""
    return f"{random.getrandbits(96):024x}"


async def quietly(work: Awaitable[object]) -> None:
    """Do what would be good but need not be: a failure is logged."""
    try:
        await work
    except PerdureError as error:
        logger.warning("%s; the lease ends by itself", error)


def check_lease_ttl(lease_ttl: Duration) -> timedelta:
    """Give how long a lease lasts, or raise: longer than nothing."""
    ttl = parse_duration(lease_ttl, "lease_ttl")
    if not ttl:
        raise InvalidArgument("lease_ttl", lease_ttl, "a duration longer than nothing")
    return ttl


_default: list[Store] = []


def default_store() -> Store:
    """Give this process's own memory store, the one for calls that name none."""
    if not _default:
        from perdure.stores.memory import MemoryStore

        _default.append(MemoryStore())
    return _default[0]
