"""Waiting for a store takes real time, whatever clock the runs use."""

import asyncio

import pytest

from perdure import Runtime, Step, workflow
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How


@workflow("greet")
async def greet(step: Step, name: str) -> str:
    return await step("greet", lambda: f"hello {name}")


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("verb", ["acquire", "append"])
async def test_a_failed_call_is_retried_although_the_test_clock_stands_still(
    verb: str, how: How
) -> None:
    clock = TestClock()
    store = FaultyStore(MemoryStore(clock=clock), fail_at=1, how=how, verbs={verb})
    runtime = Runtime(store, workflows=[greet], clock=clock)
    async with asyncio.timeout(20):
        run = await runtime.trigger(greet, "ana")
    assert (run.output, store.failed) == ("hello ana", True)
    assert clock.monotonic() == 0
