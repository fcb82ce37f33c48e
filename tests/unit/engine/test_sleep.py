"""Durable sleeps in this process."""

import asyncio
from datetime import timedelta

from perdure import Cron, Ok, Step
from perdure.errors import MissingAbility
from perdure.testing import TestClock
from tests.unit.engine.bodies import NOW, advance_until_done, error_of, run, single, workflow


async def test_a_sleep_lasts_for_its_duration(clock: TestClock) -> None:
    """The duration is a timedelta, a number of seconds or a string."""

    async def body(step: Step) -> float:
        await step.sleep("a", timedelta(days=1))
        await step.sleep("b", 5)
        await step.sleep("c", "1h30m")
        return (clock.now() - NOW).total_seconds()

    result = await advance_until_done(clock, run(body, clock=clock), by="5s")
    assert result == Ok(86400 + 5 + 5400)


async def test_a_sleep_lasts_until_the_next_time_of_a_cron_expression(clock: TestClock) -> None:
    """The expression is evaluated in its time zone."""

    async def body(step: Step) -> str:
        await step.sleep("morning", Cron("0 9 * * *", tz="Europe/Berlin"))
        return clock.now().isoformat()

    result = await advance_until_done(clock, run(body, clock=clock), by="10m")
    assert result == Ok("2030-01-01T08:00:00+00:00")


async def test_a_resumed_sleep_keeps_its_wake_time(clock: TestClock) -> None:
    """A sleep that has ended is not repeated."""

    async def body(step: Step) -> str:
        await step.sleep("first", "1h")
        await step.sleep("second", "1h")
        return clock.now().isoformat()

    first = workflow(clock=clock)
    running = asyncio.ensure_future(first.run(body))
    await clock.advance("90m")
    snapshot = first.snapshot()
    running.cancel()
    await asyncio.wait([running])
    second = workflow(clock=clock, snapshot=snapshot).run(body)
    assert await advance_until_done(clock, second, by="1m") == Ok("2030-01-01T02:00:00+00:00")


async def test_waiting_for_an_event_needs_a_store() -> None:
    """The error names the missing capability and the call."""
    error = error_of(await run(single(lambda step: step.wait_for_event("ok", "approved"))))
    assert isinstance(error, MissingAbility)
    assert "inbox" in str(error)
    assert "step.wait_for_event('ok')" in str(error)
