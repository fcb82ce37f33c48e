"""The types of functions that are steps: those of the functions that they decorate."""

import asyncio
from typing import Any, assert_type

from perdure import Err, Ok, Result, Retry, Step, durable


@durable.step
async def charge(cents: int, *, currency: str = "EUR") -> str:
    return f"{cents} {currency}"


@durable.step(retry=Retry(3), timeout="5s", name="find user", errors=[OSError])
async def find(id: str) -> Result[int, str]:
    return Ok(1) if id else Err("NOT_FOUND")


class Shop:
    @durable.step
    async def order(self, item: str, amount: int = 1) -> list[str]:
        return [item] * amount


async def calls(shop: Shop) -> None:
    assert_type(await charge(5), str)
    assert_type(await charge(cents=5, currency="USD"), str)
    assert_type(await find("1"), Ok[int] | Err[str])
    assert_type(await shop.order("tea", amount=2), list[str])
    assert_type(durable.current(), Step[Any])


async def at_once(step: Step, shop: Shop) -> None:
    assert_type(await step.all(charge(5), shop.order("tea")), tuple[str, list[str]])
    assert_type(await asyncio.gather(charge(5), shop.order("tea")), tuple[str, list[str]])
    assert_type(await step.map("charge", [1, 2], charge), list[str])
    assert_type(await step("charge", charge, 5), str)
