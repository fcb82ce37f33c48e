"""Dependencies: what steps use, opened once per process and typed."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from perdure import Runtime, Step, Worker, workflow
from perdure.stores import MemoryStore
from perdure.testing import explore_crashes


@dataclass
class Shop:
    """What the workflows use: clients, connections, settings."""

    currency: str = "EUR"
    sent: list[str] = field(default_factory=list)
    is_open: bool = True

    async def send(self, receipt: str) -> None:
        assert self.is_open
        self.sent.append(receipt)


@workflow("order")
async def order(step: Step[Shop], amount: int) -> str:
    """`Step[Shop]` tells type checkers what `step.deps` is."""
    receipt = f"{amount} {step.deps.currency}"
    await step("send", step.deps.send, receipt)
    return receipt


async def test_steps_use_the_dependencies_of_the_runtime() -> None:
    shop = Shop(currency="CHF")
    run = await Runtime(MemoryStore(), workflows=[order], deps=shop).trigger(order, 7)
    assert run.output == "7 CHF"
    assert shop.sent == ["7 CHF"]


shops: list[Shop] = []


@asynccontextmanager
async def open_shop() -> AsyncGenerator[Shop]:
    """Open connections before the first run, and close them after the last."""
    shop = Shop()
    shops.append(shop)
    yield shop
    shop.is_open = False


async def test_a_context_manager_is_entered_once_for_all_runs() -> None:
    shops.clear()
    async with Runtime(MemoryStore(), workflows=[order], deps=open_shop) as runtime:
        await runtime.trigger(order, 7)
        await runtime.trigger(order, 8)
    (shop,) = shops
    assert shop.sent == ["7 EUR", "8 EUR"]
    assert not shop.is_open


async def test_a_worker_enters_it_when_it_starts() -> None:
    shops.clear()
    async with Worker(Runtime(MemoryStore(), workflows=[order], deps=open_shop)):
        assert shops[0].is_open
    assert not shops[0].is_open


async def test_a_call_outside_of_both_enters_it_for_itself() -> None:
    shops.clear()
    runtime = Runtime(MemoryStore(), workflows=[order], deps=open_shop)
    await runtime.trigger(order, 7)
    await runtime.trigger(order, 8)
    assert [shop.sent for shop in shops] == [["7 EUR"], ["8 EUR"]]


async def test_dependencies_are_tested_with_crashes_too() -> None:
    """Each simulated process enters them."""
    shops.clear()
    report = await explore_crashes(order, 7, deps=open_shop)
    assert len(shops) == 1 + 2 * report.crashes
    assert sum(len(shop.sent) for shop in shops) == 1 + report.crashes + report.doubled["send"]
