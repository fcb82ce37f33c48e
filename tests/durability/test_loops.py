"""Event loops and task factories that a program may choose change nothing."""

import asyncio
import sys
from collections.abc import Callable

import pytest
import uvloop

from perdure import Step, workflow
from perdure.testing import Exploration, explore_crashes

Loop = asyncio.AbstractEventLoop


def eager_loop() -> Loop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - Python 3.12
    return loop


LOOPS: dict[str, Callable[[], Loop]] = {"asyncio": asyncio.new_event_loop}
LOOPS["uvloop"] = uvloop.new_event_loop
if sys.version_info >= (3, 12):
    LOOPS["eager"] = eager_loop


async def times_ten(number: int) -> int:
    await asyncio.sleep(0)
    return number * 10


@workflow("fan out")
async def fan_out(step: Step) -> list[object]:
    async def branch(number: int) -> int:
        value = await step("multiply", times_ten, number)
        await step.sleep("nap", number)
        return value + await step("again", times_ten, number)

    gathered = await asyncio.gather(*map(branch, (1, 2)))
    async with asyncio.TaskGroup() as group:
        event = group.create_task(step.wait_for_event("approval", "approved", returns=bool))
        late = group.create_task(branch(3))
    return [gathered, event.result(), late.result()]


# In Python 3.12, a TaskGroup that an eager task has broken drops the next coroutine it is given.
@pytest.mark.filterwarnings("ignore:coroutine 'fan_out.* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("loop", LOOPS)
def test_no_crash_changes_the_outcome(loop: str) -> None:
    async def main() -> Exploration:
        return await explore_crashes(fan_out, events={"approved": True})

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        report = runner.run(main())
    assert report.crashes > 20
