"""A caller that is cancelled, perhaps again and again: steps may clean up, and no lease is left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import Ok, Runtime, Step, durable, workflow
from perdure.store import Store
from perdure.stores import MemoryStore, sqlite

CLEANUP = 1.3
"""Longer than the second after which other tasks are cancelled again."""


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened: Any = MemoryStore() if request.param == "memory" else sqlite(tmp_path / "runs.db")
    async with opened:
        yield opened


class Resource:
    """A step's function that holds something, and takes a while to give it back."""

    def __init__(self, cleanup: float) -> None:
        self.is_held = asyncio.Event()
        self.is_returned = False
        self._cleanup = cleanup

    async def hold(self) -> None:
        self.is_held.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(self._cleanup)
            self.is_returned = True


async def alone(step: Step, resource: Resource) -> None:
    await step("hold", resource.hold)


async def in_a_race(step: Step, resource: Resource) -> None:
    await step.race("first", step("hold", resource.hold), step("held", resource.is_held.wait))


async def beside_a_failure(step: Step, resource: Resource) -> None:
    async def fail() -> None:
        await resource.is_held.wait()
        raise ValueError("planned")

    await asyncio.gather(step("hold", resource.hold), step("fail", fail))


@pytest.mark.parametrize("function", [alone, in_a_race, beside_a_failure])
async def test_a_step_may_clean_up(function: Callable[[Step, Resource], Any]) -> None:
    resource = Resource(CLEANUP)

    async def body(step: Step) -> None:
        await function(step, resource)

    call = asyncio.ensure_future(durable.run({}, body, id="run", store=MemoryStore()))
    await resource.is_held.wait()
    if function is alone:
        call.cancel()
    await asyncio.wait([call])
    assert resource.is_returned


async def cancel_once(call: "asyncio.Task[Any]") -> None:
    call.cancel()


async def cancel_twice(call: "asyncio.Task[Any]") -> None:
    call.cancel()
    await asyncio.sleep(0.01)
    call.cancel()


async def cancel_repeatedly(call: "asyncio.Task[Any]") -> None:
    """Cancel in every iteration of the event loop, like a scope of anyio."""
    while not call.done():
        call.cancel()
        await asyncio.sleep(0)


@pytest.mark.parametrize("cleanup", [0, 0.05])
@pytest.mark.parametrize("cancel", [cancel_once, cancel_twice, cancel_repeatedly])
async def test_a_cancelled_call_leaves_no_lease(
    store: Store, cancel: Callable[["asyncio.Task[Any]"], Any], cleanup: float
) -> None:
    """The next call does not have to wait until it expires."""
    resource = Resource(cleanup)

    async def body(step: Step) -> int:
        if not resource.is_held.is_set():
            await step("hold", resource.hold)
        return 1

    call = asyncio.ensure_future(durable.run({}, body, id="run", store=store))
    await resource.is_held.wait()
    await cancel(call)
    await asyncio.wait([call])
    assert call.cancelled()
    assert resource.is_returned
    assert await durable.run({}, body, id="run", store=store) == Ok(1)


async def test_a_scope_of_anyio_around_a_trigger_leaves_no_lease(store: Store) -> None:
    resource = Resource(0)

    @workflow("holding")
    async def holding(step: Step) -> int:
        if not resource.is_held.is_set():
            await step("hold", resource.hold)
        return 1

    async with Runtime(store, workflows=[holding]) as runtime:
        with anyio.CancelScope() as scope:
            held = asyncio.ensure_future(resource.is_held.wait())
            held.add_done_callback(lambda _: scope.cancel())
            await runtime.trigger(holding, run_id="run")
        assert scope.cancelled_caught
        [run] = await runtime.sweep()
        assert (run.status, run.output) == ("completed", 1)
