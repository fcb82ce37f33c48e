"""Approvals, callbacks and gated steps, with a crash before and after every store call."""

import asyncio
from typing import Any

import pytest

from perdure import Callback, Client, Rejected, Run, Step, workflow
from perdure.runtime.run import Wait
from perdure.testing import explore_crashes


async def wire(amount: int) -> str:
    return f"wired {amount}"


async def tell(request: Callback) -> None:
    assert request.token


@workflow("ships")
async def ships(step: Step, tons: int) -> str:
    answer = await step.approval("ship", f"Ship {tons} t?", to="ops", timeout="3d", notify=tell)
    return f"{answer.approved} by {answer.by}" if not answer.expired else "expired"


@workflow("reminds")
async def reminds(step: Step, tons: int) -> str:
    answer = await step.approval("ship", f"Ship {tons} t?", timeout="3d", remind="1d", notify=tell)
    return f"{answer.approved} {answer.expired}"


@workflow("gated")
async def gated(step: Step, amount: int) -> str:
    try:
        return await step("wire", wire, amount, approve="Wire {amount}?")
    except Rejected as rejected:
        return f"{rejected.by}: {rejected.note}"


@workflow("called back")
async def called_back(step: Step, n: int) -> int:
    signed: int = await step.callback("signed", timeout="7d", returns=int, start=tell)
    return signed + n


@workflow("races an approval")
async def races(step: Step, n: int) -> str:
    winner, _ = await step.race(
        "either", step.approval("ship", "Ship?", notify=tell), step.sleep("s", "1h")
    )
    await step("wire", wire, n)
    return str(winner)


@workflow("asks twice")
async def asks_twice(step: Step, n: int) -> list[bool]:
    answers = await step.all(
        step.approval("ship", "Ship?", to="ops", notify=tell),
        step.approval("pay", "Pay?", to="finance", timeout="1d", notify=tell),
    )
    await step("wire", wire, n)
    return [answer.approved for answer in answers]


@workflow("leaves one open")
async def leaves_one_open(step: Step, n: int) -> str:
    task = asyncio.create_task(step.approval("ship", "Ship?", notify=tell))
    await step.sleep("s", "1h")
    assert not task.done()
    return await step("wire", wire, n)


async def approve(client: Client, wait: Wait) -> None:
    await client.approve(wait.token, by="ana", note="fine")


async def reject(client: Client, wait: Wait) -> None:
    await client.reject(wait.token, by="eve", note="no money")


async def sign(client: Client, wait: Wait) -> None:
    await client.answer(wait.token, 40)


APPROVE = {"ship": approve, "pay": reject}
CASES: list[tuple[Any, Any, Any]] = [
    (ships, APPROVE, "True by ana"),
    (ships, {}, "expired"),
    (reminds, {}, "False True"),
    (gated, {"~approve:wire": approve}, "wired 2"),
    (gated, {"~approve:wire": reject}, "eve: no money"),
    (called_back, {"signed": sign}, 42),
    (races, {}, "1"),
    (races, APPROVE, "0"),
    (asks_twice, APPROVE, [True, False]),
    (leaves_one_open, {}, "wired 2"),
]


@pytest.mark.parametrize(("definition", "answers", "output"), CASES)
@pytest.mark.parametrize("always_replay", [False, True])
async def test_every_crash_leads_to_the_same_end(
    definition: Any, answers: Any, output: Any, always_replay: bool
) -> None:
    def check(clean: Run, survived: Run) -> None:
        assert clean.output == survived.output == output
        assert not survived.pending

    report = await explore_crashes(
        definition, 2, answers=answers, compare=check, always_replay=always_replay
    )
    assert report.crashes > 5


async def test_a_run_with_an_approval_is_compared_by_its_values() -> None:
    await explore_crashes(ships, 2, answers=APPROVE)
