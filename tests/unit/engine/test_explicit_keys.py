"""Calls with an explicit key are answered and replayed like all others."""

import asyncio

from perdure import Err, Step, durable
from perdure.stores import MemoryStore


async def test_a_failure_under_a_key_lets_other_branches_show_their_undos() -> None:
    """Replayed at once, it would make the group cancel its sibling before that calls its step."""
    undone: list[str] = []
    reserved = asyncio.Event()

    async def reserve() -> str:
        reserved.set()
        return "seat"

    async def charge() -> None:
        await reserved.wait()
        raise ValueError("no funds")

    async def prepare_and_reserve(step: Step) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        await step("reserve", reserve, undo=undone.append)

    async def book(step: Step) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(step("charge", charge, key="charge-1"))
            group.create_task(prepare_and_reserve(step))

    result = await durable.run({}, book, id="trip", store=MemoryStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, ExceptionGroup)
    assert undone == ["seat"]
