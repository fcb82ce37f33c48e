"""The same checkout as in awaitly.mjs, step by step.

As a program it is the Python side of a handover: it starts the run and may crash in a step.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from perdure import Err, Ok, Result, Step, durable
from perdure.store import Store
from perdure.stores import libsql, mongo, postgres
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore

USER = {"id": "u-1", "name": "Åsa ☃", "a.b": {"c": None}}
QUOTE = [12.5, 2**53 - 1, -3, 1.5e-7, True, "", []]
BOUGHT = {"user": USER, "quote": QUOTE, "paid": "paid by Åsa ☃"}

Checkout: TypeAlias = Callable[[Step], Awaitable[Any]]


class OutOfStock(Exception):
    pass


def open_store(kind: str, url: str, *, whole: bool) -> Store:
    """Return the store on the collection or table that awaitly uses."""
    store: Store
    if kind == "mongo":
        store = mongo(url, collection="awaitly_snapshots")
    elif kind == "libsql":
        store = libsql(url, table="awaitly_snapshots")
    else:
        store = postgres(url, table="awaitly_snapshots")
    return SnapshotOnlyStore(store) if whole else store


def checkout(log: Path, *, crash_in: str | None = None, reserve: bool = False) -> Checkout:
    """Return the workflow function; each of its effects is a line of the log."""

    def effect(name: str) -> None:
        if crash_in == name:
            os._exit(9)
        with log.open("a") as lines:
            lines.write(f"python {name}\n")

    async def fetch_user(id: str) -> dict[str, Any]:
        effect("user")
        return {**USER, "id": id}

    async def quote() -> list[Any]:
        effect("quote")
        return QUOTE

    async def reserve_one() -> Result[None, Any]:
        effect("reserve")
        why = OutOfStock("no row")
        why.__cause__ = LookupError("shelf 7")
        return Err({"type": "OUT_OF_STOCK", "left": 0}, cause=why)

    async def charge(user: dict[str, Any]) -> Result[str, Any]:
        effect("charge")
        return Ok(f"paid by {user['name']}")

    async def run(step: Step) -> Any:
        user = await step("fetch-user", fetch_user, "u-1", key="user:u-1")
        amounts = await step("quote", quote)
        if reserve:
            await step("reserve", reserve_one)
        paid = await step("charge", charge, user)
        return {"user": user, "quote": amounts, "paid": paid}

    return run


async def main(plan: dict[str, Any]) -> None:
    store = open_store(plan["kind"], plan["url"], whole=plan["whole"])
    function = checkout(Path(plan["log"]), crash_in=plan["crashIn"], reserve=plan["reserve"])
    await durable.run({}, function, id=plan["id"], store=store, lease_ttl=0.2)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
