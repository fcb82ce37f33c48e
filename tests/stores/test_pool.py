"""The pool of connections that stores on a server share."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import StoreUnavailable
from perdure.stores._pool import ConnectionPool


class Pool(ConnectionPool):
    """A pool for a server that can be down."""

    def __init__(self) -> None:
        clock = SystemClock()
        super().__init__("Shop", "shop:1", limit=2, connect_timeout=0.2, clock=clock)
        self.is_down = True
        self.aborted: list[Any] = []

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        return ()

    async def _connect_once(self) -> Any:
        if self.is_down:
            raise StoreUnavailable("shop:1 is unavailable: refused")
        return object()

    def _is_open(self, connection: Any) -> bool:
        return True

    async def _close(self, connection: Any) -> None: ...

    def _abort(self, connection: Any) -> None:
        self.aborted.append(connection)


class SwallowingPool(Pool):
    """A pool whose driver swallows a cancellation, as asyncio.wait_for does before Python 3.12."""

    async def _connect_once(self) -> Any:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "connected"


async def test_an_outage_is_logged_once_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"refused \(tried for 0\.\ds\)"):
            await pool.acquire()
    expected = "shop:1 is unavailable: refused; retrying for up to 0.2s"
    assert caplog.messages == [expected]
    pool.is_down = False
    connection = await pool.acquire()
    await pool.release(connection, reusable=False)
    pool.is_down = True
    with pytest.raises(StoreUnavailable):
        await pool.acquire()
    assert caplog.messages == [expected] * 2


async def test_a_cancellation_that_the_driver_swallowed_is_raised() -> None:
    """The connection is not kept, and its place is free."""
    pool = SwallowingPool()
    caller = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    assert pool.aborted == ["connected"]
    assert pool._free._value == 2
