"""What goes wrong is logged once, counted, and says what to do."""

import asyncio
import logging
from typing import Any

import pytest

from perdure import Retry, Runtime, Step, Worker, codec, workflow
from perdure.errors import Cancelled, SnapshotMismatch
from perdure.runtime.definition import Definition
from perdure.snapshot import new_snapshot
from perdure.store import NewRun
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock


def warnings_in(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [message for message in messages if part in message]


@workflow("careless")
async def careless(step: Step) -> str:
    try:
        await step.sleep("nap", "1h")
    finally:
        try:
            await step("clean up", lambda: 1)
        finally:
            await step("clean up more", lambda: 1)
    return "done"


async def test_a_step_that_is_called_during_a_suspension_is_logged_once(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With the run, the step and what to do; after the wait, it is an ordinary step."""
    runtime = Runtime(store, workflows=[careless], clock=clock)
    run = await runtime.trigger(careless, run_id="r")
    assert run.status == "suspended"
    [message] = warnings_in(caplog, "being unwound")
    assert all(part in message for part in ("'r'", "'clean up'", "suspended", "after the wait"))
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert run.output == "done"
    assert len(warnings_in(caplog, "being unwound")) == 1


async def test_a_wait_in_a_task_of_a_finally_block_is_logged_too(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow("careless")
    async def careless(step: Step) -> None:
        async def clean_up() -> None:
            await step.wait_for_event("cleaned", "cleaned")

        try:
            await step.sleep("nap", "1h")
        finally:
            await asyncio.gather(clean_up(), return_exceptions=True)

    await Runtime(store, workflows=[careless], clock=clock).trigger(careless)
    [message] = warnings_in(caplog, "being unwound")
    assert "'cleaned'" in message


async def test_a_step_that_is_called_during_a_cancellation_is_logged(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun = asyncio.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.sleep(60)

    @workflow("work")
    async def working(step: Step) -> None:
        try:
            await step("work", work)
        finally:
            await step("undo", lambda: 1)

    runtime = Runtime(store, workflows=[working])
    running = asyncio.ensure_future(runtime.trigger(working, run_id="r"))
    await has_begun.wait()
    await runtime.cancel("r", reason="too late")
    assert (await running).status == "cancelled"
    [message] = warnings_in(caplog, "being unwound")
    assert "'undo'" in message
    assert "too late" in message


async def test_a_branch_that_is_not_cancelled_yet_causes_no_warning(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It may call a step between the cancellation of the run and its own."""

    @workflow("busy")
    async def busy(step: Step) -> None:
        step._run.stop(Cancelled(step.run_id))
        await step("next", lambda: None)

    assert (await Runtime(store, workflows=[busy]).trigger(busy)).status == "cancelled"
    assert warnings_in(caplog, "being unwound") == []


async def test_a_worker_counts_how_its_runs_ended(store: MemoryStore) -> None:
    """And the steps that were attempted again."""
    attempts: list[int] = []

    async def flaky() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("reset")

    async def fail() -> None:
        raise ValueError("no")

    @workflow("flaky")
    async def retrying(step: Step) -> None:
        await step("flaky", flaky, retry=Retry(5, delay=0))

    @workflow("fail")
    async def failing(step: Step) -> None:
        await step("fail", fail)

    @workflow("wait")
    async def waiting(step: Step) -> None:
        await step.wait_for_event("go", "go")

    runtime = Runtime(store, workflows=[retrying, failing, waiting])
    async with Worker(runtime, poll=0.01) as worker:
        await runtime.trigger(waiting, run_id="w", wait=False)
        await runtime.trigger(retrying, wait=False)
        await runtime.trigger(failing, wait=False)
        async with asyncio.timeout(5):
            while worker.counters.finished < 3:
                await asyncio.sleep(0.01)
    counters = worker.counters
    assert (counters.failed, counters.cancelled, counters.retried) == (1, 0, 2)


async def test_a_worker_counts_cancelled_runs(store: MemoryStore) -> None:
    has_begun = asyncio.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.sleep(60)

    @workflow("work")
    async def working(step: Step) -> None:
        await step("work", work)

    runtime = Runtime(store, workflows=[working])
    async with Worker(runtime, poll=0.01) as worker:
        await runtime.trigger(working, run_id="r", wait=False)
        await has_begun.wait()
        await runtime.cancel("r")
        async with asyncio.timeout(5):
            while not worker.counters.finished:
                await asyncio.sleep(0.01)
    assert (worker.counters.cancelled, worker.counters.failed) == (1, 0)


def first_deployment() -> Definition[Any, Any]:
    @workflow("order")
    async def order(step: Step) -> str:
        await step.sleep("nap", "1h")
        return "first"

    return order


def next_deployment(version: int = 1) -> Definition[Any, Any]:
    @workflow("order", version=version, migrate=lambda snapshot, _: snapshot)
    async def order(step: Step) -> str:
        await step.sleep("nap", "1h")
        return "next"

    return order


async def suspended_runs(store: MemoryStore, clock: TestClock, *ids: str) -> None:
    """Leave runs of the first deployment that are due."""
    order = first_deployment()
    for run_id in ids:
        await Runtime(store, workflows=[order], clock=clock).trigger(order, run_id=run_id)
    await clock.advance("1h")


async def test_changed_code_under_the_same_version_is_logged_once(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not once per run. The runs continue with the new code."""
    await suspended_runs(store, clock, "a", "b")
    runs = await Runtime(store, workflows=[next_deployment()], clock=clock).sweep()
    assert [run.output for run in runs] == ["next", "next"]
    [message] = warnings_in(caplog, "has changed")
    assert all(part in message for part in ("'order'", "version is still 1", "raise version="))


async def test_unchanged_code_is_silent(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    await suspended_runs(store, clock, "a")
    (run,) = await Runtime(store, workflows=[first_deployment()], clock=clock).sweep()
    assert (run.output, warnings_in(caplog, "has changed")) == ("first", [])


async def test_changed_code_can_be_ignored(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    await suspended_runs(store, clock, "a")
    order = next_deployment()
    runtime = Runtime(store, workflows=[order], clock=clock, on_definition_change="ignore")
    (run,) = await runtime.sweep()
    assert (run.output, warnings_in(caplog, "has changed")) == ("next", [])


async def test_a_run_of_other_code_can_be_left_to_another_process(
    store: MemoryStore, clock: TestClock
) -> None:
    """It is released with a delay, and continues where the code has not changed."""
    await suspended_runs(store, clock, "a")
    order = next_deployment()
    strict = Runtime(store, workflows=[order], clock=clock, on_definition_change="error")
    with pytest.raises(SnapshotMismatch, match="has changed since run 'a' was started"):
        await strict.resume("a")
    assert await strict.sweep() == []
    await clock.advance(strict.lease_ttl)
    (run,) = await Runtime(store, workflows=[first_deployment()], clock=clock).sweep()
    assert run.output == "first"


async def test_a_migrated_run_belongs_to_the_new_code(
    store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    await suspended_runs(store, clock, "a")
    order = next_deployment(version=2)
    runtime = Runtime(store, workflows=[order], clock=clock, on_definition_change="error")
    (run,) = await runtime.sweep()
    assert run.output == "next"
    stored = await store.load("a")
    assert stored is not None
    assert (stored.get("metadata") or {})["definitionHash"] == order.definition_hash


async def test_a_run_that_no_definition_has_started_is_not_compared(
    store: MemoryStore, clock: TestClock
) -> None:
    """It may have been created by another program; from now on it belongs to this code."""
    snapshot = new_snapshot("order", now=clock.now())
    snapshot["execution"]["state"] = "queued"
    await store.enqueue([NewRun("a", "order", codec.dumps(snapshot))])
    order = first_deployment()
    runtime = Runtime(store, workflows=[order], clock=clock, on_definition_change="error")
    assert (await runtime.resume("a")).status == "suspended"
    stored = await store.load("a")
    assert stored is not None
    assert (stored.get("metadata") or {})["definitionHash"] == order.definition_hash
