"""When a run fails: catching exceptions, reading what happened, and trying again."""

import asyncio
from typing import Any

import pytest

from perdure import Retry, Runtime, Step, StepError, Worker, workflow
from perdure.runtime.definition import Definition
from perdure.stores import MemoryStore
from perdure.testing import TestClock


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


async def test_an_exception_keeps_its_cause_and_its_notes(always_replay: bool) -> None:
    async def fetch() -> None:
        error = PaymentDeclined(42)
        error.add_note("card ends in 42")
        raise error from ConnectionError("reset")

    @workflow("order")
    async def order(step: Step) -> list[str]:
        try:
            await step("fetch", fetch)
        except PaymentDeclined as error:
            return await step("tell", list, [*error.__notes__, repr(error.__cause__)])
        return []

    runtime = Runtime(MemoryStore(), workflows=[order], always_replay=always_replay)
    assert await drive(runtime, order, "order-1") == ["card ends in 42", "ConnectionError('reset')"]


async def test_a_class_that_no_function_can_name_is_a_step_error(always_replay: bool) -> None:
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


async def test_a_failed_run_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It names the run, its workflow, the step and the attempt, and has the traceback."""

    @workflow("order")
    async def order(step: Step) -> str:
        return await step("charge", charge, 42, retry=Retry(2, delay=0))

    await Runtime(MemoryStore(), workflows=[order]).trigger(order, run_id="order-1")
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    line = "run 'order-1' of workflow 'order' failed at step 'charge' (attempt 2)"
    assert record.getMessage().startswith(line)
    assert "in charge" in caplog.text


async def test_a_worker_counts_failures_and_retries() -> None:
    @workflow("order")
    async def order(step: Step) -> str:
        return await step("charge", charge, 42, retry=Retry(3, delay=0))

    runtime = Runtime(MemoryStore(), workflows=[order])
    await runtime.trigger(order, wait=False)
    worker = Worker(runtime)
    await worker.run_until_idle()
    counters = worker.counters
    assert (counters.failed, counters.cancelled, counters.retried) == (1, 0, 2)


def order_of_the(deployment: str) -> Definition[None, str]:
    if deployment == "first":

        @workflow("order")
        async def order(step: Step) -> str:
            await step.sleep("nap", "1h")
            return "first"

    else:

        @workflow("order")
        async def order(step: Step) -> str:
            await step.sleep("nap", "1h")
            return "second"

    return order


async def test_changed_code_under_the_same_version_is_a_warning(
    clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues with the new code; `on_definition_change="error"` leaves it alone."""
    store = MemoryStore(clock=clock)
    first = Runtime(store, workflows=[order_of_the("first")], clock=clock)
    await first.trigger("order", run_id="order-1")
    await clock.advance("1h")
    second = Runtime(store, workflows=[order_of_the("second")], clock=clock)
    (run,) = await second.sweep()
    assert run.output == "second"
    assert "its version is still 1" in caplog.text
