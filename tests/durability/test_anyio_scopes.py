"""A scope of anyio that expires during a write ends there, and the run continues.

A scope recognizes its cancellation by the message. Any other one would end the whole run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest

from perdure import Runtime, Step, workflow
from perdure.engine.tasks import Interrupted, cancel_and_wait, finish
from perdure.store import Entry, Verdict
from perdure.stores import MemoryStore
from perdure.stores._cancellation import swallowed_cancellation

SCOPE, WRITE = 0.02, 0.06


class SlowStore(MemoryStore):
    """A store that takes longer for a write than the scope lasts."""

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        await asyncio.sleep(WRITE)
        return await super().append(entries)

    async def transact(
        self, id: str, epoch: int, work: Callable[[Any], Awaitable[Entry]], /
    ) -> Verdict:
        verdict = await super().transact(id, epoch, work)
        await asyncio.sleep(WRITE)
        return verdict


async def fast() -> int:
    return 1


async def fail() -> int:
    raise ValueError("planned")


async def undo(value: int) -> None:
    pass


async def transact(connection: Any) -> int:
    return 1


@workflow("child")
async def child(step: Step) -> None:
    """Do nothing."""


async def roll_back(step: Step) -> None:
    async with step.saga("saga"):
        await step("with an undo", fast, undo=undo)
        raise ValueError("planned")


CALLS: dict[str, Callable[[Step], Awaitable[Any]]] = {
    "step": lambda step: step("call", fast),
    "step with a key": lambda step: step("call", fast, key="key"),
    "failing step": lambda step: step("call", fail),
    "retried step": lambda step: step("call", fail, retry=2),
    "transaction": lambda step: step.transaction("call", transact),
    "all": lambda step: step.all(step("call", fast), step("other", fast)),
    "race": lambda step: step.race("race", step("call", fast), step("other", fast)),
    "map": lambda step: step.map("call", [1, 2], lambda item: item),
    "child": lambda step: step.call("call", child),
    "started child": lambda step: step.start("call", child),
    "sleep": lambda step: step.sleep("call", 0.01),
    "approval": lambda step: step.approval("call", "Really?", timeout="1h"),
    "saga": roll_back,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("branches", [1, 3])
async def test_the_function_continues_after_the_scope(name: str, branches: int) -> None:
    """Several branches wait for the same write, a lone one writes by itself."""

    async def call(step: Step, _: int) -> bool:
        with anyio.move_on_after(SCOPE) as scope:
            await CALLS[name](step)
        return scope.cancelled_caught

    @workflow("scopes")
    async def scopes(step: Step) -> list[bool]:
        if branches == 1:
            caught = [await call(step, 0)]
        else:
            caught = list(await asyncio.gather(*(call(step, number) for number in range(branches))))
        await step("after the scope", fast)
        return caught

    store = SlowStore()
    async with Runtime(store, workflows=[scopes, child]) as runtime:
        run = await runtime.trigger(scopes)
        assert (run.status, run.output) == ("completed", [True] * branches)


class SwallowingStore(MemoryStore):
    """A store whose driver has swallowed a cancellation, whose message is therefore unknown."""

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(WRITE)
            return await super().append(entries)
        raise swallowed_cancellation()


async def test_a_cancellation_that_a_driver_swallowed_ends_at_its_scope() -> None:
    @workflow("scope")
    async def scope(step: Step) -> bool:
        with anyio.move_on_after(SCOPE) as scope:
            await step("call", fast)
        await step("after the scope", fast)
        return scope.cancelled_caught

    async with Runtime(SwallowingStore(), workflows=[scope]) as runtime:
        run = await runtime.trigger(scope)
        assert (run.status, run.output) == ("completed", True)


async def test_a_cancellation_from_elsewhere_does_not_end_at_the_scope() -> None:
    """It has no message; the task was cancelled, and by the scope as well."""
    task = asyncio.ensure_future(asyncio.sleep(3 * SCOPE))

    async def wait() -> None:
        with anyio.move_on_after(SCOPE):
            try:
                await finish(task)
            except Interrupted as interruption:
                raise interruption.plain() from None

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(2 * SCOPE)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_waiting_for_cancelled_tasks_does_not_hide_whose_cancellation_it_was() -> None:
    async def linger() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(3 * SCOPE)

    task = asyncio.ensure_future(linger())
    await asyncio.sleep(0)
    with anyio.move_on_after(SCOPE) as scope:
        await cancel_and_wait([task])
    assert scope.cancelled_caught
