"""Runs that started each other: parents, children, and the waits between them."""

from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.insights import Insights
from perdure.stores import MemoryStore
from perdure.testing import TestClock


@workflow("payment")
async def payment(step: Step, amount: int) -> int:
    """Charge an amount; a large one takes a while."""
    if amount > 100:
        await step.sleep("settle", "6h")
    return amount


@workflow("shop")
async def shop(step: Step, does: str) -> Any:
    """Do what the payload names, with children."""
    match does:
        case "call":
            return await step.call("pay", payment, 250)
        case "two":
            started = await step.start("first", payment, 250)
            return await step.result("second", started, timeout="1d")
        case _:
            return await step.map_runs("each", payment, [1, 2, 250])


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


async def begin(store: MemoryStore, clock: TestClock, does: str, run_id: str = "r") -> Insights:
    """Start a run, and let it and its children run until all of them wait."""
    runtime = Runtime(store, workflows=[shop, payment], clock=clock, suspend_after=0)
    await runtime.trigger(shop, does, run_id=run_id)
    while await runtime.sweep():
        pass
    return Insights(store, clock=clock)


async def test_a_run_shows_the_runs_that_it_started(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "map")
    children = (await insights.run("r")).children
    assert {status: tally.count for status, tally in children.counts.items()} == {
        "completed": 2,
        "suspended": 1,
    }
    assert sorted(row.id for row in children.runs) == ["r/1/each/0", "r/1/each/1", "r/1/each/2"]


async def test_a_child_shows_the_run_that_started_it(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "call")
    parent = (await insights.run("r/1/pay")).parent
    assert parent is not None
    assert (parent.run_id, parent.call, parent.status) == ("r", "pay", "waiting")


async def test_a_deleted_parent_has_no_status(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "call")
    await store.delete("r")
    parent = (await insights.run("r/1/pay")).parent
    assert parent is not None
    assert parent.status is None


async def test_children_are_found_by_their_parent(store: MemoryStore, clock: TestClock) -> None:
    run_id = "order/" + "ü" * 500
    insights = await begin(store, clock, "call", run_id)
    query = insights.parse(f'parent:"{run_id}" status:suspended')
    [row] = (await insights.runs(query)).runs
    assert row.workflow == "payment"
    assert insights.parse(str(query)) == query


async def test_tags_of_the_engine_are_not_shown(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "call")
    assert (await insights.run("r/1/pay")).run.tags == {}


async def test_a_wait_names_the_run_instead_of_an_event(
    store: MemoryStore, clock: TestClock
) -> None:
    insights = await begin(store, clock, "call")
    [wait] = (await insights.run("r")).waits
    assert (wait.kind, wait.run_id, wait.event) == ("run", "r/1/pay", None)


async def test_a_step_names_the_run_that_it_started(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "two")
    [step] = (await insights.steps("r")).steps
    assert step.run_id == "r/1/first"


async def test_why_waits_for_a_child(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "call")
    assert (await insights.why("r")).sentence == (
        'Waiting for run "r/1/pay" of workflow "payment", which is suspended. '
        'About that run: Suspended by "settle" until 06:00 UTC, in 6 h.'
    )


async def test_why_waits_until_a_time(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "two")
    assert "which is suspended; times out in 1 day. About" in (await insights.why("r")).sentence


async def test_why_waits_for_a_child_that_is_gone(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "call")
    await store.delete("r/1/pay")
    sentence = 'Waiting for run "r/1/pay", which is not in the store.'
    assert (await insights.why("r")).sentence == sentence


async def test_why_waits_for_many_children(store: MemoryStore, clock: TestClock) -> None:
    insights = await begin(store, clock, "map")
    sentence = 'Waiting for the 3 runs that "each" started, of which 2 have ended.'
    assert (await insights.why("r")).sentence == sentence
    [wait] = (await insights.run("r")).waits
    assert (wait.kind, wait.run_id) == ("runs", "r/1/each")
