"""How a function is driven over a leased run, and whose sessions it is driven in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import Any, TypeAlias

from perdure.clock import Clock, Duration, parse_duration
from perdure.durable.host import RunHost
from perdure.durable.session import Session
from perdure.engine.function import run_function
from perdure.engine.step import Step
from perdure.engine.tasks import Task, cancel_and_wait, detached
from perdure.errors import Cancelled, InvalidArgument, PerdureError
from perdure.result import Err, Result
from perdure.store import Store

logger = logging.getLogger(__name__)

Body: TypeAlias = Callable[[Step], Awaitable[Any]]

LEASE_TTL = timedelta(seconds=30)

_sessions: dict[tuple[int, int, timedelta], Session] = {}


async def drive(host: RunHost, body: Body) -> Result[Any, Any] | None:
    """Run the function in a task of its own until it ends.

    Return None if it was suspended or broken off; `host.execution.broken` says why.
    """
    execution = host.execution
    execution.host = host
    host.main = task = detached(run_function(execution, body))
    try:
        await _ended(task)
    except asyncio.CancelledError:
        # Whatever the function catches: it begins no further step.
        execution.break_off(Cancelled(host.id, "the task that ran it was cancelled"))
        await cancel_and_wait([task])
        raise
    finally:
        await host.close()
    if execution.broken is not None:
        if not task.cancelled() and (error := task.exception()) is not None and not host.suspended:
            logger.debug("run %r unwound with %r", host.id, error)
        return None
    if task.cancelled():
        return Err(Cancelled(host.id, "the function cancelled itself"))
    return task.result()


async def _ended(task: Task) -> None:
    """Wait for a task without cancelling it when the caller is cancelled."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    await ended


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


async def log_failure(work: Awaitable[object]) -> None:
    """Await work that need not succeed; log its failure."""
    try:
        await work
    except PerdureError as error:
        logger.warning("%s; the lease expires by itself", error)


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
