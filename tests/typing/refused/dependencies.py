"""Wrong uses of dependencies."""

from dataclasses import dataclass

from perdure import Step, workflow


@dataclass
class Shop:
    currency: str


@dataclass
class Bank:
    rate: float


@workflow("order")
async def order(step: Step[Shop]) -> float:
    print(step.deps.mailer)  # refused
    step.deps = Shop("EUR")  # refused
    rate: int = step.deps.currency  # refused
    return rate


async def convert(step: Step[Bank]) -> float:
    return step.deps.rate


async def mixed(step: Step[Shop]) -> float:
    return await convert(step)  # refused
