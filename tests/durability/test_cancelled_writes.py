"""A run whose task is cancelled at any moment, again and again, on real servers."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import Ok, Step, durable
from perdure.store import Store
from perdure.stores import open_store

STEPS = 20
CANCELLED = 20


@pytest.fixture(params=["sqlite", "postgres", "mysql", "mongo", "redis", "sqld"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    given = request.getfixturevalue
    match request.param:
        case "sqlite":
            opened = open_store(f"sqlite:///{tmp_path}/runs.db")
        case "redis":
            opened = open_store(given("redis_url"), namespace=given("redis_prefix"))
        case "sqld":
            opened = open_store(f"libsql+{given('sqld_url')}")
        case name:
            opened = open_store(given(f"{name}_url"))
    yield opened
    await opened.close()


async def cancelled_until_done(store: Store, id: str) -> int:
    """Call a run until it gives its result, cancelling each call; give how many were cancelled."""
    recorded: set[int] = set()

    async def work(n: int) -> int:
        assert n not in recorded, "a step that was recorded ran again"
        return n

    async def body(step: Step) -> int:
        total = 0
        for n in range(STEPS):
            total += await step("work", work, n)
            recorded.add(n)
        return total

    for cancelled in range(500):
        call: asyncio.Task[Any] = asyncio.ensure_future(
            durable.run({}, body, id=id, store=store, keep=True)
        )
        # Each time a little later, so that it gets somewhere on a slow machine too.
        await asyncio.sleep(random.uniform(0, 0.02 * 1.03**cancelled))
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled():
            assert call.result() == Ok(sum(range(STEPS)))
            return cancelled
    raise AssertionError("it never gets anywhere")


async def test_cancelling_loses_no_record_and_leaves_no_lease(store: Store) -> None:
    """The next call goes on at once: a recorded step is not run again, and nobody holds the run."""
    await store.load("run")
    cancelled = 0
    for number in count():
        cancelled += await cancelled_until_done(store, f"run {number}")
        if cancelled >= CANCELLED:
            break
