"""`durable.run`: every step is stored before the function continues.

The store here is in memory. With `sqlite("workflow.db")`, `postgres("postgresql://…")` or
`mongo(…)` instead, runs survive crashes of the process.
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
    """Pass dependencies, the function, an id and a store; the result is `Ok` or `Err`."""
    assert await durable.run(shop, checkout, id="checkout-123", store=store) == Ok("o-1")


async def test_a_run_continues_after_a_crash(shop: Shop, store: MemoryStore) -> None:
    """The same call in the next process: finished steps return their results, the others run."""
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
    """A failed run stays in the store; the next call runs the failed step, and only that one."""
    shop.down.add("create_order")
    assert not (await durable.run(shop, checkout, id="c-1", store=store)).ok
    shop.down.clear()
    assert await durable.run(shop, checkout, id="c-1", store=store) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order", "create_order"]


async def test_replay_errors_returns_the_recorded_failure(shop: Shop, store: MemoryStore) -> None:
    """`replay_errors=True` makes failures final."""
    shop.down.add("create_order")
    await durable.run(shop, checkout, id="c-1", store=store)
    shop.down.clear()
    again = await durable.run(shop, checkout, id="c-1", store=store, replay_errors=True)
    assert isinstance(again, Err)
    assert str(again.error) == "create_order is down"


async def test_a_completed_run_is_deleted_or_kept(shop: Shop, store: MemoryStore) -> None:
    """With `keep=True` its result can be read later."""
    await durable.run(shop, checkout, id="c-1", store=store)
    assert not await durable.has_state(store, "c-1")
    await durable.run(shop, checkout, id="c-2", store=store, keep=True)
    shop.calls.clear()
    assert await durable.run(shop, checkout, id="c-2", store=store, keep=True) == Ok("o-1")
    assert shop.calls == []


async def test_a_run_is_executed_once_at_a_time(shop: Shop, store: MemoryStore) -> None:
    """A run that is being executed, here or in another process, is not started a second time."""
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


async def test_a_run_can_be_waited_for(shop: Shop, store: MemoryStore) -> None:
    """With `wait=` a call waits until the run is free. One that was kept is not executed again."""
    gate = asyncio.Event()

    async def slow(step: Step, shop: Shop) -> str:
        await step("wait", gate.wait)
        return await checkout(step, shop)

    first = asyncio.create_task(durable.run(shop, slow, id="c-1", store=store, keep=True))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(
        durable.run(shop, slow, id="c-1", store=store, keep=True, wait="30s")
    )
    await asyncio.sleep(0.01)
    gate.set()
    assert await first == await second == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]


async def half_done(shop: Shop, store: MemoryStore, version: int) -> None:
    """Leave a run behind that failed at its second step."""
    shop.down.add("create_order")
    await durable.run(shop, checkout, id="c-1", store=store, version=version)
    shop.down.clear()
    shop.calls.clear()


async def test_another_version_is_refused(shop: Shop, store: MemoryStore) -> None:
    """A run that an older version started is not changed by a newer one, unless you say how."""
    await half_done(shop, store, version=1)
    result = await durable.run(shop, checkout, id="c-1", store=store, version=2)
    assert isinstance(result, Err)
    assert isinstance(result.error, VersionMismatch)
    assert (result.error.stored, result.error.requested) == (1, 2)


async def test_another_version_can_start_from_scratch(shop: Shop, store: MemoryStore) -> None:
    """`on_version_mismatch="clear"` discards what the old version did."""
    await half_done(shop, store, version=1)
    result = await durable.run(
        shop, checkout, id="c-1", store=store, version=2, on_version_mismatch="clear"
    )
    assert result == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]


async def test_another_version_can_migrate_the_snapshot(shop: Shop, store: MemoryStore) -> None:
    """A function converts the old snapshot to one that the new version continues from."""
    await half_done(shop, store, version=1)

    def migrate(gap: durable.VersionGap) -> Snapshot:
        steps = gap.snapshot["steps"]
        return {**gap.snapshot, "steps": {"fetch-user": steps["fetch-user"]}}

    result = await durable.run(
        shop, checkout, id="c-1", store=store, version=2, on_version_mismatch=migrate
    )
    assert result == Ok("o-1")
    assert shop.calls == ["create_order"]


async def test_an_idempotency_key_has_one_result(shop: Shop, store: MemoryStore) -> None:
    """All calls with one key have one result; another input is a conflict."""

    async def request(id: str, input: Any) -> Any:
        return await durable.run(
            shop, checkout, id=id, store=store, idempotency_key="req-1", input=input
        )

    assert await request("c-1", {"cart": 1}) == Ok("o-1")
    assert await request("c-2", {"cart": 1}) == Ok("o-1")
    assert shop.calls == ["fetch_user", "create_order"]
    assert isinstance((await request("c-3", {"cart": 2})).error, IdempotencyConflict)


async def test_managing_stored_runs(shop: Shop, store: MemoryStore) -> None:
    """Check whether a run is stored, list unfinished runs, and delete runs."""
    shop.down.add("create_order")
    for n in range(3):
        await durable.run(shop, checkout, id=f"orders:{n}", store=store)
    pending = await durable.list_pending(store, prefix="orders:", limit=50)
    assert [line.id for line in pending] == ["orders:2", "orders:1", "orders:0"]
    assert await durable.delete_state(store, "orders:0")
    assert await durable.delete_states(store, ["orders:1", "nothing"]) == {}
    assert await durable.clear_state(store) == 1
    assert not await durable.has_state(store, "orders:2")


async def test_deleting_completed_runs(shop: Shop, store: MemoryStore) -> None:
    """A listing contains the status, so that runs need not be loaded."""
    await durable.run(shop, checkout, id="c-1", store=store, keep=True)
    for line in await store.list(limit=1000):
        if line.status == "completed":
            await store.delete(line.id)
    assert await store.list() == []


async def test_run_sync_is_for_code_without_an_event_loop(shop: Shop) -> None:
    result = await asyncio.to_thread(
        durable.run_sync, shop, checkout, id="c-1", store=MemoryStore()
    )
    assert result == Ok("o-1")
