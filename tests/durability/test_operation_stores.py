"""The operator's verbs on every kind of store."""

import asyncio
from typing import Any

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import Refused
from perdure.operations import Operations
from perdure.store import Store, require_search
from perdure.stores import MemoryStore


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store


async def fail() -> str:
    raise ConnectionError("503")


@workflow("order")
async def order(step: Step) -> list[Any]:
    charged = await step("charge", lambda: "charged")
    return [charged, await step("ship", fail)]


@workflow("listen")
async def listen(step: Step) -> Any:
    return await step.wait_for_event("event", "told", timeout="1 day")


@pytest.fixture
def operations(store: Store) -> Operations:
    return Operations(store)


@pytest.fixture
def runtime(store: Store) -> Runtime:
    return Runtime(store, workflows=[order, listen])


async def settled(runtime: Runtime, run_id: str = "run") -> Any:
    await runtime.sweep()
    return await runtime.get_run(run_id)


async def test_a_failed_step_is_completed(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.complete_step("run", "ship", "by hand", by="ana")
    assert (await settled(runtime)).output == ["charged", "by hand"]


async def test_a_paused_run_waits_until_it_is_resumed(
    runtime: Runtime, operations: Operations
) -> None:
    await runtime.trigger(listen, run_id="run")
    await operations.pause("run", by="ana", why="later")
    await runtime.signal("run", "told", 7, wait=False)
    assert (await settled(runtime)).status == "paused"
    await operations.unpause("run", by="ana")
    assert (await settled(runtime)).output == 7


async def test_a_wait_times_out_now(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(listen, run_id="run")
    await operations.wake("run", by="ana")
    run = await settled(runtime)
    assert (run.status, run.output) == ("completed", None)


async def test_an_operator_signals(runtime: Runtime, operations: Operations) -> None:
    await runtime.trigger(listen, run_id="run")
    await operations.signal("run", "told", {"n": 1}, by="ana")
    assert (await settled(runtime)).output == {"n": 1}


async def test_a_run_is_rewound_forked_and_deleted(
    runtime: Runtime, operations: Operations, store: Store
) -> None:
    await runtime.trigger(order, run_id="run")
    await operations.fork("run", "ship", new_id="copy", by="ana")
    assert (await operations.rewind("run", "charge", by="ana")).dropped == ("charge", "ship")
    await operations.delete("run", by="ana")
    assert await store.load("run") is None
    assert (await settled(runtime, "copy")).status == "failed"
    (copy,) = await require_search(store).summaries(["copy"])
    assert copy is not None
    assert copy.tags == ("~fork=run",)


async def test_a_run_that_a_worker_drives_is_paused_at_the_next_step(
    store: Store, operations: Operations
) -> None:
    started = asyncio.Event()

    @workflow("slow")
    async def slow(step: Step) -> str:
        async def until_pausing() -> None:
            started.set()
            while not step._run.pausing:
                await asyncio.sleep(0.01)

        await step("first", until_pausing)
        await step("second", lambda: 2)
        return "done"

    runtime = Runtime(store, workflows=[slow])
    async with Worker(runtime):
        await runtime.trigger(slow, run_id="run", wait=False)
        await started.wait()
        await operations.pause("run", by="ana")
        while (run := await runtime.get_run("run")) is not None and run.status != "paused":
            await asyncio.sleep(0.01)
        assert run is not None
        assert [step.key for step in run.history] == ["first"]
        await operations.unpause("run", by="ana")
        assert await runtime.result("run", timeout="10s") == "done"


async def test_a_bulk_operation_changes_every_run(runtime: Runtime, operations: Operations) -> None:
    for n in range(12):
        await runtime.trigger(order, run_id=f"r{n}")
    steps = [p async for p in operations.bulk("status:failed", "skip_step", step="ship", by="ana")]
    assert (steps[-1].state, steps[-1].done) == ("done", 12)
    runs = await runtime.sweep()
    assert [run.output for run in runs] == [["charged", None]] * 12


async def test_a_refused_verb_changes_nothing(
    runtime: Runtime, operations: Operations, store: Store
) -> None:
    await runtime.trigger(order, run_id="run")
    before = await store.load("run")
    with pytest.raises(Refused):
        await operations.unpause("run", by="ana")
    assert await store.load("run") == before


async def test_a_run_is_copied_away_and_back(runtime: Runtime, store: Store) -> None:
    """With its records and its message, and once however often it is copied."""
    await runtime.trigger(listen, run_id="run")
    await runtime.signal("run", "other", 1, wait=False)
    away = MemoryStore()
    for _ in range(2):
        assert [each.skipped async for each in Operations(away).copy_from(store, by="ana")][-1] == 0
    assert [each.name for each in await away.inbox("run")] == ["other"]
    await store.delete("run")
    for _ in range(2):
        assert [each.skipped async for each in Operations(store).copy_from(away, by="ana")][-1] == 0
    await Operations(store).unpause("run", by="ana")
    await runtime.sweep()
    assert await runtime.signal("run", "told", 7)
    assert (await settled(runtime)).output == 7
