"""Middleware: what happens around every run and every step."""

from typing import Any

from perdure import Middleware, RunContext, Runtime, Step, StepContext, workflow
from perdure.stores import MemoryStore
from perdure.testing import TestClock


async def charge(amount: int) -> str:
    return f"charged {amount}"


@workflow("order")
async def order(step: Step, amount: int) -> str:
    receipt = await step("charge", charge, amount)
    await step.sleep("settle", "1d")
    return receipt


class Audit(Middleware):
    """Records who requested each step that was executed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def around_run(self, run: RunContext, call: Any) -> Any:
        self.lines.append(f"{run.metadata['by']}: {run.workflow}")
        return await call()

    async def around_step(self, step: StepContext, call: Any) -> Any:
        value = await call()
        self.lines.append(f"{step.id}{step.args}: {value}")
        return value


async def test_a_replayed_step_is_not_audited_again() -> None:
    clock, audit = TestClock(), Audit()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[order], around=[audit], clock=clock)
    await runtime.trigger(order, 7, run_id="o-1", metadata={"by": "ana"})
    await clock.advance("1d")
    [run] = await runtime.sweep()
    assert run.output == "charged 7"
    assert audit.lines == ["ana: order", "charge(7,): charged 7", "ana: order"]
