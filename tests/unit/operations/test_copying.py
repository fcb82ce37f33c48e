"""Runs that are copied from one store to another."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument, StoreError
from perdure.operations import CopyProgress, Operations
from perdure.store import LeaseRequest
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock


@workflow("order")
async def order(step: Step, waits: bool) -> Any:
    paid = await step("pay", lambda: "paid")
    return [paid, await step.wait_for_event("answer", "approved") if waits else None]


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
async def source(clock: TestClock) -> MemoryStore:
    """A store with a run that is over, and one that waits and has a message."""
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[order], clock=clock)
    await runtime.trigger(order, False, run_id="over")
    await runtime.trigger(order, True, run_id="waiting")
    await runtime.signal("waiting", "later", 1, wait=False)
    return store


async def copy(source: MemoryStore, target: Any, clock: TestClock, query: str = "") -> CopyProgress:
    steps = Operations(target, clock=clock).copy_from(source, query, by="ana")
    return [progress async for progress in steps][-1]


async def test_runs_are_copied(source: MemoryStore, clock: TestClock) -> None:
    """With their records and messages; those that are not over are paused."""
    target = MemoryStore(clock=clock)
    assert await copy(source, target, clock) == CopyProgress(total=2, copied=2)
    runtime = Runtime(target, workflows=[order], clock=clock)
    over, waiting = await runtime.get_run("over"), await runtime.get_run("waiting")
    assert over is not None
    assert waiting is not None
    assert (over.status, over.output, waiting.status) == ("completed", ["paid", None], "paused")
    assert [each.name for each in await target.inbox("waiting")] == ["later"]
    await Operations(target, clock=clock).unpause("waiting", by="ana")
    await runtime.sweep()
    result = await runtime.signal("waiting", "approved", "yes")
    assert result.run is not None
    assert result.run.output == ["paid", "yes"]


async def test_only_runs_that_match_are_copied(source: MemoryStore, clock: TestClock) -> None:
    target = MemoryStore(clock=clock)
    assert (await copy(source, target, clock, "status:completed")).copied == 1
    assert await target.load("waiting") is None


async def test_a_run_that_a_process_works_on_is_skipped(
    source: MemoryStore, clock: TestClock
) -> None:
    await source.acquire([LeaseRequest("waiting", "worker", timedelta(seconds=30))])
    progress = await copy(source, MemoryStore(clock=clock), clock)
    assert (progress.copied, progress.skipped) == (1, 1)
    assert progress.reasons == ("waiting: a process works on it",)


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_copy_that_is_killed_anywhere_is_continued(
    source: MemoryStore, clock: TestClock, how: Any
) -> None:
    """Every run and every message is there once."""
    fail_at, failed = 0, True
    while failed:
        fail_at += 1
        target = MemoryStore(clock=clock)
        faulty = FaultyStore(target, fail_at=fail_at, how=how, stays_down=True)
        try:
            await copy(source, faulty, clock)
        except StoreError:
            progress = await copy(source, target, clock)
            assert (progress.done, progress.skipped) == (2, 0)
        failed = faulty.failed
        assert [each.name for each in await target.inbox("waiting")] == ["later"]
    assert fail_at > 4


async def test_a_store_is_not_copied_to_itself(source: MemoryStore, clock: TestClock) -> None:
    with pytest.raises(InvalidArgument, match="another store"):
        await copy(source, source, clock)
