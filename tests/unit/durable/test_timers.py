"""Waiting for an event, but not for longer than a time on a clock."""

import asyncio

import pytest

from perdure.clock import Clock, SystemClock
from perdure.durable.timers import wait_until_set
from perdure.testing.clock import TestClock


@pytest.mark.parametrize("clock", [SystemClock(), TestClock()])
async def test_it_returns_when_the_event_is_set(clock: Clock) -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await wait_until_set(event, clock, 3600)
    assert event.is_set()


async def test_it_sets_the_event_after_the_time() -> None:
    event = asyncio.Event()
    await wait_until_set(event, SystemClock(), 0.001)
    assert event.is_set()


async def test_the_time_is_that_of_the_clock() -> None:
    event, clock = asyncio.Event(), TestClock()
    waiting = asyncio.create_task(wait_until_set(event, clock, 3600))
    await clock.advance(3599)
    assert not waiting.done()
    await clock.advance(1)
    await waiting


async def test_it_sets_nothing_after_it_has_returned() -> None:
    """The next wait must not end because of an earlier one."""
    event, clock = asyncio.Event(), TestClock()
    event.set()
    await wait_until_set(event, clock, 1)
    event.clear()
    await clock.advance(2)
    assert not event.is_set()
