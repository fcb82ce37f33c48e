"""`perdure.testing`: test your workflows against time, failing stores and crashes."""

from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

import pytest

from perdure import Ok, Retry, Run, Runtime, Step, Workflow, workflow
from perdure.stores import MemoryStore, sqlite
from perdure.testing import CrashFound, FaultyStore, TestClock, explore_crashes


async def charge(amount: int) -> str:
    return f"charged {amount}"


async def write_down(connection: Any, amount: int) -> int:
    await connection.execute("CREATE TABLE IF NOT EXISTS paid (amount INTEGER)")
    await connection.execute("INSERT INTO paid VALUES (?)", (amount,))
    return amount


@workflow("checkout")
async def checkout(step: Step, amount: int) -> str:
    """Charge, wait until the parcel is sent, and record the payment."""
    receipt = await step("charge", charge, amount)
    await step.wait_for_event("parcel", "sent")
    await step.transaction("write down", write_down, amount)
    return receipt


def in_sqlite(clock: Any) -> Any:
    return sqlite(":memory:", clock=clock)


async def test_a_workflow_survives_every_crash() -> None:
    """`explore_crashes` kills the process before and after each of its store calls, lets another
    one continue, and compares the end and the history with a run without a crash.
    """
    report = await explore_crashes(checkout, 7, events={"sent": {"by": "post"}}, store=in_sqlite)
    assert report.crashes > 10


async def test_the_report_names_steps_that_ran_twice() -> None:
    """A crash between a step's work and its record makes a plain step run twice. A transaction
    commits its writes with its record, and does not.
    """
    report = await explore_crashes(checkout, 7, events={"sent": {}}, store=in_sqlite)
    report.assert_once("write down")
    with pytest.raises(AssertionError, match=r"'charge' ran again after\n  a crash before store"):
        report.assert_once("charge")


@workflow("order")
async def order(step: Step) -> str:
    number = await step("number", lambda: str(uuid4()))
    await step("charge", charge, 7)
    return number


async def test_comparing_the_shape_ignores_values() -> None:
    """A random number differs after a crash; without `compare="shape"` the message shows where."""
    with pytest.raises(CrashFound, match="step number: ok"):
        await explore_crashes(order)
    await explore_crashes(order, compare="shape")


async def test_a_function_can_compare_two_runs() -> None:
    """It gets the run without a crash and the one with it, and raises `AssertionError`."""

    def same_steps(clean: Run, survived: Run) -> None:
        assert [step.key for step in clean.history] == [step.key for step in survived.history]

    await explore_crashes(order, compare=same_steps)


@workflow("forgetful")
async def forgetful(step: Step) -> str:
    return str(uuid4())


async def test_a_random_number_outside_a_step_is_found() -> None:
    """It is lost with the process, and a crash shows it."""
    with pytest.raises(CrashFound, match=r"after a crash .* store call"):
        await explore_crashes(forgetful)


@workflow("reminder")
async def reminder(step: Step) -> str:
    await step.sleep("a week", timedelta(days=7))
    return "remember"


async def test_a_test_clock_can_be_advanced(clock: TestClock) -> None:
    runtime = Runtime(MemoryStore(clock=clock), workflows=[reminder], clock=clock)
    await runtime.trigger(reminder)
    await clock.advance("7 days")
    (run,) = await runtime.sweep()
    assert run.output == "remember"


async def test_a_test_clock_advances_until_a_coroutine_is_done(clock: TestClock) -> None:
    """`clock.run` is for waits in memory: between attempts, in `Workflow`, beside a worker."""

    async def patient(step: Step) -> int:
        async def fetch() -> int:
            if step.attempt < 3:
                raise ConnectionError("not yet")
            return step.attempt

        await step.sleep("a week", "7 days")
        return await step("fetch", fetch, retry=Retry(attempts=3, delay="1h"))

    result = await clock.run(Workflow("patient", clock=clock).run(patient))
    assert result == Ok(3)


@pytest.mark.parametrize("verb", ["acquire", "append"])
@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_store_is_retried_in_real_time(
    clock: TestClock, verb: str, how: Literal["before", "after"]
) -> None:
    """A write that failed is sent again, even while the test clock stands still."""
    store = FaultyStore(MemoryStore(clock=clock), fail_at=1, how=how, verbs={verb})
    run = await Runtime(store, workflows=[order], clock=clock).trigger(order)
    assert run.status == "completed"
    assert store.failed


async def test_a_store_can_be_made_to_fail() -> None:
    """Here a `FaultyStore` writes the first record, but its reply is lost. perdure sends it again,
    and the step has run once.
    """
    store = FaultyStore(MemoryStore(), fail_at=1, how="after", verbs={"append"})
    run = await Runtime(store, workflows=[order]).trigger(order)
    assert run.status == "completed"
    assert [step.key for step in run.history] == ["number", "charge"]
