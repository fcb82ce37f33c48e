"""A run whose task is cancelled at any time, again and again, on real servers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import Ok, Result, Step, durable
from perdure.store import Store
from perdure.stores import open_store

STEPS = 20
CANCELLED = 20


@pytest.fixture(params=["sqlite", "postgres", "mysql", "mongo", "redis", "sqld"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    fixture = request.getfixturevalue
    match request.param:
        case "sqlite":
            opened = open_store(f"sqlite:///{tmp_path}/runs.db")
        case "redis":
            opened = open_store(fixture("redis_url"), namespace=fixture("redis_prefix"))
        case "sqld":
            opened = open_store(f"libsql+{fixture('sqld_url')}")
        case name:
            opened = open_store(fixture(f"{name}_url"))
    yield opened
    await opened.close()


async def run(store: Store, id: str, recorded: set[int] | None = None) -> Result[int, Any]:
    """Run twenty steps; one whose record was durable must not run again."""
    durable_keys = set() if recorded is None else recorded

    async def work(n: int) -> int:
        assert n not in durable_keys, "a step that was recorded ran again"
        return n

    async def body(step: Step) -> int:
        total = 0
        for n in range(STEPS):
            total += await step("work", work, n)
            durable_keys.add(n)
        return total

    return await durable.run({}, body, id=id, store=store, keep=True)


async def cancelled_until_done(store: Store, id: str, within: float) -> int:
    """Call a run until it ends, cancelling each call; return how many were cancelled."""
    recorded: set[int] = set()
    for cancelled in range(500):
        call = asyncio.ensure_future(run(store, id, recorded))
        await asyncio.sleep(random.uniform(0, within))
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled():
            assert call.result() == Ok(sum(range(STEPS)))
            return cancelled
    raise AssertionError("it never gets anywhere")


async def test_cancelling_loses_no_record_and_leaves_no_lease(store: Store) -> None:
    """The next call continues at once: no recorded step runs again, and no lease is held."""
    await store.load("run")
    started = time.monotonic()
    await run(store, "uncancelled")
    within = time.monotonic() - started
    cancelled = 0
    for number in count():
        cancelled += await cancelled_until_done(store, f"run {number}", within)
        if cancelled >= CANCELLED:
            break
