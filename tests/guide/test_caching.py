"""Caches: steps with a key answer from what an earlier run found."""

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
    """It lives as long as it is kept, across runs: the second one fetches nothing."""
    cache: dict[str, Any] = {}
    workflow = Workflow("w", shop, cache=cache)
    assert await workflow.run(greet) == Ok("Hello Ana")
    assert await workflow.run(greet) == Ok("Hello Ana")
    assert shop.calls == ["fetch_user"]


async def test_only_keys_are_asked_for(shop: Shop) -> None:
    """A step without a key belongs to its run, and is never answered from another's."""

    async def without_key(step: Step, shop: Shop) -> None:
        await step("fetch_user", shop.fetch_user, "1")

    workflow = Workflow("w", shop, cache={})
    await workflow.run(without_key)
    await workflow.run(without_key)
    assert shop.calls == ["fetch_user", "fetch_user"]


async def test_memory(shop: Shop, clock: TestClock) -> None:
    """`MemoryCache` holds so many entries for so long; the least recently used goes first."""
    cache = MemoryCache(max_size=1000, ttl=timedelta(days=7), clock=clock)
    workflow = Workflow("w", shop, cache=cache)
    await workflow.run(greet)
    await clock.advance("6 days")
    await workflow.run(greet)
    assert len(shop.calls) == 1
    await clock.advance("1 day")
    await workflow.run(greet)
    assert len(shop.calls) == 2


async def test_files(shop: Shop, tmp_path: Path) -> None:
    """`FileCache` outlives the process: another one on the same directory has the entries."""
    for _ in range(2):
        cache = FileCache(tmp_path / "workflow-state", ttl=timedelta(days=7))
        assert await Workflow("w", shop, cache=cache).run(greet) == Ok("Hello Ana")
    assert shop.calls == ["fetch_user"]


async def test_a_step_may_say_for_how_long(shop: Shop, clock: TestClock) -> None:
    """`ttl=` of a step goes before the cache's own."""

    async def body(step: Step, shop: Shop) -> None:
        await step("fetch_user", shop.fetch_user, "1", key="user:1", ttl="1h")

    workflow = Workflow("w", shop, cache=MemoryCache(clock=clock), clock=clock)
    await workflow.run(body)
    await clock.advance("1h")
    await workflow.run(body)
    assert len(shop.calls) == 2


async def test_keys_make_operations_idempotent(shop: Shop) -> None:
    """A payment under a stable key is made once, however often the workflow is run."""

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
    """The next run gets the same error and the same cause; deleting the key tries again."""
    cache = MemoryCache()
    workflow = Workflow("w", shop, cache=cache)
    assert await workflow.run(find_nobody) == Err("NOT_FOUND", {"id": "999"})
    assert await workflow.run(find_nobody) == Err("NOT_FOUND", {"id": "999"})
    assert shop.calls == ["find"]
    cache.delete("user:999")
    await workflow.run(find_nobody)
    assert shop.calls == ["find", "find"]


class TracingCache:
    """A cache of one's own: get, set and delete, sync or async."""

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


async def test_a_cache_of_ones_own(shop: Shop) -> None:
    """Whatever has the three methods."""
    cache = TracingCache()
    workflow = Workflow("w", shop, cache=cache)
    await workflow.run(greet)
    await workflow.run(greet)
    assert cache.asked == ["user:1", "user:1"]
    assert shop.calls == ["fetch_user"]
