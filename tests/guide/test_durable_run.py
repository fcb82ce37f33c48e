"""`durable.run`: every step is in the store before the function goes on.

The store here is in memory; `sqlite("workflow.db")`, `postgres("postgresql://…")` or `mongo(…)` in
its place survive what really happens to processes.
"""

import asyncio
from typing import Any

import pytest

from perdure import Err, Ok, Step, durable
from perdure.errors import AlreadyRunning, IdempotencyConflict, VersionMismatch
from perdure.snapshot import Snapshot
from perdure.stores import MemoryStore
from tests.guide.shop import Shop


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def checkout(step: Step, shop: Shop) -> str:
    user = await step("fetch_user", lambda: shop.fetch_user("123"), key="fetch-user")
    order = await step("create_order", lambda: shop.create_order(user), key="create-order")
    return str(order["id"])


async def test_a_durable_run(shop: Shop, store: MemoryStore) -> None:
    """Dependencies, the function, an id and a store; the result is `Ok` or `Err`."""
    assert await durable.run(shop, checkout, id="checkout-123", store=store) == Ok("o-1")


async def test_it_goes_on_after_a_crash(shop: Shop, store: MemoryStore) -> None:
    """The same call in the next process: what was done answers, what was not is done."""
    arrived, never = asyncio.Event(), asyncio.Event()

    async def interrupted(step: Step, shop: Shop) -> str:
        user = await step("fetch_user", shop.fetch_user, "123")
        arrived.set()
        if shop.calls == ["fetch_user"]:
            await never.wait()
        return str((await step("create_order", shop.create_order, user))["id"])

    process = asyncio.create_task(durable.run(shop, interrupted, id="c-1", store=store))
    await arrived.wait()
    process.cancel()
    await asyncio.wait([process])
    never.set()
    assert await durable.run(shop, interrupted, id="c-1", store=store) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]


async def test_a_failed_step_runs_again(shop: Shop, store: MemoryStore) -> None:
    """A failure stays in the store; the next call tries what failed, and only that."""
    shop.down.add("create_order")
    assert not (await durable.run(shop, checkout, id="c-1", store=store)).ok
    shop.down.clear()
    assert await durable.run(shop, checkout, id="c-1", store=store) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order", "create_order"]


async def test_or_it_answers_with_the_recorded_failure(shop: Shop, store: MemoryStore) -> None:
    """`replay_errors=True` says that a failure is final."""
    shop.down.add("create_order")
    await durable.run(shop, checkout, id="c-1", store=store)
    shop.down.clear()
    again = await durable.run(shop, checkout, id="c-1", store=store, replay_errors=True)
    assert isinstance(again, Err)
    assert str(again.error) == "create_order is down"


async def test_nothing_is_left_of_a_success(shop: Shop, store: MemoryStore) -> None:
    """A completed run is deleted, unless it is to be kept; then its result is there for ever."""
    await durable.run(shop, checkout, id="c-1", store=store)
    assert not await durable.has_state(store, "c-1")
    await durable.run(shop, checkout, id="c-2", store=store, keep=True)
    shop.calls.clear()
    assert await durable.run(shop, checkout, id="c-2", store=store, keep=True) == Ok("o-1")
    assert shop.calls == []


async def test_one_at_a_time(shop: Shop, store: MemoryStore) -> None:
    """A run that goes on already, here or in another process, is not begun a second time."""
    gate = asyncio.Event()

    async def slow(step: Step) -> None:
        await step("wait", gate.wait)

    first = asyncio.create_task(durable.run(shop, slow, id="c-1", store=store))
    await asyncio.sleep(0.01)
    second = await durable.run(shop, slow, id="c-1", store=store)
    assert isinstance(second, Err)
    assert isinstance(second.error, AlreadyRunning)
    gate.set()
    assert (await first).ok


async def half_done(shop: Shop, store: MemoryStore, version: int) -> None:
    """Leave a run behind that failed at its second step."""
    shop.down.add("create_order")
    await durable.run(shop, checkout, id="c-1", store=store, version=version)
    shop.down.clear()
    shop.calls.clear()


async def test_another_version_is_refused(shop: Shop, store: MemoryStore) -> None:
    """A run that an older version began is not touched by a newer one without being told how."""
    await half_done(shop, store, version=1)
    result = await durable.run(shop, checkout, id="c-1", store=store, version=2)
    assert isinstance(result, Err)
    assert isinstance(result.error, VersionMismatch)
    assert (result.error.stored, result.error.requested) == (1, 2)


async def test_another_version_begins_anew(shop: Shop, store: MemoryStore) -> None:
    """`on_version_mismatch="clear"` forgets what the old version did."""
    await half_done(shop, store, version=1)
    result = await durable.run(
        shop, checkout, id="c-1", store=store, version=2, on_version_mismatch="clear"
    )
    assert result == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]


async def test_another_version_takes_over(shop: Shop, store: MemoryStore) -> None:
    """A function makes of the old snapshot one that the new version goes on from."""
    await half_done(shop, store, version=1)

    def migrate(gap: durable.VersionGap) -> Snapshot:
        steps = gap.snapshot["steps"]
        return {**gap.snapshot, "steps": {"fetch-user": steps["fetch-user"]}}

    result = await durable.run(
        shop, checkout, id="c-1", store=store, version=2, on_version_mismatch=migrate
    )
    assert result == Ok("o-1")
    assert shop.calls == ["create_order"]


async def test_one_request_one_result(shop: Shop, store: MemoryStore) -> None:
    """All calls with one idempotency key have one result; another input is a conflict."""

    async def request(id: str, input: Any) -> Any:
        return await durable.run(
            shop, checkout, id=id, store=store, idempotency_key="req-1", input=input
        )

    assert await request("c-1", {"cart": 1}) == Ok("o-1")
    assert await request("c-2", {"cart": 1}) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]
    assert isinstance((await request("c-3", {"cart": 2})).error, IdempotencyConflict)


async def test_keeping_house(shop: Shop, store: MemoryStore) -> None:
    """What is there, what is unfinished, and how to be rid of it."""
    shop.down.add("create_order")
    for n in range(3):
        await durable.run(shop, checkout, id=f"orders:{n}", store=store)
    pending = await durable.list_pending(store, prefix="orders:", limit=50)
    assert [line.id for line in pending] == ["orders:2", "orders:1", "orders:0"]
    assert await durable.delete_state(store, "orders:0")
    assert await durable.delete_states(store, ["orders:1", "nothing"]) == {}
    assert await durable.clear_state(store) == 1
    assert not await durable.has_state(store, "orders:2")


async def test_cleaning_up_what_is_completed(shop: Shop, store: MemoryStore) -> None:
    """A listing tells the status, so nothing has to be loaded."""
    await durable.run(shop, checkout, id="c-1", store=store, keep=True)
    for line in await store.list(limit=1000):
        if line.status == "completed":
            await store.delete(line.id)
    assert await store.list() == []


async def test_without_async(shop: Shop) -> None:
    """`run_sync` is the door for code that has no event loop."""
    result = await asyncio.to_thread(
        durable.run_sync, shop, checkout, id="c-1", store=MemoryStore()
    )
    assert result == Ok("o-1")
