"""What a run does to other runs: only its owner does it, and it takes effect once."""

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import StoreError
from perdure.store import RunSummary, Store
from perdure.stores import MemoryStore, sqlite
from perdure.testing import FaultyStore, TestClock


@workflow("child")
async def child(step: Step) -> str:
    return await step("work", lambda: "done")


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


async def children(store: MemoryStore) -> list[RunSummary]:
    return [run for run in await store.list() if run.workflow == "child"]


async def test_a_process_that_lost_its_run_starts_no_other(clock: TestClock) -> None:
    """Its entry is refused, and nothing is delivered before an entry is accepted."""
    store = MemoryStore(clock=clock)

    @workflow("parent")
    async def parent(step: Step) -> None:
        snapshot = await store.load("parent-1")
        assert snapshot is not None
        await store.save("parent-1", snapshot)  # ends the epoch, as a takeover does
        await step.start("child", child)

    runtime = Runtime(store, workflows=[parent, child], clock=clock)
    await runtime.trigger(parent, run_id="parent-1")
    assert await children(store) == []


async def test_a_start_costs_one_write_of_the_parent(clock: TestClock) -> None:
    """The record and the item are one entry, and the acknowledgement is part of the next one."""
    store = FaultyStore(MemoryStore(clock=clock))

    @workflow("parent")
    async def parent(step: Step) -> None:
        for _ in range(3):
            await step.start("child", child)
        await step.wait_for_event("answer", "answered")

    await Runtime(store, workflows=[parent, child], clock=clock).trigger(parent)
    verbs = [call.verb for call in store.calls]
    assert verbs.count("enqueue") == 3
    assert verbs.count("append") == 3 + 1


async def test_deliveries_of_many_runs_share_store_calls(tmp_path: Path) -> None:
    """Starts, and the messages that report the ends."""
    store = FaultyStore(sqlite(tmp_path / "runs.db"))

    @workflow("parent")
    async def parent(step: Step, number: int) -> None:
        await step.call("child", child)

    runtime = Runtime(store, workflows=[parent, child])
    await runtime.trigger_many(parent, range(100))
    store.calls.clear()
    await Worker(runtime).run_until_idle()
    verbs = Counter(call.verb for call in store.calls)
    assert {run.status for run in await runtime.list_runs(limit=200)} == {"completed"}
    assert verbs["enqueue"] <= 30
    assert verbs["send"] <= 30
    await store.close()


async def test_a_run_at_rest_has_delivered_everything(clock: TestClock) -> None:
    store = MemoryStore(clock=clock)

    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("child", child)
        await step.wait_for_event("answer", "answered")

    await Runtime(store, workflows=[parent, child], clock=clock).trigger(parent, run_id="parent-1")
    snapshot = await store.load("parent-1")
    assert snapshot is not None
    assert not snapshot.get("outbox")
    assert [run.status for run in await children(store)] == ["queued"]


async def test_a_start_that_is_repeated_creates_a_deleted_child_again(clock: TestClock) -> None:
    """The process died before it could say that it had started the child."""
    inner = MemoryStore(clock=clock)
    store = FaultyStore(
        inner, fail_at=1, how="after", verbs={"enqueue"}, error=StoreError, stays_down=True
    )

    @workflow("parent")
    async def parent(step: Step) -> None:
        await step.start("child", child)
        await step.wait_for_event("answer", "answered")

    with pytest.raises(StoreError):
        await Runtime(store, workflows=[parent, child], clock=clock).trigger(parent, run_id="p")
    assert await inner.delete("p/1/child")
    await clock.advance("1h")
    await Runtime(inner, workflows=[parent, child], clock=clock).sweep()
    assert [run.id for run in await children(inner)] == ["p/1/child"]


async def test_an_end_that_is_reported_twice_counts_once(clock: TestClock) -> None:
    """A child dies after its report, and reports again. Its parent still waits for the other."""
    store = MemoryStore(clock=clock)

    @workflow("sleeper")
    async def sleeper(step: Step, hours: int) -> int:
        await step.sleep("nap", timedelta(hours=hours))
        return hours

    @workflow("parent")
    async def parent(step: Step) -> list[int]:
        return await step.map_runs("both", sleeper, [1, 24])

    async def sweep(on: Store) -> None:
        while await Runtime(on, workflows=[parent, sleeper], clock=clock).sweep():
            pass

    await Runtime(store, workflows=[parent, sleeper], clock=clock).trigger(parent, run_id="p")
    await sweep(store)
    await clock.advance("1h")
    dying = FaultyStore(
        store, fail_at=1, how="after", verbs={"send"}, error=StoreError, stays_down=True
    )
    with suppress(StoreError):
        await sweep(dying)
    await clock.advance("1h")
    again = FaultyStore(store)
    await sweep(again)
    assert "send" in [call.verb for call in again.calls]
    assert [message.name for message in await store.inbox("~log:p/1/both")] == ["0"]
    assert await store.inbox("p") == []
    await clock.advance("24h")
    await sweep(store)
    run = await Runtime(store, clock=clock).get_run("p")
    assert run is not None
    assert run.output == [1, 24]
