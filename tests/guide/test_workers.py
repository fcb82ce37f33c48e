"""Running and watching workers."""

import asyncio
import time

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from perdure.worker import pace


class Carrier:
    """A service that a step waits for."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()

    async def ship(self) -> None:
        await self.is_up.wait()


@workflow("order")
async def order(step: Step[Carrier]) -> str:
    await step("ship", step.deps.ship)
    return "shipped"


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()


@pytest.fixture
def runtime(clock: TestClock, carrier: Carrier) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[order], deps=carrier, clock=clock)


@pytest.fixture
def insights(runtime: Runtime, clock: TestClock) -> Insights:
    return Insights(runtime.store, clock=clock)


async def test_a_worker_shows_the_steps_that_it_executes(
    runtime: Runtime, insights: Insights, clock: TestClock, carrier: Carrier
) -> None:
    await runtime.trigger(order, run_id="order-1", wait=False)
    async with Worker(runtime):
        await clock.advance(15)
        [worker] = await insights.workers()
        carrier.is_up.set()
    assert [(step.run_id, step.key) for step in worker.in_flight] == [("order-1", "ship")]


async def test_a_paused_workflow_waits_until_it_is_resumed(
    runtime: Runtime, clock: TestClock, carrier: Carrier
) -> None:
    carrier.is_up.set()
    operations = Operations(runtime.store, clock=clock)
    await operations.pause_workflow("order", by="ana", why="outage")
    await runtime.trigger(order, run_id="order-1", wait=False)
    async with Worker(runtime):
        await clock.advance(60)
        queued_run = await runtime.get_run("order-1")
        await operations.unpause_workflow("order", by="ana", why="over")
        await clock.advance(10)
        resumed = await runtime.get_run("order-1")
    assert queued_run is not None
    assert resumed is not None
    assert (queued_run.status, resumed.status) == ("queued", "completed")


async def test_an_operator_drains_a_worker(runtime: Runtime, clock: TestClock) -> None:
    worker = Worker(runtime)
    serving = asyncio.create_task(worker.serve())
    await clock.advance(1)
    await Operations(runtime.store, clock=clock).drain_worker(worker.id, by="ana", why="deploy")
    await clock.advance(10)
    await serving


async def test_a_worker_works_until_nothing_is_due(
    runtime: Runtime, clock: TestClock, carrier: Carrier
) -> None:
    carrier.is_up.set()
    await runtime.trigger(order, run_id="order-1", wait=False)
    await clock.run(Worker(runtime).run_until_idle())
    assert await runtime.result("order-1") == "shipped"


async def test_a_step_that_blocks_the_event_loop_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lambda is called in the event loop: while it blocks, no other run continues."""
    monkeypatch.setattr(pace, "BLOCKED_AFTER", 0.2)

    @workflow("thumbnail")
    async def thumbnail(step: Step, seconds: float) -> None:
        await step("shrink", lambda: time.sleep(seconds))

    runtime = Runtime(MemoryStore(), workflows=[thumbnail])
    async with Worker(runtime, poll=0.01):
        for _ in range(3):
            run = await runtime.trigger(thumbnail, 0.5, wait=False)
            await runtime.result(run, timeout="30s")
            await asyncio.sleep(0.05)
    (warning,) = [each for each in caplog.messages if "event loop was blocked" in each]
    assert "step('id', function, argument): it is called in a thread" in warning
