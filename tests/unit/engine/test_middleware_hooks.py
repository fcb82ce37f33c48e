"""The hooks of middleware besides those around runs and steps."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from perdure import (
    Client,
    Middleware,
    Retry,
    RunContext,
    Runtime,
    Step,
    StepContext,
    Worker,
    WorkerContext,
    workflow,
)
from perdure.engine.contexts import SentSignal
from perdure.engine.middleware import Call
from perdure.errors import StoreError
from perdure.stores import MemoryStore
from perdure.testing import FaultyStore, TestClock


class HookLog(Middleware):
    """Logs the calls of its hooks."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def after_run(self, run: RunContext, status: str | None) -> None:
        self.lines.append(status)

    def on_retry(self, step: StepContext, error: Exception, delay: timedelta) -> None:
        self.lines.append(f"{step.id} {step.attempt}: {error}, {delay}")

    async def around_signal(self, signals: Sequence[SentSignal], call: Call) -> Any:
        results = await call()
        self.lines += [
            (signal.event, result.delivery.value)
            for signal, result in zip(signals, results, strict=True)
        ]
        return results


@workflow("approval")
async def approval(step: Step) -> str:
    return str(await step.wait_for_event("answer", "answer"))


async def test_after_run_gets_the_status_with_which_a_run_was_stored() -> None:
    log = HookLog()
    runtime = Runtime(MemoryStore(), workflows=[approval], around=[log])
    await runtime.trigger(approval, run_id="1")
    await runtime.signal("1", "answer", "yes")
    assert log.lines == ["waiting", ("answer", "delivered"), "completed"]


async def test_after_run_gets_none_if_nothing_could_be_stored() -> None:
    log = HookLog()
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"append"}, error=StoreError)
    with pytest.raises(StoreError):
        await Runtime(store, workflows=[approval], around=[log]).trigger(approval)
    assert log.lines == [None]


async def test_on_retry_is_called_for_failed_attempts() -> None:
    log, clock = HookLog(), TestClock()
    retry = Retry(3, delay="1h", max_delay="1d", jitter=False)

    async def flaky(step: Step) -> int:
        if step.attempt < 3:
            raise OSError(f"no {step.attempt}")
        return step.attempt

    @workflow("flaky")
    async def retried(step: Step) -> int:
        return await step("fetch", flaky, step, retry=retry)

    runtime = Runtime(MemoryStore(clock=clock), workflows=[retried], around=[log], clock=clock)
    await runtime.trigger(retried)
    for _ in range(2):
        await clock.advance("2h")
        await runtime.sweep()
    assert log.lines == [
        "fetch 1: no 1, 1:00:00",
        "suspended",
        "fetch 2: no 2, 2:00:00",
        "suspended",
        "completed",
    ]


async def test_around_signal_is_called_for_the_events_of_a_client() -> None:
    log = HookLog()
    client = Client(MemoryStore(), around=[log])
    await client.signal("nobody", "answer")
    assert log.lines == [("answer", "unknown")]


async def test_a_broadcast_is_a_signal_to_each_run() -> None:
    log = HookLog()
    runtime = Runtime(MemoryStore(), workflows=[approval], around=[log])
    for run_id in ("1", "2"):
        await runtime.trigger(approval, run_id=run_id)
    assert await runtime.broadcast("answer", "yes", workflow="approval") == 2
    assert log.lines[2:] == [("answer", "delivered")] * 2


async def test_a_hook_that_raises_does_not_affect_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Middleware):
        def after_run(self, run: RunContext, status: str | None) -> None:
            raise ZeroDivisionError

    runtime = Runtime(MemoryStore(), workflows=[approval], around=[Broken()])
    assert (await runtime.trigger(approval)).status == "waiting"
    assert "Broken.after_run failed" in caplog.text


async def test_around_worker_surrounds_a_worker_and_sees_its_work() -> None:
    observations: list[Any] = []
    durations: list[float] = []

    class Watching(Middleware):
        async def around_worker(self, worker: WorkerContext, call: Call) -> Any:
            worker.observe_appends(durations.append)
            observations.append((worker.id, worker.concurrency, worker.running))
            await call()
            observations.append((await worker.stats()).by_status)

    async def work() -> None:
        await asyncio.sleep(0)

    @workflow("work")
    async def working(step: Step) -> None:
        await step("first", work)
        await step("second", work)

    runtime = Runtime(MemoryStore(), workflows=[working], around=[Watching()])
    await runtime.trigger(working, wait=False)
    worker = Worker(runtime, concurrency=7)
    await worker.run_until_idle()
    assert observations == [(worker.id, 7, 0), {"completed": 1}]
    assert len(durations) == 3
    assert all(seconds >= 0 for seconds in durations)


async def test_replaying_is_true_while_an_earlier_activation_is_repeated() -> None:
    lines: list[tuple[str, bool]] = []
    clock = TestClock()

    @workflow("replayed")
    async def replayed(step: Step) -> None:
        def say(line: str) -> None:
            lines.append((line, step.replaying))

        say("begins")
        await step("first", say, "in a step")
        say("before the night")
        await asyncio.to_thread(say, "in a thread")
        await step.sleep("night", "8h")
        say("after the night")
        await step("second", say, "in a second step")

    runtime = Runtime(MemoryStore(clock=clock), workflows=[replayed], clock=clock)
    await runtime.trigger(replayed)
    first, lines[:] = lines[:], []
    await clock.advance("8h")
    await runtime.sweep()
    assert {is_replay for _, is_replay in first} == {False}
    assert lines == [
        ("begins", True),
        ("before the night", True),
        ("in a thread", True),
        ("after the night", False),
        ("in a second step", False),
    ]
