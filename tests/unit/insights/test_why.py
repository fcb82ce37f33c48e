"""Why a run is in its current state: one test for each situation."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from perdure import Runtime, Step, workflow
from perdure.insights.insights import Insights
from perdure.insights.model import Why
from perdure.operations import Operations
from perdure.presence import Throughput, WorkflowSwitch, set_switch
from perdure.presence.documents import write_throughput
from perdure.store import LeaseRequest, NewRun, SupportedVersions
from perdure.stores import MemoryStore
from perdure.testing import TestClock
from tests.unit.insights.runs import live_worker, order, run_order
from tests.unit.insights.samples import new_snapshot_json

TTL = timedelta(seconds=30)


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


async def ask(store: MemoryStore, clock: TestClock, run_id: str = "r") -> Why:
    return await Insights(store, clock=clock).why(run_id)


async def enqueue(store: MemoryStore, queue: str = "", version: int = 1) -> None:
    await store.enqueue(
        [NewRun("r", "order", new_snapshot_json("order"), queue=queue, version=version)]
    )


async def own(store: MemoryStore, clock: TestClock, owner: str = "o-1") -> None:
    await run_order(store, "r", "wait", clock)
    await store.acquire([LeaseRequest("r", owner, TTL)])


async def test_completed(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", clock=clock)
    await clock.advance(timedelta(minutes=3))
    answer = await ask(store, clock)
    assert answer.sentence == "Completed 3 min ago, 0 ms after it was created."


async def test_a_completed_run_says_how_long_it_took(store: MemoryStore, clock: TestClock) -> None:
    @workflow("nap")
    async def nap(step: Step) -> None:
        await step.sleep("nap", "4.9s")

    runtime = Runtime(store, workflows=[nap], clock=clock)
    await runtime.trigger(nap, run_id="r")
    await clock.advance("4.9s")
    await runtime.sweep()
    assert (await ask(store, clock)).sentence.endswith(", 4.9 s after it was created.")


async def test_cancelled(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await Runtime(store, workflows=[order], clock=clock).cancel("r", reason="no longer needed")
    answer = await ask(store, clock)
    assert answer.sentence.endswith('after it was created: "no longer needed".')


async def test_failed_step(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "fail", clock)
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Step "ship" failed after 2 attempts with CarrierDown: 503 from carrier. '
        "Nothing will happen until the run is retried."
    )
    assert (answer.situation, answer.facts["steps"]) == ("failed", ["ship"])


async def test_failed_function(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "crash", clock)
    answer = await ask(store, clock)
    assert answer.sentence.startswith("The function failed with CarrierDown: outside of steps.")


async def test_a_long_message_of_an_error_is_cut(store: MemoryStore, clock: TestClock) -> None:
    @workflow("order")
    async def order(step: Step) -> None:
        raise ValueError("no" * 500)

    await Runtime(store, workflows=[order], clock=clock).trigger(order, run_id="r")
    sentence = (await ask(store, clock)).sentence
    assert sentence.startswith("The function failed with ValueError: nono")
    assert "no…. Nothing will happen" in sentence
    assert len(sentence) < 300


async def test_paused_by_an_operator(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    operations = Operations(store, clock=clock)
    await operations.pause("r", by="ana", why="carrier outage")
    await clock.advance(timedelta(hours=2))
    answer = await ask(store, clock)
    assert answer.sentence == 'Paused by ana 2 h ago: "carrier outage".'


async def test_set_aside_after_crashes(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await _change(store, {"state": "paused", "reason": "set aside after 5 crashes"}, {})
    answer = await ask(store, clock)
    assert answer.sentence == "Set aside after 5 crashes."


async def test_suspended_until_a_time(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "sleep", clock)
    answer = await ask(store, clock)
    until = f"{clock.now() + timedelta(hours=6, minutes=12):%H:%M} UTC"
    assert answer.sentence.startswith('Suspended by "settle" until ')
    assert answer.sentence.endswith(f"{until}, in 6 h 12 min.")


async def test_next_attempt(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "retry", clock)
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Step "ship" failed 1 attempt (CarrierDown: 503 from carrier); '
        "the next one starts in 9 min."
    )


async def test_waiting_for_an_event_with_a_similar_message_in_the_inbox(
    store: MemoryStore, clock: TestClock
) -> None:
    await run_order(store, "r", "wait", clock)
    await Runtime(store, workflows=[order], clock=clock).signal("r", "aproved")
    await clock.advance(timedelta(days=2))
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Waiting for event "approved" for 2 days; times out in 1 day. '
        'The inbox holds one message named "aproved".'
    )


ONE_QUESTION = 'Waiting for ops to answer "Ship 40 t?" for 2 days; expires in 1 day.'


@workflow("asks")
async def asks(step: Step, kind: str) -> None:
    if kind == "callback":
        await step.callback("signed", timeout="3d")
    await asyncio.gather(
        *(step.approval(f"ask {n}", "Ship 40 t?", to="ops", timeout="3d") for n in range(len(kind)))
    )


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("1", ONE_QUESTION),
        ("22", f"{ONE_QUESTION} One of 2 open questions."),
        ("callback", 'Waiting for the callback "signed" for 2 days; expires in 1 day.'),
    ],
)
async def test_waiting_for_an_answer(
    store: MemoryStore, clock: TestClock, kind: str, sentence: str
) -> None:
    await Runtime(store, workflows=[asks], clock=clock).trigger(asks, kind, run_id="r")
    await clock.advance(timedelta(days=2))
    assert (await ask(store, clock)).sentence == sentence


@workflow("impatient")
async def impatient(step: Step) -> None:
    await asyncio.gather(
        step.wait_for_event("approval", "approved"), step.sleep("nap", timedelta(days=1))
    )


async def test_a_wait_is_as_long_as_it_was_in_all(store: MemoryStore, clock: TestClock) -> None:
    """The other branch let the run continue after a day, in the middle of the wait."""
    runtime = Runtime(store, workflows=[impatient], clock=clock)
    await runtime.trigger(impatient, run_id="r")
    await clock.advance(timedelta(days=1))
    await runtime.resume("r")
    await clock.advance(timedelta(days=1))
    answer = await ask(store, clock)
    assert answer.sentence == 'Waiting for event "approved" for 2 days.'


async def test_running_step(store: MemoryStore, clock: TestClock) -> None:
    await own(store, clock)
    step = {"run_id": "r", "workflow": "order", "key": "ship", "since": clock.now(), "attempt": 3}
    await live_worker(store, clock.now(), owners=("o-1",), steps=(step,))
    await clock.advance(timedelta(seconds=12))
    answer = await ask(store, clock)
    assert answer.sentence == 'Step "ship" has been running on w-1 for 12 s, attempt 3.'


async def test_running_step_between_attempts(store: MemoryStore, clock: TestClock) -> None:
    await own(store, clock)
    later = clock.now() + timedelta(seconds=9)
    step = {"run_id": "r", "workflow": "order", "key": "ship", "since": clock.now()}
    steps = ({**step, "next_attempt_at": later}, step)
    await live_worker(store, clock.now(), owners=("o-1",), steps=steps)
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Step "ship" failed attempt 1; the next one starts on w-1 in 9 s. '
        "1 other step of the run is in flight."
    )


async def test_running_between_steps(store: MemoryStore, clock: TestClock) -> None:
    await own(store, clock)
    await clock.advance(timedelta(seconds=2))
    answer = await ask(store, clock)
    assert answer.sentence == 'Running on o-1. The last record, "pack[1]", was made 2 s ago.'


async def test_owner_without_a_heartbeat(store: MemoryStore, clock: TestClock) -> None:
    await own(store, clock)
    now = clock.now()
    facts: dict[str, Any] = {"host": "h", "pid": 1, "started_at": now, "seen_at": now}
    await write_throughput(store, Throughput(worker="w-2", owner="o-1", hour=now, **facts))
    await live_worker(store, now)
    await clock.advance(timedelta(seconds=18))
    answer = await ask(store, clock)
    assert answer.situation == "owner_silent"
    assert answer.sentence == (
        "No heartbeat from o-1. Its lease expires in 12 s; then another worker takes over."
    )


async def test_expired_lease(store: MemoryStore, clock: TestClock) -> None:
    await own(store, clock)
    await clock.advance(timedelta(seconds=42))
    answer = await ask(store, clock)
    assert answer.sentence == (
        "No heartbeat from o-1. Its lease expired 12 s ago; no live worker can take over. "
        "No worker is running."
    )


async def test_paused_workflow(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now())
    await set_switch(store, WorkflowSwitch("order", True, "ana", "stock-taking", clock.now()))
    await clock.advance(timedelta(minutes=4))
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Due for 4 min. Workflow "order" is paused, by ana 4 min ago: "stock-taking".'
    )


async def test_no_worker(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await clock.advance(timedelta(minutes=4))
    answer = await ask(store, clock)
    assert answer.sentence == "Due for 4 min. No worker is running."


async def test_no_worker_knows_the_workflow(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now(), workflows=(SupportedVersions("other", 1, 1),))
    answer = await ask(store, clock)
    assert answer.sentence == 'Due for 0 ms. No live worker knows workflow "order".'


async def test_a_misspelled_workflow_is_pointed_out(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now(), workflows=(SupportedVersions("orders", 1, 1),))
    answer = await ask(store, clock)
    assert answer.sentence.endswith("""knows workflow "order"; did you mean 'orders'?""")


async def test_no_worker_knows_the_version(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, version=3)
    await live_worker(store, clock.now())
    await live_worker(store, clock.now(), "w-2", workflows=(SupportedVersions("order", 1, 2),))
    answer = await ask(store, clock)
    assert answer.sentence == (
        'Due for 0 ms. No live worker knows workflow "order" version 3 '
        "(w-1 knows version 1 and w-2 knows versions 1 to 2)."
    )


async def test_no_worker_takes_the_queue(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store, queue="emails/ana")
    await live_worker(store, clock.now())
    answer = await ask(store, clock)
    assert answer.sentence == 'Due for 0 ms. No live worker takes runs from queue "emails".'


async def test_workers_that_stop(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now(), draining=True)
    answer = await ask(store, clock)
    assert answer.sentence == "Due for 0 ms. All workers that know it are stopping."


async def test_all_slots_busy(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now(), running=10)
    answer = await ask(store, clock)
    assert answer.sentence == "Due for 0 ms. All 10 slots are busy."
    assert answer.situation == "held_back"


async def test_about_to_be_claimed(store: MemoryStore, clock: TestClock) -> None:
    await enqueue(store)
    await live_worker(store, clock.now())
    answer = await ask(store, clock)
    assert answer.sentence == "Due for 0 ms. The next free slot of w-1 takes it."


async def test_scheduled(store: MemoryStore, clock: TestClock) -> None:
    wake_at = clock.now() + timedelta(days=400)
    await store.enqueue([NewRun("r", "order", new_snapshot_json("order"), wake_at)])
    answer = await ask(store, clock)
    assert answer.sentence.startswith("Scheduled: the run starts at ")
    assert answer.sentence.endswith("UTC, in 400 days.")


async def test_a_state_that_is_not_explained(store: MemoryStore, clock: TestClock) -> None:
    await run_order(store, "r", "wait", clock)
    await _change(store, {"state": "waiting", "pending": []}, {})
    answer = await ask(store, clock)
    assert answer.situation == "unknown"


async def _change(store: MemoryStore, execution: Any, metadata: Any) -> None:
    snapshot: Any = await store.load("r")
    snapshot["execution"].update(execution)
    snapshot["metadata"].update(metadata)
    await store.save("r", snapshot)
