"""The types of dependencies: `Step[Shop]` in plain functions, workflows and runtimes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Runtime, Step, Worker, workflow
from perdure.runtime.definition import Definition
from perdure.stores import MemoryStore


class Mailer:
    async def send(self, to: str) -> int:
        return len(to)


@dataclass
class Shop:
    mailer: Mailer


@dataclass
class Order:
    customer: str


async def notify(step: Step[Shop], customer: str) -> int:
    """A plain function that takes the handle."""
    assert_type(step.deps, Shop)
    return await step("notify", step.deps.mailer.send, customer)


@workflow("order")
async def order(step: Step[Shop], payload: Order) -> str:
    assert_type(step.deps.mailer, Mailer)
    assert_type(await notify(step, payload.customer), int)
    return payload.customer


@workflow("nightly")
async def nightly(step: Step[Shop]) -> int:
    return await notify(step, "ana")


async def untyped(step: Step) -> None:
    assert_type(step.deps, Any)
    await notify(step, "ana")


@asynccontextmanager
async def open_shop() -> AsyncGenerator[Shop]:
    yield Shop(Mailer())


async def on_a_runtime(step: Step[Shop]) -> None:
    assert_type(order, Definition[Order, str])
    assert_type(nightly, Definition[None, int])
    await order(step, Order("ana"))
    async with Runtime(MemoryStore(), workflows=[order, nightly], deps=open_shop) as runtime:
        assert_type(runtime, Runtime)
        await runtime.trigger(order, Order("ana"))
    Runtime(MemoryStore(), workflows=[order], deps=Shop(Mailer()))
    Runtime(MemoryStore(), workflows=[order], deps=open_shop())
    async with Worker(runtime):
        pass
