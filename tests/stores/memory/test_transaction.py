"""Transactions of a memory store: a table that commits with the record of the step."""

import asyncio
from typing import Any

import pytest

from perdure import Err, Ok, Step, durable
from perdure.errors import CodecError, StoreError
from perdure.store import Entry, Verdict
from perdure.stores.memory import MemoryStore, MemoryTransaction
from perdure.testing.conformance.harness import acquire_run, step


async def add(transaction: MemoryTransaction, amount: int) -> int:
    """Add to the balance, and let other tasks run before it is written."""
    before: int = transaction.get("balance", 0)
    await asyncio.sleep(0)
    transaction["balance"] = before + amount
    return before + amount


async def test_transactions_of_many_runs_lose_no_update() -> None:
    async def body(step: Step) -> None:
        await step.transaction("add", add, 1)

    store = MemoryStore()
    await asyncio.gather(*(durable.run(None, body, id=f"r{n}", store=store) for n in range(20)))
    assert store.table == {"balance": 20}


async def test_a_failed_step_rolls_back() -> None:
    async def fail(transaction: MemoryTransaction) -> None:
        transaction["balance"] = 1
        raise ValueError("no funds")

    async def body(step: Step) -> None:
        await step.transaction("fail", fail)

    store = MemoryStore()
    result = await durable.run(None, body, id="r", store=store)
    assert isinstance(result, Err)
    assert store.table == {}


async def test_a_cancelled_transaction_rolls_back_and_lets_others_continue() -> None:
    store = MemoryStore()
    grant = await acquire_run(store)

    async def hang(transaction: MemoryTransaction) -> Entry:
        transaction["balance"] = 1
        await asyncio.get_running_loop().create_future()
        return step(grant, 1, "a")

    task = asyncio.create_task(store.transact("run", grant.lease.epoch, hang))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert await durable.run(None, deposit, id="r", store=store) == Ok(5)
    assert store.table == {"balance": 5}


async def deposit(step: Step) -> int:
    return await step.transaction("add", add, 5)


async def test_an_entry_that_was_written_before_does_not_commit_again() -> None:
    """The answer to the first one may have been lost."""
    store = MemoryStore()
    grant = await acquire_run(store)

    async def work(transaction: MemoryTransaction) -> Entry:
        await add(transaction, 5)
        return step(grant, 1, "a")

    for _ in range(2):
        verdict = await store.transact("run", grant.lease.epoch, work)
        assert verdict is Verdict.ACCEPTED
    assert store.table == {"balance": 5}


async def test_values_are_copies() -> None:
    basket = ["apple"]

    async def write(transaction: MemoryTransaction) -> None:
        transaction["basket"] = basket
        basket.append("pear")
        transaction["basket"].append("plum")

    async def body(step: Step) -> None:
        await step.transaction("write", write)

    store = MemoryStore()
    await durable.run(None, body, id="r", store=store)
    store.table["basket"].append("fig")
    assert store.table == {"basket": ["apple"]}


async def test_a_value_that_a_database_would_refuse_is_refused() -> None:
    async def body(step: Step) -> None:
        await step.transaction("write", write)

    async def write(transaction: MemoryTransaction) -> None:
        transaction["x"] = object()

    result = await durable.run(None, body, id="r", store=MemoryStore())
    assert isinstance(result, Err)
    assert isinstance(result.error, CodecError)


async def test_a_transaction_is_a_mapping() -> None:
    observations: list[Any] = []

    async def write(transaction: MemoryTransaction) -> None:
        transaction.update(a=1, b=2)
        del transaction["a"]
        observations.append((dict(transaction), len(transaction), "a" in transaction))

    async def body(step: Step) -> None:
        await step.transaction("write", write)

    await durable.run(None, body, id="r", store=MemoryStore())
    assert observations == [({"b": 2}, 1, False)]


async def test_a_transaction_that_has_ended_cannot_be_used() -> None:
    """What it writes then would be in the table without any commit."""
    leaked: list[MemoryTransaction] = []

    async def leak(transaction: MemoryTransaction) -> None:
        leaked.append(transaction)

    async def body(step: Step) -> None:
        await step.transaction("leak", leak)

    await durable.run(None, body, id="r", store=MemoryStore())
    with pytest.raises(StoreError, match="has ended"):
        leaked[0]["x"] = 1


async def test_a_transaction_inside_another_is_refused() -> None:
    """It would wait for itself."""
    store = MemoryStore()

    async def nest(transaction: MemoryTransaction) -> None:
        result = await durable.run(None, deposit, id="inner", store=store)
        assert isinstance(result, Err)
        raise result.error

    async def body(step: Step) -> None:
        await step.transaction("nest", nest)

    result = await asyncio.wait_for(durable.run(None, body, id="outer", store=store), 5)
    assert isinstance(result, Err)
    assert "inside its own transaction" in str(result.error)


def test_a_store_can_be_used_in_one_event_loop_after_another() -> None:
    store = MemoryStore()

    async def both() -> None:
        runs = (durable.run(None, deposit, id=f"r{n}", store=store) for n in range(2))
        await asyncio.gather(*runs)

    asyncio.run(both())
    asyncio.run(both())
    assert store.table == {"balance": 20}
