"""How a run is stored and released when it ends."""

from perdure import Runtime, Step, workflow
from perdure.stores import MemoryStore


async def test_a_run_whose_output_is_too_large_fails_with_its_records() -> None:
    """Even if only its result was to be kept: a retry must not run its steps again."""
    calls: list[str] = []

    async def charge() -> None:
        calls.append("charge")

    @workflow("order")
    async def order(step: Step[None]) -> str:
        await step("charge", charge)
        return "x" * 20_000

    runtime = Runtime(MemoryStore(max_value_size=10_000), workflows=[order], keep="result")
    run = await runtime.trigger(order, run_id="o")
    assert (run.status, [each.key for each in run.history]) == ("failed", ["charge"])
    await runtime.retry("o")
    assert calls == ["charge"]
