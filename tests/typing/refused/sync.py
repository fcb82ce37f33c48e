"""Wrong uses of `perdure.sync`."""

from dataclasses import dataclass

from perdure import Step, sync, workflow


@dataclass
class Order:
    amount: int


@workflow("order")
async def order(step: Step, payload: Order) -> str:
    return str(payload.amount)


def calls(client: sync.Client) -> None:
    client.trigger(order, "seven")  # refused
    client.trigger(order, Order(7), runId="1")  # refused
    client.trigger(order, Order(7), wait=False)  # refused
    receipt: int = client.result(client.trigger(order, Order(7)))  # refused
    print(receipt)


async def in_a_loop(client: sync.Client) -> None:
    await client.cancel("order-1")  # refused
    async with client:  # refused
        pass
