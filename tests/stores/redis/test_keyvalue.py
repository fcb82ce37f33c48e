"""Strings by key in Redis."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from perdure.errors import InvalidArgument, StoreClosed, StoreCorrupted, StoreUnavailable
from perdure.keyvalue import CompareAndSet, GetMany, KeyValueStore
from perdure.resume import StatePersistence
from perdure.stores.keyvalue import keyvalue
from perdure.stores.redis import RedisKeyValue
from perdure.testing.conformance.hostile import NAMES
from perdure.testing.conformance.samples import snapshot
from tests.stores.redis.kit import steps


@pytest.fixture
async def kv(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisKeyValue]:
    async with RedisKeyValue(redis_url, prefix=redis_prefix) as kv:
        yield kv


def test_it_satisfies_the_protocols() -> None:
    kv = RedisKeyValue("redis://localhost/0")
    assert isinstance(kv, KeyValueStore)
    assert isinstance(kv, CompareAndSet)
    assert isinstance(kv, GetMany)


async def test_values_are_stored(kv: RedisKeyValue) -> None:
    """Any string under any key."""
    await _stores_values(kv)


async def test_values_are_stored_on_a_cluster(
    redis_cluster_url: str, redis_cluster_prefix: str
) -> None:
    """Whichever node has them."""
    async with RedisKeyValue(redis_cluster_url, cluster=True, prefix=redis_cluster_prefix) as kv:
        await _stores_values(kv)


async def _stores_values(kv: RedisKeyValue) -> None:
    for number, name in enumerate(NAMES):
        await kv.set(name, f"{name} {number}")
    assert await kv.get_many(NAMES) == [f"{name} {number}" for number, name in enumerate(NAMES)]
    assert sorted(await kv.keys()) == sorted(NAMES)
    assert await kv.get("missing") is None
    assert [await kv.exists(key) for key in (NAMES[0], "missing")] == [True, False]
    assert [await kv.delete(NAMES[0]) for _ in range(2)] == [True, False]


async def test_only_the_star_is_special(kv: RedisKeyValue) -> None:
    """Everything else in a pattern matches itself."""
    keys = ["a", "ab", "a?", "a[b]", "a\\b", "a*", "b", "A", "a\nb", "a%", "a_", "a^"]
    for key in keys:
        await kv.set(key, "x")
    assert sorted(await kv.keys("a*")) == sorted(key for key in keys if key.startswith("a"))
    for pattern in ("a?", "a[b]", "a\\b", "b", "a%", "a_", "a^"):
        assert await kv.keys(pattern) == [pattern]
    assert await kv.keys("*b") == sorted(key for key in keys if key.endswith("b"))
    assert await kv.keys("[ab]") == await kv.keys("") == []


async def test_a_prefix_is_not_a_pattern(redis_url: str, redis_prefix: str) -> None:
    """Keys of other prefixes are not listed."""
    async with (
        RedisKeyValue(redis_url, prefix=f"{redis_prefix}*:") as star,
        RedisKeyValue(redis_url, prefix=f"{redis_prefix}x:") as other,
    ):
        await star.set("a", "1")
        await other.set("b", "2")
        assert await star.keys() == ["a"]


async def test_a_value_expires(kv: RedisKeyValue) -> None:
    """Unless it was set again without a `ttl`; with zero it expires at once."""
    await kv.set("short", "x", ttl=0.05)
    await kv.set("again", "x", ttl=timedelta(milliseconds=50))
    await kv.set("again", "y")
    await kv.set("long", "x", ttl="1h")
    await kv.set("none", "x")
    await kv.set("none", "x", ttl=0)
    await asyncio.sleep(0.08)
    assert await kv.get_many(["short", "again", "long", "none"]) == [None, "y", "x", None]
    assert not await kv.exists("short")
    assert await kv.keys() == ["again", "long"]


async def test_a_time_to_live_below_a_millisecond_expires_at_once(kv: RedisKeyValue) -> None:
    """The server cannot count less."""
    await kv.set("key", "x", ttl=timedelta(microseconds=10))
    assert await kv.get("key") is None


async def test_only_one_of_many_concurrent_replaces_succeeds(kv: RedisKeyValue) -> None:
    """`None` stands for a missing value, on both sides."""
    assert await kv.replace("key", None, "0")
    assert not await kv.replace("key", None, "x")
    results = await asyncio.gather(*(kv.replace("key", "0", f"{n}") for n in range(1, 30)))
    assert sorted(results) == [False] * 28 + [True]
    last = await kv.get("key")
    assert not await kv.replace("key", "0", None)
    assert await kv.replace("key", last, None)
    assert await kv.replace("key", None, None)
    assert not await kv.replace("key", "", "x")


async def test_it_works_with_state_persistence_and_the_key_value_store(kv: RedisKeyValue) -> None:
    """Both accept it."""
    persistence = StatePersistence(kv)
    assert await persistence.load("missing") is None
    async with keyvalue(kv) as store:
        await store.save("run", snapshot("a"))
        assert await steps(store) == ["a"]
    assert await kv.keys() != []


async def test_invalid_arguments_are_refused(kv: RedisKeyValue) -> None:
    with pytest.raises(InvalidArgument):
        await kv.set("key", 7)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument):
        await kv.get(b"key")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="old"):
        await kv.replace("key", 7, "x")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument):
        await kv.set("key", "x", ttl=-1)


async def test_a_value_that_is_not_a_string_is_corrupted(
    kv: RedisKeyValue, redis_prefix: str
) -> None:
    await kv._server.send([("SET", f"{redis_prefix}key", b"\xff")])
    with pytest.raises(StoreCorrupted):
        await kv.get("key")
    assert await kv.exists("key")
    assert not await kv.replace("key", None, None)


async def test_an_unavailable_server_is_named() -> None:
    async with RedisKeyValue("redis://127.0.0.1:1", connect_timeout=0) as kv:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
            await kv.get("key")
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
            await kv.keys()


async def test_a_closed_store_raises_store_closed(redis_url: str) -> None:
    kv = RedisKeyValue(redis_url)
    await kv.close()
    await kv.close()
    with pytest.raises(StoreClosed):
        await kv.get("key")
