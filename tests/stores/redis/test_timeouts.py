"""Timeouts that share a timer."""

import asyncio

import pytest

from perdure.stores.redis.timeouts import Timeouts


async def wait(timeouts: Timeouts, seconds: float) -> float:
    """Sleep under a timeout; return how long it took, or raise `TimeoutError`."""
    async with asyncio.timeout(None) as timeout:
        timeouts.begin(timeout)
        try:
            await asyncio.sleep(seconds)
        finally:
            timeouts.end(timeout)
    return seconds


async def test_each_call_expires_after_its_own_time() -> None:
    """The timer of the first call is set again for the second."""
    timeouts = Timeouts(0.1)
    loop = asyncio.get_running_loop()
    first = asyncio.ensure_future(wait(timeouts, 10))
    await asyncio.sleep(0.05)
    began = loop.time()
    with pytest.raises(TimeoutError):
        await wait(timeouts, 10)
    assert loop.time() - began >= 0.09
    with pytest.raises(TimeoutError):
        await first


async def test_a_call_after_others_have_ended_expires() -> None:
    """Although the timer began before it."""
    timeouts = Timeouts(0.1)
    assert await wait(timeouts, 0.05) == 0.05
    with pytest.raises(TimeoutError):
        await wait(timeouts, 10)
    with pytest.raises(TimeoutError):
        await wait(timeouts, 10)


async def test_a_call_that_is_cancelled_does_not_raise_a_timeout() -> None:
    """The caller's cancellation is not confused with that of the timer."""
    timeouts = Timeouts(0.05)
    call = asyncio.ensure_future(wait(timeouts, 10))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0.1)
    assert call.cancelled()


async def test_without_a_length_there_is_no_timeout() -> None:
    assert await wait(Timeouts(None), 0.05) == 0.05
