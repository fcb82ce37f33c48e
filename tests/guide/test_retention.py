"""How long finished runs are kept."""

from perdure import Keep, Runtime, Step, workflow
from perdure.stores import MemoryStore
from perdure.testing import TestClock


@workflow("welcome", keep=Keep(completed="7d", failed="90d"))
async def welcome(step: Step, name: str) -> str:
    return await step("greet", lambda: f"hello {name}")


@workflow("charge", keep="result")
async def charge(step: Step, amount: int) -> str:
    return await step("pay", lambda: f"paid {amount}")


async def test_a_completed_run_is_removed_after_its_time() -> None:
    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[welcome], clock=clock)
    await runtime.declare_retention()
    await runtime.trigger(welcome, "ana", run_id="w-1")
    await clock.advance("6 days")
    await runtime.sweep()
    assert await runtime.get_run("w-1") is not None
    await clock.advance("2 days")
    await runtime.sweep()
    assert await runtime.get_run("w-1") is None


async def test_a_run_of_which_the_result_is_kept_has_no_steps_and_keeps_its_id() -> None:
    runtime = Runtime(MemoryStore(), workflows=[charge])
    run = await runtime.trigger(charge, 42, run_id="c-1")
    assert (run.output, run.history) == ("paid 42", ())
    assert (await runtime.trigger(charge, 42, run_id="c-1")).output == "paid 42"
