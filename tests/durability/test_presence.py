"""A worker reports what it does and obeys its switches, and neither disturbs its runs."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from perdure import Retry, Runtime, Step, Worker, workflow
from perdure.keyvalue import Documents
from perdure.presence import (
    WorkerPresence,
    WorkerSwitch,
    WorkflowSwitch,
    read_definitions,
    read_last_throughput,
    read_switches,
    read_throughput,
    read_workers,
    set_switch,
)
from perdure.runtime.definition import Definition
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock

Make = Callable[..., Runtime]


@pytest.fixture
def make(store: MemoryStore, clock: TestClock) -> Make:
    def make(*workflows: Definition[Any, Any], **options: Any) -> Runtime:
        on = options.pop("on", store)
        return Runtime(on, workflows=workflows, clock=clock, random=Random(7), **options)

    return make


@workflow("quick")
async def quick(step: Step, payload: dict[str, int]) -> None:
    """Do one thing.

    Quickly.
    """
    await step("one", lambda: "done")


def blocked(
    opened: asyncio.Event, name: str = "blocked", retry: Retry | None = None
) -> Definition[None, None]:
    """Return a workflow whose step "wait" ends when the event is set."""

    async def wait() -> None:
        await opened.wait()

    @workflow(name)
    async def waits(step: Step) -> None:
        await step("wait", wait, retry=retry)

    return waits


async def the_worker(store: MemoryStore) -> WorkerPresence:
    [worker] = await read_workers(store)
    return worker


async def test_a_worker_is_seen_at_once_and_until_it_stops(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    async with Worker(make(quick), concurrency=7) as worker:
        await clock.advance(0)
        row = await the_worker(store)
        await clock.advance("10 minutes")
        again = await the_worker(store)
    assert (row.id, row.slots, row.draining) == (worker.id, 7, False)
    assert [each.workflow for each in row.workflows] == ["quick"]
    assert clock.now() - again.seen_at <= timedelta(seconds=10)
    assert await read_workers(store) == []


async def test_steps_in_flight_are_shown_longest_first(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """With their run, their key, their attempt, and since when they run."""
    opened = asyncio.Event()
    waits = blocked(opened)
    runtime = make(waits)
    async with Worker(runtime):
        began = clock.now()
        await runtime.trigger(waits, run_id="first", wait=False)
        await clock.advance(5)
        await runtime.trigger(waits, run_id="second", wait=False)
        await clock.advance(15)
        worker = await the_worker(store)
        opened.set()
        await clock.advance(15)
        idle = await the_worker(store)
    assert [(step.run_id, step.key, step.attempt) for step in worker.steps] == [
        ("first", "wait", 1),
        ("second", "wait", 1),
    ]
    assert began <= worker.steps[0].since <= began + timedelta(seconds=1)
    assert (worker.running, idle.running, idle.steps) == (2, 0, ())


async def test_the_owner_of_a_run_leads_to_its_worker(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    opened = asyncio.Event()
    runtime = make(waits := blocked(opened))
    await runtime.trigger(waits, run_id="run", wait=False)
    async with Worker(runtime):
        await clock.advance(12)
        [run] = await store.summaries(["run"])
        worker = await the_worker(store)
        opened.set()
    assert run is not None
    assert run.owner in worker.owners


async def test_a_step_that_will_be_attempted_again_says_when(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """Beside another step, which keeps the run in memory."""
    opened = asyncio.Event()

    async def fail() -> None:
        raise ConnectionError("down")

    @workflow("both")
    async def both(step: Step) -> None:
        retry = Retry(3, delay="1h", jitter=False)
        await asyncio.gather(step("call", fail, retry=retry), step("wait", opened.wait))

    runtime = make(both)
    await runtime.trigger(both, run_id="run", wait=False)
    async with Worker(runtime):
        began = clock.now()
        await clock.advance(12)
        steps = {step.key: step.next_attempt_at for step in (await the_worker(store)).steps}
        opened.set()
    assert steps["wait"] is None
    assert steps["call"] is not None
    assert began < steps["call"] <= clock.now() + timedelta(hours=1)


async def test_a_heartbeat_shows_at_most_a_hundred_steps(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    opened = asyncio.Event()

    @workflow("many")
    async def many(step: Step) -> None:
        await asyncio.gather(*(step(f"wait-{n}", opened.wait) for n in range(150)))

    runtime = make(many)
    await runtime.trigger(many, run_id="run", wait=False)
    async with Worker(runtime):
        await clock.advance(12)
        worker = await the_worker(store)
        opened.set()
    assert len(worker.steps) == 100


async def test_throughput_is_counted_by_workflow_and_minute(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    @workflow("bad")
    async def bad(step: Step) -> None:
        raise ValueError("bad")

    runtime = make(quick, bad)
    async with Worker(runtime):
        for n in range(3):
            await runtime.trigger(quick, {}, run_id=f"quick-{n}", wait=False)
        await runtime.trigger(bad, run_id="bad", wait=False)
        await clock.advance(90)
        [hour] = await read_throughput(store, clock.now())
    assert (hour.workflows["quick"].completed, hour.workflows["bad"].failed) == (3, 1)
    assert sum(hour.workflows["quick"].durations) == 3
    assert sum(hour.workflows["quick"].steps["one"]) == 3
    assert [(each.minute, each.completed, each.failed) for each in hour.minutes] == [(0, 3, 1)]


async def test_each_hour_has_a_document_of_its_own(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    began = clock.now()
    runtime = make(quick)
    async with Worker(runtime):
        for n in range(3):
            await clock.advance("30m")
            await runtime.trigger(quick, {}, run_id=f"run-{n}", wait=False)
            await clock.advance("30m")
    hours = await read_throughput(store, began)
    assert [each.hour - began for each in hours] == [timedelta(hours=n) for n in range(3)]
    assert [sum(m.completed for m in each.minutes) for each in hours] == [1, 1, 1]
    assert [len(each.minutes) for each in hours] == [60, 60, 60]


async def test_a_clean_stop_is_recorded(make: Make, store: MemoryStore, clock: TestClock) -> None:
    """A worker that is shown as lost has disappeared without one."""
    async with Worker(make(quick)):
        await clock.advance(0)
        [running] = await read_last_throughput(store, clock.now())
    [stopped] = await read_last_throughput(store, clock.now())
    assert (running.stopped, stopped.stopped) == (False, True)


async def test_a_worker_that_is_started_again_continues_to_count(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """In the same document, and in the same minute if it is not over."""
    runtime = make(quick)
    worker = Worker(runtime)
    for n in range(3):
        await runtime.trigger(quick, {}, run_id=f"run-{n}", wait=False)
        await clock.run(worker.run_until_idle())
        await clock.advance(0 if n else 300)
    [hour] = await read_throughput(store, clock.now())
    assert hour.workflows["quick"].completed == 3
    assert [(each.minute, each.completed, each.slots) for each in hour.minutes] == [
        (0, 1, 100),
        (5, 2, 100),
    ]


async def test_due_runs_are_counted_each_minute(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    opened = asyncio.Event()
    runtime = make(waits := blocked(opened))
    for n in range(5):
        await runtime.trigger(waits, run_id=f"run-{n}", wait=False)
    async with Worker(runtime, concurrency=2):
        await clock.advance(80)
        [hour] = await read_throughput(store, clock.now())
        opened.set()
        await clock.advance(5)
    assert [(each.running, each.slots, each.depths) for each in hour.minutes] == [(2, 2, {"": 3})]


async def test_workflows_are_described(make: Make, store: MemoryStore, clock: TestClock) -> None:
    """Their docstring and the schema of their payload can be read without their code."""
    async with Worker(make(quick)):
        await clock.advance(0)
    [definition] = await read_definitions(store)
    assert definition.doc == "Do one thing.\n\nQuickly."
    assert definition.payload_schema["type"] == "object"
    assert definition.fingerprint == quick.definition_hash


async def test_a_paused_workflow_is_left_alone_until_it_is_resumed(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    opened = asyncio.Event()
    opened.set()
    runtime = make(quick, other := blocked(opened, "other"))
    async with Worker(runtime):
        await set_switch(store, WorkflowSwitch("quick", True, "ana", "outage", clock.now()))
        await clock.advance(10)
        await runtime.trigger(quick, {}, run_id="held", wait=False)
        await runtime.trigger(other, run_id="other", wait=False)
        await clock.advance(60)
        statuses = [await runtime.get_run("held"), await runtime.get_run("other")]
        await set_switch(store, WorkflowSwitch("quick", False, "ana", "over", clock.now()))
        await clock.advance(10)
        resumed = await runtime.get_run("held")
    assert [run.status for run in statuses if run] == ["queued", "completed"]
    assert resumed is not None
    assert resumed.status == "completed"


async def test_a_worker_that_starts_knows_what_is_paused(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """It reads the switches before it claims anything."""
    await set_switch(store, WorkflowSwitch("quick", True, "ana", "outage", clock.now()))
    runtime = make(quick)
    await runtime.trigger(quick, {}, run_id="held", wait=False)
    async with Worker(runtime) as worker:
        await clock.advance(60)
    assert worker.counters.claimed == 0


async def test_an_operator_drains_a_worker(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """As SIGTERM does: runs get the grace period. Its switch disappears with it."""
    opened = asyncio.Event()
    runtime = make(waits := blocked(opened))
    await runtime.trigger(waits, run_id="run", wait=False)
    worker = Worker(runtime, grace=30)
    serving = asyncio.create_task(worker.serve())
    await clock.advance(1)
    await set_switch(store, WorkerSwitch(worker.id, True, "ana", "deploy", clock.now()))
    await clock.advance(10)
    draining = await the_worker(store)
    opened.set()
    await clock.run(serving)
    assert (draining.draining, worker.counters.released) == (True, 0)
    assert (await read_switches(store)).workers == {}


async def test_a_worker_works_until_nothing_is_due(make: Make, clock: TestClock) -> None:
    """A run that starts another one is not the last; a run that waits is left as it is."""

    @workflow("parent")
    async def parent(step: Step) -> None:
        await step("start", lambda: runtime.trigger(quick, {}, run_id="child", wait=False))

    @workflow("sleeper")
    async def sleeper(step: Step) -> None:
        await step.sleep("nap", "7 days")

    runtime = make(parent, quick, sleeper)
    await runtime.trigger(parent, run_id="parent", wait=False)
    await runtime.trigger(sleeper, run_id="sleeper", wait=False)
    began = clock.now()
    worker = Worker(runtime)
    await clock.run(worker.run_until_idle())
    runs = [await runtime.get_run(id) for id in ("parent", "child", "sleeper")]
    assert [run.status for run in runs if run] == ["completed", "completed", "suspended"]
    assert clock.now() - began < timedelta(minutes=1)


async def test_working_until_idle_twice(make: Make, clock: TestClock) -> None:
    runtime = make(quick)
    worker = Worker(runtime)
    for n in range(2):
        await runtime.trigger(quick, {}, run_id=f"run-{n}", wait=False)
        await clock.run(worker.run_until_idle())
    assert worker.counters.finished == 2


class Broken:
    """Documents that cannot be used."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


class WithoutDocuments(MemoryStore):
    """A store whose documents fail."""

    @property
    def documents(self) -> Documents:
        broken: Any = Broken()
        return broken  # type: ignore[no-any-return]  # it is none, on purpose


async def test_documents_that_fail_disturb_no_run_and_are_logged_once(
    make: Make, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    runtime = make(quick, on=WithoutDocuments(clock=clock))
    async with Worker(runtime):
        await runtime.trigger(quick, {}, run_id="run", wait=False)
        await clock.advance("10 minutes")
    run = await runtime.get_run("run")
    assert run is not None
    assert run.status == "completed"
    [message] = caplog.messages
    assert "heartbeat" in message


async def test_a_heartbeat_costs_a_read_and_a_write(make: Make, clock: TestClock) -> None:
    """However many steps are executed in the meantime."""
    calls: list[str] = []

    class Counting(MemoryStore):
        @property
        def documents(self) -> Documents:
            calls.append("documents")
            return super().documents

    @workflow("long")
    async def long(step: Step) -> None:
        for n in range(500):
            await step("one", lambda: None, key=str(n))

    runtime = make(long, on=Counting(clock=clock))
    async with Worker(runtime):
        await clock.advance(5)
        calls.clear()
        await runtime.trigger(long, run_id="run", wait=False)
        await clock.advance(30)
        assert len(calls) <= 2 * 4
