"""An order on SQLite that survives `kill -9`: run it, kill it halfway, and run it again.

    python examples/checkout.py

Finished steps print nothing the second time. Their records are in `checkout.db`.
"""

import asyncio
import sys

from perdure import Err, Ok, Step, durable
from perdure.stores import sqlite


async def reserve(item: str) -> str:
    print(f"reserving {item}", flush=True)
    await asyncio.sleep(1)
    return f"{item} in the basket"


async def charge(cents: int) -> str:
    print(f"charging {cents / 100:.2f}", flush=True)
    await asyncio.sleep(1)
    return "receipt 1001"


async def ship(receipt: str) -> str:
    print(f"shipping, with {receipt}", flush=True)
    await asyncio.sleep(1)
    return "parcel 7"


async def checkout(step: Step) -> str:
    await step("reserve", reserve, "a bicycle")
    receipt = await step("charge", charge, 49900)
    return await step("ship", ship, receipt)


async def main() -> None:
    async with sqlite("checkout.db") as store:
        result = await durable.run({}, checkout, id="order-42", store=store)
    match result:
        case Ok(parcel):
            print(f"done: {parcel}")
        case Err(error):
            sys.exit(f"failed: {error}")


if __name__ == "__main__":
    asyncio.run(main())
