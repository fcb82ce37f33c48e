"""The types of approvals and callbacks, as type checkers see them."""

from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Approval, ApprovalRequest, Callback, Client, Gate, OpenApproval, Step, durable
from perdure import sync as blocking
from perdure.runtime.answers import ApprovalPage


@dataclass
class Decision:
    berth: int


def tell(request: ApprovalRequest) -> None: ...


async def start(callback: Callback) -> str:
    return callback.url


async def wire(amount: int, to: str) -> str:
    return f"{amount} to {to}"


@durable.step(approve=Gate("Wire {amount}?", to="finance"))
async def gated(amount: int) -> int:
    return amount


async def asks(step: Step) -> None:
    plain = await step.approval("a", "OK?", to="ops", options=("yes", "no"), notify=tell)
    assert_type(plain, Approval[Any])
    typed = await step.approval("b", "OK?", returns=Decision, timeout="1d")
    assert_type(typed, Approval[Decision])
    assert_type(typed.value, Decision | None)
    assert_type(await step.callback("c", returns=Decision, start=start), Decision)
    assert_type(await step.callback("d"), Any)
    assert_type(await step("wire", wire, 5, "ana", approve="Wire {amount}?"), str)
    assert_type(await step("wire", wire, 5, "ana", approve=Gate("OK?", timeout="1d")), str)
    assert_type(await gated(5), int)
    both = await step.all(
        step.approval("e", "OK?", returns=Decision), step.callback("f", returns=int)
    )
    assert_type(both, tuple[Approval[Decision], int])


async def answers(client: Client, sync: blocking.Client, token: str) -> None:
    assert_type(await client.approvals(to="ops"), ApprovalPage)
    assert_type(await client.approve(token, by="ana", choice="yes", value=3), OpenApproval)
    assert_type(sync.reject(token, by="ana", note="no"), OpenApproval)
