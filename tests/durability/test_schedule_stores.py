"""Schedules on every store."""

import asyncio

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import ScheduleNotFound
from perdure.store import Store


@workflow("slow")
async def slow(step: Step) -> str:
    return str(await step.wait_for_event("end", "end"))


async def test_a_schedule_starts_buffers_pauses_and_ends(every_store: Store) -> None:
    runtime = Runtime(every_store, workflows=[slow])
    schedule = await runtime.schedule("s", slow, every="1s", overlap="buffer_one")
    async with Worker(runtime, poll=0.1), asyncio.timeout(30):
        while (info := await schedule.get()) is None or not info.buffered:
            await asyncio.sleep(0.1)
        await schedule.pause(by="ana")
        [first] = info.open
        await schedule.unpause(by="ana")
        await runtime.signal(first, "end", "well", wait=False)
        assert await runtime.result(first) == "well"
        while (info := await schedule.get()) is None or info.open in ((), (first,)):
            await asyncio.sleep(0.1)
        await schedule.delete()
    assert info.started == 2
    assert await runtime.schedules() == []
    with pytest.raises(ScheduleNotFound):
        await schedule.trigger()
