"""Misuse of child runs."""

from dataclasses import dataclass

from perdure import RunRef, Step, workflow


@dataclass
class Order:
    item: str


@workflow("order")
async def order(step: Step, payload: Order) -> int:
    return 1


@workflow("nightly")
async def nightly(step: Step) -> None: ...


async def plain(payload: Order) -> int:
    return 1


async def starts(step: Step, ref: RunRef[int]) -> None:
    await step.call("order", order, 5)  # refused
    await step.call("order", order)  # refused
    await step.call("nightly", nightly, Order("pen"))  # refused
    await step.call("plain", plain, Order("pen"))  # refused
    await step.call("order", order, Order("pen"), delay="1h")  # refused
    await step.start("order", order, "pen")  # refused
    await step.start("order", order, Order("pen"), on_parent_end="kill")  # refused
    await step.result("paid", ref, returns=str)  # refused
    await step.map_runs("orders", order, ["pen"])  # refused
    await step.map_runs("orders", order, [Order("pen")], tolerate=3)  # refused
    text: str = await step.call("order", order, Order("pen"))  # refused
    number: str = await step.result("paid", ref)  # refused
    print(text, number)
