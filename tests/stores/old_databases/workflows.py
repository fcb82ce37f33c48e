"""The workflow whose runs are in the old databases."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from perdure import Step, workflow


@dataclass
class Order:
    """An order, and what happens after its payment."""

    item: str
    then: Literal["sleep", "doze", "approval", "ship", "fail"]


async def reserve(item: str) -> str:
    """Reserve the item."""
    return f"reserved {item}"


async def charge(item: str) -> dict[str, object]:
    """Charge for the item."""
    return {"paid": 4200, "currency": "EUR", "note": f"“{item}” 🛒"}


async def ship(item: str) -> str:
    """Ship the item."""
    return f"shipped {item}"


@workflow("order")
async def order(step: Step, payload: Order) -> str:
    """Reserve, charge, wait, and ship."""
    await step("reserve", reserve, payload.item)
    await step("charge", charge, payload.item)
    if payload.then == "sleep":
        await step.sleep("settle", timedelta(days=36500))
    elif payload.then == "doze":
        await step.sleep("settle", timedelta(days=1))
    elif payload.then == "approval":
        await step.wait_for_event("approval", "approved")
    elif payload.then == "fail":
        raise ValueError(f"no {payload.item} left")
    return await step("ship", ship, payload.item)
