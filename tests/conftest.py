"""Fixtures for all tests, and the check that a test leaves no task running."""

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Generator

import pytest
from hypothesis import settings

pytest_plugins = ["tests.servers.fixtures", "pytester"]

# No deadline per example: a busy machine is slow, and each test has a time limit anyway.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collected tests out of garbage collection: a full one took half a second.

    Collecting tests creates objects that stay: looking for garbage during it finds hardly any.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> None:
    """Check async tests for tasks that outlive them. Sync tests have no event loop to check."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves a task running after its other fixtures were torn down."""
    before = asyncio.all_tasks()
    yield
    leftover_tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
    if leftover_tasks:
        # Tasks that were cancelled or closed by the test may need some time to end.
        _, leftover_tasks = await asyncio.wait(leftover_tasks, timeout=1)
    for task in leftover_tasks:
        # The event loop would wait for them, and a test that has failed has no time limit: calls of
        # a store that never answers would keep it waiting forever.
        task.cancel()
        asyncio.tasks._unregister_task(task)
    assert not leftover_tasks, f"the test left tasks running: {leftover_tasks}"
