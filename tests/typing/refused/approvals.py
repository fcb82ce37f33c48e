"""Wrong uses of approvals and callbacks."""

from dataclasses import dataclass

from perdure import ApprovalRequest, Client, Gate, Step


@dataclass
class Decision:
    berth: int


async def wire(amount: int) -> str:
    return str(amount)


def tell(request: str) -> None: ...


async def asks(step: Step, client: Client, token: str) -> None:
    await step.approval("a", 7)  # refused
    await step.approval("a", "OK?", notify=tell)  # refused
    await step("wire", wire, 5, approve=True)  # refused
    Gate("OK?", too=1)  # refused
    answer = await step.approval("b", "OK?", returns=Decision)
    print(answer.value.berth)  # refused
    signed: str = await step.callback("c", returns=Decision)  # refused
    await client.approve(token, "ana")  # refused
    print(signed, ApprovalRequest)
