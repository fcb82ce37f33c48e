"""Caches: a step with a key returns the result of an earlier run."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Err, Ok, Result, Step, Workflow
from perdure.caches import FileCache, MemoryCache
from perdure.testing import TestClock
from tests.guide.shop import Shop


async def greet(step: Step, shop: Shop) -> str:
    user = await step("fetch_user", lambda: shop.fetch_user("1"), key="user:1")
    return f"Hello {user['name']}"


async def find_nobody(step: Step, shop: Shop) -> Any:
    async def find(id: str) -> Result[str, str]:
        shop.calls.append("find")
        return Err("NOT_FOUND", {"id": id})

    return await step("find", find, "999", key="user:999")


async def test_a_dict_is_a_cache(shop: Shop) -> None:
    """It is shared by runs: the second one fetches nothing."""
    cache: dict[str, Any] = {}
    workflow = Workflow("w", shop, cache=cache)
    assert await workflow.run(greet) == Ok("Hello Ana")
    assert await workflow.run(greet) == Ok("Hello Ana")
    assert shop.calls == ["fetch_user"]


async def test_only_steps_with_a_key_are_cached(shop: Shop) -> None:
    """A step without a key belongs to its run, and never returns the result of another run."""

    async def without_key(step: Step, shop: Shop) -> None:
        await step("fetch_user", shop.fetch_user, "1")

    workflow = Workflow("w", shop, cache={})
    await workflow.run(without_key)
    await workflow.run(without_key)
    assert shop.calls == ["fetch_user", "fetch_user"]


async def test_memory_cache(shop: Shop, clock: TestClock) -> None:
    """`MemoryCache` limits the number of entries and their lifetime, and evicts the least recently
    used.
    """
    cache = MemoryCache(max_size=1000, ttl=timedelta(days=7), clock=clock)
    workflow = Workflow("w", shop, cache=cache)
    await workflow.run(greet)
    await clock.advance("6 days")
    await workflow.run(greet)
    assert len(shop.calls) == 1
    await clock.advance("1 day")
    await workflow.run(greet)
    assert len(shop.calls) == 2


async def test_file_cache(shop: Shop, tmp_path: Path) -> None:
    """`FileCache` outlives the process: another cache on the same directory has the entries."""
    for _ in range(2):
        cache = FileCache(tmp_path / "workflow-state", ttl=timedelta(days=7))
        assert await Workflow("w", shop, cache=cache).run(greet) == Ok("Hello Ana")
    assert shop.calls == ["fetch_user"]


async def test_a_step_can_have_its_own_ttl(shop: Shop, clock: TestClock) -> None:
    """`ttl=` of a step takes precedence over that of the cache."""

    async def body(step: Step, shop: Shop) -> None:
        await step("fetch_user", shop.fetch_user, "1", key="user:1", ttl="1h")

    workflow = Workflow("w", shop, cache=MemoryCache(clock=clock), clock=clock)
    await workflow.run(body)
    await clock.advance("1h")
    await workflow.run(body)
    assert len(shop.calls) == 2


async def test_keys_make_operations_idempotent(shop: Shop) -> None:
    """A payment with a stable key is made once, however often the workflow runs."""

    async def pay(step: Step, shop: Shop) -> str:
        order_id = "o-1"
        key = f"payment:{order_id}"
        payment = await step("pay", lambda: shop.process_payment("1", 100), key=key)
        if "send_confirmation" in shop.down:
            raise ConnectionError("the process dies here")
        return str(payment["id"])

    workflow = Workflow("w", shop, cache={})
    shop.down.add("send_confirmation")
    assert not (await workflow.run(pay)).ok
    shop.down.clear()
    assert await workflow.run(pay) == Ok("p-1")
    assert shop.calls == ["process_payment"]


async def test_errors_are_cached_too(shop: Shop) -> None:
    """The next run gets the same error and cause; after deleting the key, the step runs again."""
    cache = MemoryCache()
    workflow = Workflow("w", shop, cache=cache)
    assert await workflow.run(find_nobody) == Err("NOT_FOUND", {"id": "999"})
    assert await workflow.run(find_nobody) == Err("NOT_FOUND", {"id": "999"})
    assert shop.calls == ["find"]
    cache.delete("user:999")
    await workflow.run(find_nobody)
    assert shop.calls == ["find", "find"]


class TracingCache:
    """A user's own cache: get, set and delete, sync or async."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.asked: list[str] = []

    async def get(self, key: str) -> Any:
        self.asked.append(key)
        return self.entries.get(key)

    def set(self, key: str, record: Any) -> None:
        self.entries[key] = record

    def delete(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None


async def test_any_object_with_three_methods_is_a_cache(shop: Shop) -> None:
    cache = TracingCache()
    workflow = Workflow("w", shop, cache=cache)
    await workflow.run(greet)
    await workflow.run(greet)
    assert cache.asked == ["user:1", "user:1"]
    assert shop.calls == ["fetch_user"]
