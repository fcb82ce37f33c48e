"""Approvals, as a user would write them: questions, answers, and answers that come too late."""

import asyncio
from datetime import timedelta

import pytest

from perdure import (
    AlreadyAnswered,
    ApprovalRequest,
    Client,
    Rejected,
    Runtime,
    Step,
    TooLate,
    Worker,
    sync,
    workflow,
)
from perdure.stores import MemoryStore, sqlite
from perdure.testing import TestClock, explore_crashes


@workflow("vacation")
async def vacation(step: Step, days: int) -> str:
    answer = await step.approval("boss", f"{days} days off?", to="boss", timeout="1w")
    if answer.expired:
        return "never answered"
    return "enjoy" if answer.approved else f"no: {answer.note}"


async def pay(amount: int) -> str:
    return f"paid {amount}"


@workflow("expenses")
async def expenses(step: Step, amount: int) -> str:
    try:
        return await step("pay", pay, amount, approve="Pay {amount}?")
    except Rejected as rejected:
        return f"{rejected.by}: {rejected.note}"


async def test_a_person_approves_while_a_worker_runs() -> None:
    store = MemoryStore()
    client = Client(store)
    async with Worker(Runtime(store, workflows=[vacation], suspend_after=0)):
        run = await client.trigger("vacation", 10)
        while not (page := await client.approvals(to="boss")).approvals:
            await asyncio.sleep(0.01)
        await client.approve(page.approvals[0].token, by="eva")
        assert await client.result(run, timeout="5s") == "enjoy"


async def test_a_second_answer_is_refused_with_who_was_first() -> None:
    runtime = Runtime(MemoryStore(), workflows=[vacation])
    run = await runtime.trigger(vacation, 10)
    await runtime.reject(run.pending[0].token, by="eva", note="too busy")
    with pytest.raises(AlreadyAnswered) as error:
        await runtime.approve(run.pending[0].token, by="tom")
    assert error.value.by == "eva"


async def test_an_answer_that_comes_too_late_is_refused() -> None:
    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[vacation], clock=clock)
    run = await runtime.trigger(vacation, 10)
    await clock.advance(timedelta(weeks=1))
    assert [each.output for each in await runtime.sweep()] == ["never answered"]
    with pytest.raises(TooLate):
        await runtime.approve(run.pending[0].token, by="eva")


async def test_a_step_waits_for_its_approval() -> None:
    runtime = Runtime(MemoryStore(), workflows=[expenses])
    run = await runtime.trigger(expenses, 40)
    assert run.pending[0].question == "Pay 40?"
    await runtime.reject(run.pending[0].token, by="eva", note="no receipt")
    (run,) = await runtime.sweep()
    assert run.output == "eva: no receipt"


async def test_people_are_notified_and_reminded() -> None:
    notifications: list[tuple[str, int]] = []

    def tell(request: ApprovalRequest) -> None:
        notifications.append((request.to, request.reminder))

    @workflow("asks")
    async def asks(step: Step) -> bool:
        return (await step.approval("ok", "OK?", to="eva", remind="1d", notify=tell)).approved

    clock = TestClock()
    runtime = Runtime(MemoryStore(clock=clock), workflows=[asks], clock=clock)
    await runtime.trigger(asks)
    await clock.advance("1 day")
    await runtime.sweep()
    assert notifications == [("eva", 0), ("eva", 1)]


async def test_every_crash_leads_to_the_same_answer() -> None:
    report = await explore_crashes(
        vacation, 10, answers={"boss": lambda client, wait: client.approve(wait.token, by="eva")}
    )
    assert report.crashes > 5


def test_a_script_answers_without_an_event_loop(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"

    async def ask() -> None:
        async with sqlite(f"{tmp_path}/runs.db") as store:
            await Runtime(store, workflows=[vacation]).trigger(vacation, 10, run_id="v")

    asyncio.run(ask())
    with sync.Client(url) as client:
        (approval,) = client.approvals(to="boss").approvals
        assert client.find_approval(approval.token).question == "10 days off?"
        client.approve(approval.token, by="eva")
        with pytest.raises(AlreadyAnswered):
            client.reject(approval.token)
        with pytest.raises(AlreadyAnswered):
            client.answer(approval.token)
