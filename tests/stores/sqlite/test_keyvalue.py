"""Strings under keys in SQLite: they expire, and only `*` is special in a pattern."""

import asyncio
import gc
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.errors import InvalidArgument, InvalidDuration, StoreClosed
from perdure.keyvalue import CompareAndSet, GetMany, KeyValueStore
from perdure.stores.sqlite import SqliteKeyValue
from perdure.testing.clock import TestClock

HOSTILE = ["a%b", "a_b", "a.b", "a[b]c", "a\\b", "a?b", "a'b", 'a"b', "ä😀", "A%B"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
async def kv(path: Path, clock: TestClock) -> AsyncIterator[SqliteKeyValue]:
    async with SqliteKeyValue(path, clock=clock) as kv:
        yield kv


def test_it_implements_the_protocols(path: Path) -> None:
    """The key-value methods, compare-and-set, and reading many keys at once."""
    kv = SqliteKeyValue(path)
    assert isinstance(kv, KeyValueStore)
    assert isinstance(kv, CompareAndSet)
    assert isinstance(kv, GetMany)


async def test_a_value_stays_until_it_is_deleted(kv: SqliteKeyValue) -> None:
    """`set` replaces it, `delete` returns whether it existed."""
    assert await kv.get("a") is None
    await kv.set("a", "one")
    await kv.set("a", "two")
    assert await kv.get("a") == "two"
    assert await kv.exists("a")
    assert await kv.delete("a")
    assert not await kv.delete("a")
    assert not await kv.exists("a")


async def test_values_are_returned_in_the_order_of_their_keys(kv: SqliteKeyValue) -> None:
    """`None` stands for a key that does not exist."""
    await kv.set("a", "1")
    await kv.set("b", "2")
    assert await kv.get_many(["b", "missing", "a", "b"]) == ["2", None, "1", "2"]


async def test_a_value_expires(kv: SqliteKeyValue, clock: TestClock) -> None:
    """After `ttl` no method sees the key; a `set` without `ttl` never expires."""
    await kv.set("a", "1", ttl=timedelta(seconds=10))
    await kv.set("b", "2", ttl="10s")
    await kv.set("b", "2")
    await clock.advance(9.999)
    assert await kv.keys() == ["a", "b"]
    await clock.advance(0.001)
    assert await kv.get("a") is None
    assert not await kv.exists("a")
    assert await kv.keys() == ["b"]
    assert not await kv.delete("a")


async def test_expired_keys_are_deleted(kv: SqliteKeyValue, clock: TestClock, path: Path) -> None:
    """Later writes remove them from the file."""
    for number in range(50):
        await kv.set(f"key {number}", "x", ttl=1)
    await clock.advance(2)
    await kv.set("last", "x")
    with closing(sqlite3.connect(path)) as connection:
        keys = connection.execute("SELECT key FROM perdure_keyvalue").fetchall()
    assert keys == [("last",)]


@pytest.mark.parametrize("key", HOSTILE)
async def test_only_the_star_is_special(kv: SqliteKeyValue, key: str) -> None:
    """Every other character of a pattern is literal, and case matters."""
    for name in HOSTILE:
        await kv.set(name, name)
    assert await kv.get(key) == key
    assert await kv.keys(key) == [key]
    assert await kv.keys(f"{key[:-1]}*") == [key]


async def test_a_star_matches_any_string(kv: SqliteKeyValue) -> None:
    """Even an empty one, and anywhere in the pattern."""
    for name in ("ab", "axb", "ax/yb", "b"):
        await kv.set(name, name)
    assert await kv.keys("a*b") == ["ab", "ax/yb", "axb"]
    assert await kv.keys("*b") == ["ab", "ax/yb", "axb", "b"]
    assert len(await kv.keys()) == 4


async def test_replace_is_atomic(kv: SqliteKeyValue) -> None:
    """Twenty concurrent increments are all counted."""

    async def count_up() -> None:
        while True:
            old = await kv.get("count")
            if await kv.replace("count", old, str(int(old or "0") + 1)):
                return

    await asyncio.gather(*(count_up() for _ in range(20)))
    assert await kv.get("count") == "20"


async def test_replace_accepts_none_for_no_value(kv: SqliteKeyValue, clock: TestClock) -> None:
    """As the old value it means missing or expired; as the new one it deletes the key."""
    assert await kv.replace("a", None, None)
    assert not await kv.replace("a", "1", "2")
    assert await kv.replace("a", None, "1")
    assert not await kv.replace("a", None, "2")
    assert not await kv.replace("a", None, None)
    assert not await kv.replace("a", "2", None)
    assert await kv.replace("a", "1", None)
    await kv.set("a", "1", ttl=1)
    await clock.advance(1)
    assert await kv.replace("a", None, "2")
    assert await kv.get("a") == "2"


async def test_invalid_arguments_are_refused(kv: SqliteKeyValue) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidArgument, match="value"):
        await kv.set("a", 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="key"):
        await kv.get(1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="old"):
        await kv.replace("a", 1, "2")  # type: ignore[arg-type]
    with pytest.raises(InvalidDuration, match="ttl"):
        await kv.set("a", "1", ttl=-1)
    with pytest.raises(InvalidArgument, match="table"):
        SqliteKeyValue(":memory:", table="a b")
    with pytest.raises(InvalidArgument, match="durability"):
        SqliteKeyValue(":memory:", durability="off")  # type: ignore[arg-type]


def test_several_event_loops_use_one_store(path: Path) -> None:
    """One after another, and with no set-up for each of them."""
    kv = SqliteKeyValue(path)
    asyncio.run(kv.set("a", "1"))
    assert asyncio.run(kv.get("a")) == "1"
    asyncio.run(kv.close())


async def test_a_closed_store_raises_store_closed(path: Path) -> None:
    """The error names the file; closing again does nothing."""
    kv = SqliteKeyValue(path)
    await kv.set("a", "1")
    await kv.close()
    await kv.close()
    with pytest.raises(StoreClosed, match=path.name):
        await kv.get("a")


async def test_the_threads_of_a_deleted_store_end(path: Path) -> None:
    """A store that was never closed does not keep its threads."""
    kv = SqliteKeyValue(path)
    await kv.set("a", "1")
    await kv.get("a")
    threads = [thread for thread in threading.enumerate() if str(path) in thread.name]
    assert threads
    del kv
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
