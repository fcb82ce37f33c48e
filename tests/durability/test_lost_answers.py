"""A store that fails once, before or after a call took effect: only the log shows it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from perdure import Ok, Runtime, Step, durable, workflow
from perdure.store import Delivery
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

HOWS: list[How] = ["before", "after"]


async def patient(work: Awaitable[Any], clock: TestClock) -> Any:
    """Advance the clock, since a failed call is retried after a while."""
    task = asyncio.ensure_future(work)
    for _ in range(30):
        await clock.advance(0.3)
        if task.done():
            break
    return await task


@pytest.mark.parametrize("how", HOWS)
async def test_a_trigger_continues_and_every_step_runs_once(how: How) -> None:
    """A write whose reply was lost is sent again, whichever it is."""
    effects: Counter[str] = Counter()

    async def note(text: str) -> str:
        effects[text] += 1
        return text

    @workflow("two")
    async def two(step: Step) -> list[str]:
        first = await step("one", note, "one")
        rest = await asyncio.gather(step("two", note, "two"), step("three", note, "three"))
        return [first, *rest]

    for call in range(1, 100):
        effects.clear()
        clock = TestClock()
        store = FaultyStore(
            MemoryStore(clock=clock), fail_at=call, how=how, verbs={"acquire", "append"}
        )
        runtime = Runtime(store, workflows=[two], clock=clock)
        run = await patient(runtime.trigger(two, run_id="run"), clock)
        assert (run.status, run.output) == ("completed", ["one", "two", "three"])
        assert set(effects.values()) == {1}
        if not store.failed:
            break
    assert call > 4


@pytest.mark.parametrize("how", HOWS)
async def test_a_trigger_of_an_existing_id_does_not_take_over_the_run(how: How) -> None:
    """A repeated request acquires only a lease that the same owner already has."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    gate = asyncio.Event()
    calls: list[int] = []

    @workflow("gated")
    async def gated(step: Step, n: int) -> None:
        calls.append(n)
        await step("gate", gate.wait)

    first = asyncio.ensure_future(
        Runtime(store, workflows=[gated], clock=clock).trigger(gated, 1, run_id="run")
    )
    await clock.advance(0)
    shaky = FaultyStore(
        MemoryStore(clock=clock, shares=store), fail_at=1, how=how, verbs={"acquire"}
    )
    second = Runtime(shaky, workflows=[gated], clock=clock).trigger(
        gated, 2, run_id="run", if_exists="return"
    )
    assert (await patient(second, clock)).status == "running"
    gate.set()
    assert (await first).status == "completed"
    assert calls == [1]


@pytest.mark.parametrize("how", HOWS)
async def test_durable_run_continues(how: How) -> None:
    """The same holds for `durable.run`, including the delete at its end."""
    effects: list[str] = []

    async def body(step: Step) -> str:
        await step("one", lambda: effects.append("one"))
        return "done"

    for call in range(1, 100):
        effects.clear()
        clock = TestClock()
        store = FaultyStore(
            MemoryStore(clock=clock), fail_at=call, how=how, verbs={"acquire", "append"}
        )
        result = await patient(durable.run({}, body, id="run", store=store, clock=clock), clock)
        assert (result, effects) == (Ok("done"), ["one"])
        if not store.failed:
            break
    assert call > 3


async def test_a_signal_whose_reply_was_lost_can_be_sent_again(
    store: MemoryStore, clock: TestClock
) -> None:
    """With a `dedup_id` it counts once."""

    @workflow("waits")
    async def waits(step: Step) -> Any:
        return [
            await step.wait_for_event("first", "go"),
            await step.wait_for_event("second", "go", timeout=60),
        ]

    runtime = Runtime(store, workflows=[waits], clock=clock)
    await runtime.trigger(waits, run_id="run")
    shaky = FaultyStore(store, fail_at=1, how="after", verbs={"send"}, error=ConnectionError)
    with pytest.raises(ConnectionError):
        await Runtime(shaky, workflows=[waits], clock=clock).signal("run", "go", 1, dedup_id="x")
    again = await runtime.signal("run", "go", 1, dedup_id="x")
    assert again.delivery is Delivery.DUPLICATE
    await clock.advance(60)
    await runtime.sweep()
    run = await runtime.get_run("run")
    assert run is not None
    assert run.output == [1, None]
