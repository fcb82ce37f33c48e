"""Questions whose notification is sent, retried, cancelled and repeated."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from perdure import ApprovalRequest, Callback, Gate, Retry, Runtime, Step, durable, workflow
from perdure.errors import InvalidDuration
from perdure.stores.memory import MemoryStore
from perdure.testing import TestClock
from perdure.testing.faults import FaultyStore


@pytest.fixture
def store(clock: TestClock) -> MemoryStore:
    return MemoryStore(clock=clock)


async def open_token(runtime: Runtime, wait: str) -> str:
    run = await runtime.get_run("r")
    assert run is not None
    return next(each.token for each in run.pending if each.id == wait)


@workflow("asks for too long")
async def asks_for_too_long(step: Step) -> str:
    try:
        await step.approval("ask", "Go?", timeout=timedelta.max)
    except InvalidDuration as error:
        return error.parameter
    return "never"


async def test_a_timeout_after_the_end_of_time_is_refused(
    store: MemoryStore, clock: TestClock
) -> None:
    runtime = Runtime(store, workflows=[asks_for_too_long], clock=clock)
    run = await runtime.trigger(asks_for_too_long)
    assert (run.output, run.history) == ("timeout", ())


async def test_a_retry_notifies_again_for_the_second_call_of_an_id(
    store: MemoryStore, clock: TestClock
) -> None:
    notifications: list[tuple[str, str]] = []
    fails = True

    async def tell(request: ApprovalRequest) -> None:
        notifications.append((request.id, request.token))

    async def work() -> None:
        if fails:
            raise ConnectionError

    async def works_later(step: Step) -> None:
        await step.sleep("s", "1h")
        await step("work", work)

    @workflow("asks twice")
    async def asks_twice(step: Step) -> None:
        await step.approval("ask", "Go?", notify=tell)
        async with asyncio.TaskGroup() as group:
            group.create_task(step.approval("ask", "Continue?", notify=tell))
            group.create_task(works_later(step))

    runtime = Runtime(store, workflows=[asks_twice], clock=clock)
    await runtime.trigger(asks_twice, run_id="r")
    await runtime.approve(notifications[0][1])
    await runtime.sweep()
    await clock.advance("1h")
    await runtime.sweep()
    fails = False
    await runtime.retry("r")
    assert [id for id, _ in notifications] == ["ask", "ask#2", "ask#2"]
    assert notifications[-1][1] == await open_token(runtime, "ask#2")


async def test_an_answer_counts_while_notify_is_retried(
    store: MemoryStore, clock: TestClock
) -> None:
    attempts = 0

    @durable.step(retry=Retry(5, delay="1d", jitter=False))
    async def unreachable(request: ApprovalRequest) -> None:
        nonlocal attempts
        attempts += 1
        raise ConnectionError

    @workflow("cannot tell")
    async def cannot_tell(step: Step) -> str:
        return (await step.approval("ask", "Go?", notify=unreachable)).by

    runtime = Runtime(store, workflows=[cannot_tell], clock=clock)
    await runtime.trigger(cannot_tell, run_id="r")
    await runtime.approve(await open_token(runtime, "ask"), by="ana")
    await runtime.sweep()
    assert (await runtime.result("r"), attempts) == ("ana", 1)


class InterruptingStore(FaultyStore):
    """Cancels tasks before messages are sent."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.tasks: list[asyncio.Task[Any]] = []

    async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
        if verb == "send":
            for task in self.tasks:
                task.cancel()
        return await super()._pass(verb, *arguments, **options)


async def test_a_cancellation_while_a_callback_expires_is_not_swallowed(
    store: MemoryStore, clock: TestClock
) -> None:
    interrupting = InterruptingStore(store)

    @workflow("expires")
    async def expires(step: Step) -> bool:
        task = asyncio.create_task(step.callback("ask", timeout="1h"))
        interrupting.tasks = [task]
        await asyncio.wait([task])
        return task.cancelled()

    runtime = Runtime(interrupting, workflows=[expires], clock=clock)
    await runtime.trigger(expires, run_id="r")
    await clock.advance("1h")
    await runtime.sweep()
    run = await runtime.get_run("r")
    assert run is not None
    assert (run.output, [step.ok for step in run.history]) == (True, [False])


@durable.step(approve=Gate("Delete {account}?"))
async def delete(connection: Any, account: str) -> str:
    return account


async def test_a_gated_function_is_gated_in_a_transaction(
    store: MemoryStore, clock: TestClock
) -> None:
    @workflow("deletes")
    async def deletes(step: Step) -> str:
        return await step.transaction("delete", delete, "ana")

    runtime = Runtime(store, workflows=[deletes], clock=clock)
    run = await runtime.trigger(deletes, run_id="r")
    assert [(wait.question, run.output) for wait in run.pending] == [("Delete ana?", None)]
    await runtime.approve(run.pending[0].token)
    await runtime.sweep()
    assert await runtime.result("r") == "ana"


async def test_a_second_call_of_a_gated_step_has_a_plain_name(
    store: MemoryStore, clock: TestClock
) -> None:
    async def work() -> None:
        return None

    @workflow("gates twice")
    async def gates_twice(step: Step) -> None:
        for _ in range(2):
            await step("work", work, approve="Go?")

    runtime = Runtime(store, workflows=[gates_twice], clock=clock)
    for name in ("~approve:work", "~approve:work#2"):
        run = await runtime.trigger(gates_twice, run_id="r")
        assert [wait.id for wait in run.pending] == [name]
        await runtime.approve(run.pending[0].token)
        await runtime.sweep()


async def test_start_may_return_an_awaitable(store: MemoryStore, clock: TestClock) -> None:
    urls: list[str] = []

    async def request(url: str) -> None:
        urls.append(url)

    def start(callback: Callback) -> Any:
        return request(callback.url)

    @workflow("calls back")
    async def calls_back(step: Step) -> Any:
        return await step.callback("ask", start=start)

    runtime = Runtime(
        store, workflows=[calls_back], clock=clock, callback_url="https://x.example/cb"
    )
    (wait,) = (await runtime.trigger(calls_back, run_id="r")).pending
    assert urls == [f"https://x.example/cb/{wait.token}"]
