"""Suspension: what happens to `finally`, `async with` and tasks around a wait."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from perdure import Run, Runtime, Step, workflow
from perdure.runtime import Definition
from perdure.stores import MemoryStore
from perdure.testing import TestClock

log: list[str] = []


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    log.clear()


class Scenario:
    """A run that is suspended for a day, and then resumed."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.runtime = Runtime(MemoryStore(clock=self.clock), clock=self.clock)

    async def suspend(self, workflow: Definition[None, Any]) -> None:
        run = await self.runtime.trigger(workflow)
        assert run.status in ("suspended", "waiting")

    async def resume(self) -> Run:
        await self.clock.advance("1 day")
        (run,) = await self.runtime.sweep()
        return run


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


async def test_finally_runs_at_each_suspension(scenario: Scenario) -> None:
    """The function is unwound, and runs again from the top when the wait ends."""

    @workflow("reminder")
    async def reminder(step: Step) -> None:
        try:
            await step.sleep("a day", "1 day")
        finally:
            log.append("finally")

    await scenario.suspend(reminder)
    assert log == ["finally"]
    await scenario.resume()
    assert log == ["finally", "finally"]


@asynccontextmanager
async def connection() -> AsyncGenerator[None]:
    log.append("open")
    try:
        yield
    finally:
        log.append("close")


async def test_a_context_manager_is_left_and_entered_again(scenario: Scenario) -> None:
    """Its resource is released during the wait."""

    @workflow("connected")
    async def connected(step: Step) -> None:
        async with connection():
            await step.sleep("a day", "1 day")
            log.append("use")

    await scenario.suspend(connected)
    assert log == ["open", "close"]
    await scenario.resume()
    assert log == ["open", "close", "open", "use", "close"]


async def test_a_context_manager_inside_a_step_is_not_affected(scenario: Scenario) -> None:
    """A run leaves memory only when no step is running."""

    async def use() -> None:
        async with connection():
            await asyncio.sleep(0.001)
            log.append("use")

    @workflow("stepwise")
    async def stepwise(step: Step) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(step("use", use))
            tasks.create_task(step.sleep("a day", "1 day"))

    await scenario.suspend(stepwise)
    await scenario.resume()
    assert log == ["open", "use", "close"]


async def test_a_suspension_is_not_an_exception(scenario: Scenario) -> None:
    """`except Exception` runs when the run really fails: the place to undo something."""

    @workflow("reservation")
    async def reservation(step: Step) -> None:
        try:
            if await step.wait_for_event("payment", "paid", timeout="1 day") is None:
                raise TimeoutError("not paid")
        except Exception:
            await step("release", log.append, "released")
            raise

    await scenario.suspend(reservation)
    assert log == []
    assert (await scenario.resume()).status == "failed"
    assert log == ["released"]


async def test_a_step_in_finally_runs_when_the_wait_has_ended(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """While the function is unwound by the suspension, steps are refused with a warning."""

    @workflow("cleaning")
    async def cleaning(step: Step) -> None:
        try:
            await step.sleep("a day", "1 day")
        finally:
            await step("clean up", log.append, "cleaned up")

    await scenario.suspend(cleaning)
    assert log == []
    assert "'clean up' was called while the function is being unwound" in caplog.text
    await scenario.resume()
    assert log == ["cleaned up"]


async def test_a_run_that_works_while_it_waits_stays_in_memory(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is interrupted. A warning names the task and what it awaits."""

    @workflow("polling")
    async def polling(step: Step) -> None:
        async def poll() -> None:
            while True:
                await scenario.clock.sleep(0.1)

        polls = asyncio.create_task(poll())
        await step.sleep("a minute", "1m")
        polls.cancel()

    run = await scenario.clock.run(scenario.runtime.trigger(polling))
    assert run.status == "completed"
    assert "waits, but stays in memory" in caplog.text
    assert "poll" in caplog.text


request_id: ContextVar[str] = ContextVar("request_id", default="none")


async def test_context_variables_are_those_of_the_process_that_resumes(scenario: Scenario) -> None:
    """What a step recorded stays."""

    @workflow("context")
    async def context(step: Step) -> list[str]:
        recorded = await step("request id", request_id.get)
        await step.sleep("a day", "1 day")
        return [recorded, request_id.get()]

    token = request_id.set("request-7")
    await scenario.suspend(context)
    request_id.reset(token)
    assert (await scenario.resume()).output == ["request-7", "none"]


async def test_a_timeout_of_asyncio_begins_again(scenario: Scenario) -> None:
    """The timeout of `wait_for_event` is recorded, and does not start again."""

    @workflow("approval")
    async def approval(step: Step) -> bool:
        async with asyncio.timeout(60) as limit:
            ends.append(limit.when())
            return await step.wait_for_event("answer", "answered", timeout="1 day") is None

    ends: list[float | None] = []
    await scenario.suspend(approval)
    assert (await scenario.resume()).output is True
    first, second = ends
    assert first is not None
    assert second is not None
    assert first < second
