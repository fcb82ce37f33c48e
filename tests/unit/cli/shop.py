"""A small application, for commands that need one."""

import os
from datetime import UTC, datetime

from perdure import Runtime, Step, workflow
from perdure.testing import TestClock


class CarrierDown(Exception):
    pass


def new_clock() -> TestClock:
    """Return a clock on which runs always get the same times, which are past."""
    return TestClock(datetime(2024, 1, 1, tzinfo=UTC))


clock = new_clock()


async def charge() -> str:
    await clock.advance(0.25)
    return "receipt 17"


async def ship(carrier: str) -> str:
    await clock.advance(0.0625)
    if carrier == "down":
        raise CarrierDown("503 from carrier") from ConnectionError("connection reset")
    return "parcel 7"


@workflow("order")
async def order(step: Step, payload: dict[str, str]) -> str:
    """Charge, settle and ship an order."""
    await step("charge", charge)
    if "settle" in payload:
        await step.sleep("settle", payload["settle"])
    if "approver" in payload:
        await step.wait_for_event("approval", "approved")
    return await step("ship", ship, payload.get("carrier", "up"))


runtime = Runtime(os.environ.get("SHOP_STORE", "memory://"), workflows=[order])
