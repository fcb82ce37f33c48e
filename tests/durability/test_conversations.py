"""Events that start the run they are for, and questions that a run answers."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Client, Question, RunConflict, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument, RunNotFound, RunOver
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing import explore_crashes


@dataclass
class Item:
    sku: str
    price: int


@workflow("cart")
async def cart(step: Step, customer: str) -> list[str]:
    items: list[str] = []
    while len(items) < 3:
        item = await step.wait_for_event("item", "add", returns=str)
        assert item is not None
        items.append(item)
    return sorted(items)


@workflow("shop")
async def shop(step: Step) -> int:
    total = 0
    while True:
        question = await step.wait_for_event("next", "quote", returns=Question[Item])
        assert question is not None
        total += question.payload.price
        await step.reply(question, {"total": total, "item": question.payload.sku})


@workflow("other")
async def other(step: Step) -> None:
    await step.wait_for_event("never", "never")


@workflow("waits")
async def waits(step: Step) -> None:
    await step.wait_for_event("go", "go")


async def test_an_event_starts_the_run_that_it_is_for() -> None:
    runtime = Runtime(MemoryStore(), workflows=[cart])
    async with Worker(runtime):
        first = await runtime.signal_or_start(cart, "cart-7", "add", "tea", start="ana")
        second = await runtime.signal_or_start(cart, "cart-7", "add", "jam", start="ana")
        assert first.run is not None
        assert first.run.id == "cart-7"
        assert second.run is None
        await runtime.signal_or_start(cart, "cart-7", "add", "bun", start="ana")
        assert await runtime.result("cart-7", timeout="5s") == ["bun", "jam", "tea"]


async def test_an_event_starts_a_finished_run_again() -> None:
    runtime = Runtime(MemoryStore(), workflows=[cart])
    async with Worker(runtime):
        for round in ("a", "b"):
            for n in range(3):
                item = f"{round}{n}"
                await runtime.signal_or_start(cart, "cart-7", "add", item, start=round)
            expected = [f"{round}0", f"{round}1", f"{round}2"]
            assert await runtime.result("cart-7", timeout="5s") == expected


async def test_concurrent_callers_start_one_run(every_store: Store) -> None:
    clients = [Client(every_store) for _ in range(20)]
    work = [
        client.signal_or_start("cart", "cart-7", "add", f"{n}", start=f"caller {n}")
        for n, client in enumerate(clients)
    ]
    results = await asyncio.gather(*work)
    assert all(results)
    assert [run.id for run in await clients[0].list_runs()] == ["cart-7"]
    assert len(await every_store.inbox("cart-7")) == 20  # type: ignore[attr-defined]


async def test_an_event_for_a_run_of_another_workflow_is_a_conflict() -> None:
    runtime = Runtime(MemoryStore(), workflows=[cart, other])
    await runtime.trigger(other, run_id="cart-7", wait=False)
    with pytest.raises(RunConflict, match="belongs to workflow 'other'"):
        await runtime.signal_or_start(cart, "cart-7", "add", "tea", start="ana")
    assert await runtime.store.inbox("cart-7") == []  # type: ignore[attr-defined]


async def test_an_event_that_cannot_be_sent_starts_nothing() -> None:
    runtime = Runtime(MemoryStore(), workflows=[cart])
    with pytest.raises(InvalidArgument, match="payload"):
        await runtime.signal_or_start(cart, "cart-7", "add", object(), start="ana")
    assert await runtime.get_run("cart-7") is None


async def test_a_broadcast_reaches_every_open_run_once(every_store: Store) -> None:
    client = Client(every_store)
    for n in range(30):
        tags = {"sku": "7" if n % 3 else "8"}
        await client.trigger("price" if n < 20 else "stock", run_id=f"r{n}", tags=tags)
    await client.cancel("r1")
    assert await client.broadcast("changed", 9, tags={"sku": "7"}, workflow="price") == 12
    assert await client.broadcast("changed", 9, workflow="price", dedup_id="a") == 19
    assert await client.broadcast("changed", 9, workflow="price", dedup_id="a") == 19
    counts = [len(await every_store.inbox(f"r{n}")) for n in range(30)]  # type: ignore[attr-defined]
    assert counts == [0 if n == 1 or n >= 20 else 1 + bool(n % 3) for n in range(30)]


async def test_a_broadcast_to_nothing_or_to_everything() -> None:
    client = Client(MemoryStore())
    assert await client.broadcast("changed", tags={"sku": "7"}) == 0
    with pytest.raises(InvalidArgument, match="It would reach every run"):
        await client.broadcast("changed")


async def test_a_broadcast_finds_all_of_many_runs_while_they_change() -> None:
    runtime = Runtime(MemoryStore(), workflows=[waits])
    await runtime.trigger_many(waits, [None] * 2500)
    async with Worker(runtime):
        assert await runtime.broadcast("go", workflow="waits") == 2500
        while await runtime.list_runs(status="queued") or await runtime.list_runs(status="waiting"):
            await asyncio.sleep(0.01)
    assert len(await runtime.list_runs(status="completed", limit=3000)) == 2500


async def test_a_run_answers_questions() -> None:
    runtime = Runtime(MemoryStore(), workflows=[shop])
    async with Worker(runtime):
        await runtime.trigger(shop, run_id="shop", wait=False)
        first = await runtime.ask("shop", "quote", Item("tea", 3), timeout="5s")
        second = await runtime.ask("shop", "quote", {"sku": "jam", "price": 4}, timeout="5s")
    assert first == {"total": 3, "item": "tea"}
    assert second == {"total": 7, "item": "jam"}


async def test_a_question_that_is_not_answered_times_out() -> None:
    runtime = Runtime(MemoryStore(), workflows=[other])
    await runtime.trigger(other, run_id="mute", wait=False)
    with pytest.raises(TimeoutError, match="no answer came"):
        await runtime.ask("mute", "quote", timeout=0.05)


async def test_a_question_to_a_run_that_cannot_answer_is_refused() -> None:
    runtime = Runtime(MemoryStore(), workflows=[other])
    with pytest.raises(RunNotFound):
        await runtime.ask("missing", "quote", timeout="5s")
    await runtime.trigger(other, run_id="over", wait=False)
    await runtime.cancel("over")
    with pytest.raises(RunOver, match="answers no questions"):
        await runtime.ask("over", "quote", timeout="5s")


@workflow("answers once")
async def answers_once(step: Step) -> str:
    question: Any = await step.wait_for_event("q", "quote", returns=Question[int])
    await step.reply(question, question.payload + 1)
    return "answered"


class OpenStore(MemoryStore):
    """A store that can be read after the exploration has closed it."""

    async def close(self) -> None:
        pass


async def test_no_crash_changes_an_answer() -> None:
    stores: list[OpenStore] = []

    def new_store(clock: Any) -> OpenStore:
        stores.append(OpenStore(clock=clock))
        return stores[-1]

    events = {"quote": {"id": "q-1", "payload": 4}}
    await explore_crashes(answers_once, events=events, store=new_store)
    for store in stores:
        assert await store.documents.get("answer:q-1") == "5"
