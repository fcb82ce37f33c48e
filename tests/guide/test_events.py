"""Waiting for events: payloads, timeouts, and telling the two apart."""

from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import CodecError
from perdure.operations import Operations
from perdure.stores import MemoryStore
from perdure.testing import TestClock

LATE = "late"


@dataclass
class Payment:
    cents: int


@workflow("order")
async def order(step: Step) -> Any:
    payment = await step.wait_for_event("payment", "paid", timeout="3d", default=LATE)
    return await step("book", lambda: payment)


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture(params=[False, True], ids=["straight", "always_replay"])
def runtime(request: pytest.FixtureRequest, clock: TestClock) -> Runtime:
    """With `always_replay`, each value comes from its record."""
    store = MemoryStore(clock=clock)
    return Runtime(store, workflows=[order], clock=clock, always_replay=request.param)


async def finish(runtime: Runtime, run_id: str) -> Any:
    await Worker(runtime).run_until_idle()
    return await runtime.result(run_id, timeout="5s")


@pytest.mark.parametrize("payload", [None, False, {"cents": 5}])
async def test_an_event_is_received_with_its_payload(runtime: Runtime, payload: object) -> None:
    """Even if it has none: the default is for timeouts only."""
    await runtime.trigger(order, run_id="1")
    await runtime.signal("1", "paid", payload, wait=False)
    assert await finish(runtime, "1") == payload


async def test_a_wait_that_times_out_returns_the_default(
    runtime: Runtime, clock: TestClock
) -> None:
    await runtime.trigger(order, run_id="1")
    await clock.advance("3d")
    assert await finish(runtime, "1") == LATE


async def test_a_wait_that_an_operator_ends_returns_the_default(
    runtime: Runtime, clock: TestClock
) -> None:
    await runtime.trigger(order, run_id="1")
    await Operations(runtime.store, clock=clock).wake("1", by="ana", why="the shop is closed")
    assert await finish(runtime, "1") == LATE


async def test_a_payload_that_does_not_fit_can_be_ignored(runtime: Runtime) -> None:
    """One malformed webhook need not fail the run."""

    @workflow("careful")
    async def careful(step: Step) -> int:
        while True:
            try:
                payment = await step.wait_for_event("payment", "paid", returns=Payment, default="?")
            except CodecError:
                continue
            return payment.cents if isinstance(payment, Payment) else 0

    runtime.register(careful)
    await runtime.trigger(careful, run_id="1")
    await runtime.signal("1", "paid", {"cents": "a lot"}, wait=False)
    await runtime.signal("1", "paid", {"cents": 5}, wait=False)
    assert await finish(runtime, "1") == 5
