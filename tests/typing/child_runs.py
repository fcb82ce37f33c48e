"""The types of child runs: payloads, references and results."""

import asyncio
from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Err, Ok, Result, RunRef, Step, workflow
from perdure.errors import RunFailed


@dataclass
class Order:
    item: str


@dataclass
class Receipt:
    total: int


@workflow("order")
async def order(step: Step, payload: Order) -> Receipt:
    return Receipt(1)


@workflow("nightly")
async def nightly(step: Step) -> Result[int, str]:
    return Ok(1)


async def calls(step: Step) -> None:
    assert_type(await step.call("order", order, Order("pen")), Receipt)
    assert_type(await step.call("order", order, Order("pen"), run_id="1", deadline="1h"), Receipt)
    assert_type(await step.call("nightly", nightly), int)
    assert_type(await step.call("nightly", nightly, tags={"a": "b"}, inherit=["c"]), int)
    assert_type(await step.call("order", "order", {"item": "pen"}), Any)
    anything: object = await step.call("order", order, Order("pen"))
    print(f"{anything}, {await step.call('nightly', nightly)}")


async def starts(step: Step) -> None:
    ref = await step.start("order", order, Order("pen"), delay="1h", on_parent_end="abandon")
    assert_type(ref, RunRef[Receipt])
    assert_type(ref.id, str)
    assert_type(await step.start("nightly", nightly), RunRef[int])
    assert_type(await step.start("order", "order", {"item": "pen"}), RunRef[Any])


async def results(step: Step, ref: RunRef[Receipt]) -> None:
    assert_type(await step.result("paid", ref, timeout="1d"), Receipt)
    assert_type(await step.result("paid", "order-1", returns=Receipt), Receipt)
    assert_type(await step.result("paid", "order-1"), Any)


async def many(step: Step, orders: list[Order]) -> None:
    assert_type(await step.map_runs("orders", order, orders), list[Receipt])
    results = await step.map_runs("orders", order, orders, on_error="collect", tolerate=3)
    assert_type(results, list[Ok[Receipt] | Err[RunFailed]])
    assert_type(await step.map_runs("orders", "order", [{"item": "pen"}]), list[Any])


async def together(step: Step) -> None:
    receipt, number = await step.all(
        step.call("order", order, Order("pen")), step.call("nightly", nightly)
    )
    assert_type(receipt, Receipt)
    assert_type(number, int)
    calls = [step.call(f"order {each}", order, Order(each)) for each in ("pen", "cup")]
    assert_type(await asyncio.gather(*calls), list[Receipt])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(step.call("order", order, Order("pen")))
    assert_type(task.result(), Receipt)
