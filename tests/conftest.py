"""What every test may use, and what every test must leave behind: nothing."""

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

pytest_plugins = ["tests.servers.fixtures"]

# A busy machine is slow, not wrong: the time limit per test is enough.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> None:
    """Check async tests for tasks that outlive them; sync tests have no loop to look at."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    """Fail the test that leaves a task behind after its other fixtures have closed."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        # What was just cancelled or closed may need a moment.
        _, left = await asyncio.wait(left, timeout=1)
    assert not left, f"the test left tasks running: {left}"
