"""Misuse of clients."""

from dataclasses import dataclass

from perdure import Client, Runtime, Step, workflow


@dataclass
class Order:
    item: str


@workflow("order")
async def order(step: Step, payload: Order) -> int:
    return 1


@workflow("nightly")
async def nightly(step: Step) -> None: ...


async def starts(client: Client, runtime: Runtime) -> None:
    await client.trigger(order, 5)  # refused
    await client.trigger(order)  # refused
    await client.trigger(nightly, Order("pen"))  # refused
    await client.trigger(order, Order("pen"), wait=True)  # refused
    await client.trigger(order, Order("pen"), if_exists="restart")  # refused
    await client.trigger(order, Order("pen"), deadline=None, until=1)  # refused
    await client.trigger_many(order, [1, 2])  # refused
    await runtime.trigger(order, "pen")  # refused
    text: str = await client.result(await client.trigger(order, Order("pen")))  # refused
    print(text)
