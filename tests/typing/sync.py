"""The types of `perdure.sync`: those of `Client`, without `await`."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Ok, Result, Run, Signal, Step, sync, workflow
from perdure.runtime import SignalResult
from perdure.store import RunSummary


@dataclass
class Order:
    amount: int


@workflow("order")
async def order(step: Step, payload: Order) -> str:
    return str(payload.amount)


@workflow("nightly")
async def nightly(step: Step) -> Result[int, str]:
    return Ok(1)


def calls(client: sync.Client) -> None:
    run = client.trigger(order, Order(7), run_id="order-1", delay="1h", tags={"customer": "42"})
    assert_type(run, Run[str])
    assert_type(client.trigger(nightly), Run[int])
    assert_type(client.trigger("order", {"amount": 7}), Run[Any])
    assert_type(client.trigger_many(order, [Order(1), Order(2)]), list[Run[str]])
    assert_type(client.result(run, timeout="10s"), str)
    assert_type(client.result("order-1"), Any)
    assert_type(client.watch(run), Generator[Run[str], None, None])
    assert_type(client.signal("order-1", "paid", 7, dedup_id="7"), SignalResult)
    assert_type(client.signal_many([Signal("order-1", "paid")]), list[SignalResult])
    assert_type(client.broadcast("paid", workflow="order"), int)
    assert_type(client.list_runs(status="failed"), Sequence[RunSummary])
    assert_type(client.get_run("order-1"), Run[Any] | None)
    assert_type(client.delete("order-1"), bool)


def handles(client: sync.Client) -> None:
    handle = client.handle("order-1", order)
    assert_type(handle, sync.RunHandle[str])
    assert_type(handle.result(), str)
    assert_type(client.result(handle), str)
    assert_type(handle.get(), Run[str] | None)
    assert_type(client.handle("order-1"), sync.RunHandle[Any])


def closing() -> None:
    with sync.Client("sqlite:///shop.db", workflows=[order, nightly]) as client:
        assert_type(client, sync.Client)
