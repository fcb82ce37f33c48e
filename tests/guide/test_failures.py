"""When a run fails: catching exceptions, reading what happened, and trying again."""

import asyncio
from typing import Any

import pytest

from perdure import Runtime, Step, StepError, workflow
from perdure.runtime.definition import Definition
from perdure.stores import MemoryStore


class PaymentDeclined(Exception):
    def __init__(self, amount: int) -> None:
        super().__init__(f"{amount}: no funds")
        self.amount = amount


async def charge(amount: int) -> str:
    raise PaymentDeclined(amount)


async def drive(runtime: Runtime, definition: Definition[None, Any], run_id: str) -> object:
    """Trigger a run and continue it, always in a new activation, until it ends."""
    run = await runtime.trigger(definition, run_id=run_id)
    while not run.over:
        (run,) = await runtime.sweep()
    return run.output


@pytest.fixture(params=[False, True], ids=["straight", "always_replay"])
def always_replay(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_an_exception_is_caught_by_its_class(always_replay: bool) -> None:
    """The first time, and when it comes from the record of the step."""

    @workflow("order")
    async def order(step: Step) -> str:
        try:
            return await step("charge", charge, 42)
        except PaymentDeclined as error:
            return await step("apologize", "sorry for {}".format, error.amount)

    runtime = Runtime(MemoryStore(), workflows=[order], always_replay=always_replay)
    assert await drive(runtime, order, "order-1") == "sorry for 42"


async def test_a_class_that_no_function_has_at_hand_is_a_step_error(always_replay: bool) -> None:
    async def visit() -> None:
        raise type("Elsewhere", (Exception,), {})("far away")

    @workflow("visit")
    async def visiting(step: Step) -> str:
        try:
            await step("visit", visit)
        except StepError as error:
            return await step("report", "{}: {}".format, error.name, error.message)
        return "back"

    runtime = Runtime(MemoryStore(), workflows=[visiting], always_replay=always_replay)
    assert await drive(runtime, visiting, "visit-1") == "Elsewhere: far away"


async def test_a_group_is_caught_by_the_classes_of_its_members(always_replay: bool) -> None:
    @workflow("orders")
    async def orders(step: Step) -> list[str]:
        declined: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(step("charge", charge, 42))
        except* PaymentDeclined as group:
            declined += [str(error) for error in group.exceptions]
        return declined

    runtime = Runtime(MemoryStore(), workflows=[orders], always_replay=always_replay)
    assert await drive(runtime, orders, "orders-1") == ["42: no funds"]


async def test_a_failed_run_says_what_happened() -> None:
    """`error` is the exception, `traceback` is text; the failed step has both too."""

    @workflow("order")
    async def order(step: Step) -> str:
        return await step("charge", charge, 42)

    runtime = Runtime(MemoryStore(), workflows=[order])
    await runtime.trigger(order, run_id="order-1")
    run = await runtime.get_run("order-1")
    assert run is not None
    assert isinstance(run.error, PaymentDeclined)
    assert "in charge" in run.traceback
    [step] = run.history
    assert isinstance(step.error, PaymentDeclined)
    assert "in charge" in step.traceback
