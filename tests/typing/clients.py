"""The types of clients: payloads, runs, results and handles."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Client, Ok, Result, Run, RunHandle, Runtime, Signal, Step, workflow
from perdure.runtime import SignalResult
from perdure.store import Store
from perdure.stores import open_store


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


async def starts(client: Client) -> None:
    assert_type(await client.trigger(order, Order("pen"), run_id="1", delay="1h"), Run[Receipt])
    assert_type(await client.trigger(nightly, tags={"a": "b"}, if_exists="return"), Run[int])
    assert_type(await client.trigger("order", {"item": "pen"}), Run[Any])
    assert_type(await client.trigger_many(order, [Order("pen")], run_ids=["1"]), list[Run[Receipt]])
    assert_type(await client.trigger_many("order", [{}], priority=1), list[Run[Any]])
    assert_type(await Runtime().trigger(order, Order("pen"), wait=False), Run[Receipt])
    assert_type(await Runtime().result(await client.trigger(order, Order("pen"))), Receipt)
    assert_type(await client.trigger(order, Order("pen"), deadline="1h", priority=2), Run[Receipt])


async def results(client: Client) -> None:
    run = await client.trigger(order, Order("pen"))
    assert_type(run.output, Receipt | None)
    assert_type(await client.result(run, timeout="10s"), Receipt)
    assert_type(await client.result("order-1"), Any)
    assert_type(await client.result(await client.trigger(nightly)), int)
    # The type that is expected here, object, is not that of the workflow's output.
    print(await client.result(await client.trigger(nightly)))
    assert_type(client.watch(run), AsyncGenerator[Run[Receipt], None])
    async for change in client.watch("order-1"):
        assert_type(change, Run[Any])


async def handles(client: Client) -> None:
    handle = client.handle("order-1", order)
    assert_type(handle, RunHandle[Receipt])
    assert_type(await handle.result(), Receipt)
    assert_type(await client.result(handle), Receipt)
    assert_type(await handle.get(), Run[Receipt] | None)
    assert_type(await client.handle("x").result(), Any)


async def others(client: Client) -> None:
    assert_type(await client.signal_many([Signal("1", "event")]), list[SignalResult])
    assert_type(await client.broadcast("event", tags={"a": "b"}), int)
    assert_type(await client.retry("1"), Run[Any])
    async with Client("sqlite:///runs.db") as opened:
        assert_type(opened, Client)
    async with open_store("sqlite:///runs.db") as store:
        accepts_a_store(store)


def accepts_a_store(store: Store) -> None: ...
