"""The examples in the docstrings of the most used names run."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from perdure import Queue, Rate, Retry, Runtime, Step, Worker, workflow
from perdure.store import Delivery
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.docs.test_snippets import blocks_of

USED_IN_A_RUN = (
    Step.__call__,
    Step.sleep,
    Step.wait_for_event,
    Step.all,
    Step.map,
    Step.race,
    Step.call,
    Step.map_runs,
    Step.approval,
    Retry,
)
USED_OUTSIDE = (workflow, Runtime, Runtime.trigger, Queue)
USED_WITH_A_RUN = (Runtime.signal, Runtime.result, Worker)


async def charge(cents: int) -> str:
    return f"receipt for {cents}"


async def pack(item: str) -> str:
    return f"parcel with {item}"


@workflow("order")
async def order(step: Step, cents: int) -> str:
    return await step("charge", charge, cents)


NAMES = {
    "Delivery": Delivery,
    "Queue": Queue,
    "Rate": Rate,
    "Retry": Retry,
    "Runtime": Runtime,
    "Step": Step,
    "Worker": Worker,
    "charge": charge,
    "order": order,
    "pack": pack,
    "workflow": workflow,
}


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def runtime(clock: TestClock) -> Runtime:
    return Runtime(MemoryStore(clock=clock), workflows=[order], clock=clock)


async def execute_example(target: Any, **names: Any) -> None:
    """Execute the only example of a docstring."""
    (block,) = blocks_of(inspect.getdoc(target) or "")
    code = compile(block.code, str(target), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, {**NAMES, **names})
    if inspect.isawaitable(running):
        await running


@pytest.mark.parametrize("target", USED_IN_A_RUN)
async def test_an_example_inside_a_workflow(
    target: Any, runtime: Runtime, clock: TestClock
) -> None:
    @workflow("example")
    async def example(step: Step) -> None:
        await execute_example(target, step=step)

    runtime.register(example)
    worker = Worker(runtime)
    await runtime.trigger(example, run_id="example", wait=False)
    await runtime.signal("example", "paid", {"cents": 4200}, wait=False)
    await worker.run_until_idle()
    for question in (await runtime.approvals()).approvals:
        await runtime.approve(question.token, by="ana")
    await clock.advance("7d")
    await worker.run_until_idle()
    await runtime.result("example")


@pytest.mark.parametrize("target", USED_OUTSIDE)
async def test_an_example_outside_of_a_workflow(
    target: Any, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await execute_example(target, runtime=runtime)


@pytest.mark.parametrize("target", USED_WITH_A_RUN)
async def test_an_example_with_a_run(target: Any, runtime: Runtime) -> None:
    await runtime.trigger(order, 4200, run_id="order-1", wait=False)
    if target is Runtime.result:
        await Worker(runtime).run_until_idle()
    await execute_example(target, runtime=runtime)
