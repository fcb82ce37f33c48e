"""Bulk operations: each run is changed once, however often their process dies."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument, Refused, StoreError
from perdure.insights.model import BulkProgress
from perdure.operations import Operations
from perdure.stores.memory import MemoryStore
from perdure.testing import FaultyStore, TestClock


@workflow("failing")
async def failing(step: Step) -> None:
    await step("first", lambda: 1)
    raise ConnectionError("503")


async def failed_runs(number: int, clock: TestClock) -> MemoryStore:
    store = MemoryStore(clock=clock)
    runtime = Runtime(store, workflows=[failing], clock=clock)
    await runtime.trigger_many("failing", [None] * number, run_ids=[f"r{n}" for n in range(number)])
    while await runtime.sweep():
        pass
    await clock.advance(1)
    return store


async def verbs_by_run(store: MemoryStore, number: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for n in range(number):
        snapshot: Any = await store.load(f"r{n}")
        counts[len(snapshot["metadata"].get("acts", ()))] += 1
    return counts


async def finish(generator: AsyncIterator[BulkProgress]) -> BulkProgress:
    return [progress async for progress in generator][-1]


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


async def test_every_run_that_matches_is_changed(clock: TestClock) -> None:
    store = await failed_runs(250, clock)
    operations = Operations(store, clock=clock)
    progress = await finish(operations.bulk("status:failed", "retry", by="ana", why="carrier up"))
    assert (progress.state, progress.matched, progress.done) == ("done", 250, 250)
    assert await verbs_by_run(store, 250) == {1: 250}


async def test_a_refusal_is_counted_with_its_reason(clock: TestClock) -> None:
    store = await failed_runs(3, clock)
    operations = Operations(store, clock=clock)
    progress = await finish(operations.bulk("status:failed", "pause", by="ana"))
    assert (progress.done, progress.refused) == (0, 3)
    assert progress.reasons[0].endswith(": it is failed")
    assert await verbs_by_run(store, 3) == {0: 3}


async def test_more_runs_than_the_limit_are_refused(clock: TestClock) -> None:
    store = await failed_runs(5, clock)
    operations = Operations(store, clock=clock)
    with pytest.raises(Refused, match="more than 4 runs match"):
        await finish(operations.bulk("status:failed", "retry", limit=4, by="ana"))
    assert (await operations.count_bulk("status:failed", 4)).capped
    assert await verbs_by_run(store, 5) == {0: 5}


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kills", [(7, 11), (30, 30), (100, 250)])
async def test_an_operation_that_is_killed_twice_changes_each_run_once(
    kills: tuple[int, int], how: Any, clock: TestClock
) -> None:
    store = await failed_runs(150, clock)
    operations = Operations(_dying(store, kills[0], how), clock=clock)
    with pytest.raises(StoreError):
        await finish(operations.bulk("status:failed", "retry", by="ana"))
    [key] = await store.documents.keys("bulk:*")
    id = key.removeprefix("bulk:")
    await clock.advance(20)
    with pytest.raises(StoreError):
        await finish(Operations(_dying(store, kills[1], how), clock=clock).resume_bulk(id, by="b"))
    await clock.advance(20)
    progress = await finish(Operations(store, clock=clock).resume_bulk(id, by="ben"))
    assert (progress.state, progress.done, progress.refused) == ("done", 150, 0)
    assert await verbs_by_run(store, 150) == {1: 150}


def _dying(store: MemoryStore, fail_at: int, how: Any) -> Any:
    verbs = {"append", "acquire", "search", "load", "summaries"}
    return FaultyStore(
        store, fail_at=fail_at, how=how, verbs=verbs, error=StoreError, stays_down=True
    )


async def test_a_stopped_operation_can_be_continued(clock: TestClock) -> None:
    store = await failed_runs(150, clock)
    operations = Operations(store, clock=clock)
    steps = []
    async for progress in operations.bulk("status:failed", "retry", by="ana"):
        steps.append(progress)
        if len(steps) == 2:
            await operations.stop_bulk(progress.id, by="ben")
    progress = steps[-1]
    assert progress.state == "stopped"
    assert await verbs_by_run(store, 150) == {0: 50, 1: 100}
    progress = await clock.run(finish(operations.resume_bulk(progress.id, rate=100, by="ana")))
    assert progress.rate == 100
    assert progress.done == 150
    assert await verbs_by_run(store, 150) == {1: 150}


async def test_only_one_process_works_on_an_operation(clock: TestClock) -> None:
    store = await failed_runs(150, clock)
    operations = Operations(store, clock=clock)
    async for progress in operations.bulk("status:failed", "retry", by="ana"):
        if progress.state == "running":
            with pytest.raises(Refused, match="it is running"):
                await finish(Operations(store, clock=clock).resume_bulk(progress.id, by="ben"))


async def test_a_rate_limits_how_fast_runs_are_changed(clock: TestClock) -> None:
    store = await failed_runs(20, clock)
    operations = Operations(store, clock=clock)
    before = clock.monotonic()
    await clock.run(finish(operations.bulk("status:failed", "retry", rate=5, by="ana")))
    assert clock.monotonic() - before == pytest.approx(4, abs=0.3)


@pytest.mark.parametrize(
    ("verb", "arguments", "expected"),
    [
        ("fork", {}, "verb: expected one of"),
        ("retry", {"step": "a"}, "arguments of retry: it has none"),
        ("complete_step", {"value": 1}, "step: expected a non-empty string"),
    ],
)
async def test_bad_input_is_refused(
    verb: Any, arguments: Any, expected: str, clock: TestClock
) -> None:
    operations = Operations(MemoryStore(clock=clock), clock=clock)
    with pytest.raises(InvalidArgument, match=expected):
        await finish(operations.bulk("status:failed", verb, by="ana", **arguments))
