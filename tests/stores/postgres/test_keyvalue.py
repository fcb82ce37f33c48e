"""The key-value store in PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import psycopg
import pytest

from perdure.errors import InvalidArgument, StoreClosed
from perdure.keyvalue import CompareAndSet, GetMany, KeyValueStore
from perdure.resume import ResumeState, StatePersistence
from perdure.stores.postgres import PostgresKeyValue
from tests.servers.pgbouncer import PgBouncer

BLINK = timedelta(milliseconds=50)


@pytest.fixture
async def kv(postgres_url: str) -> AsyncIterator[PostgresKeyValue]:
    async with PostgresKeyValue(postgres_url) as kv:
        yield kv


async def test_it_is_a_key_value_store(kv: PostgresKeyValue) -> None:
    """With the optional methods that make it fast and safe."""
    assert isinstance(kv, KeyValueStore)
    assert isinstance(kv, CompareAndSet)
    assert isinstance(kv, GetMany)


async def test_a_value_is_stored_until_it_is_deleted(kv: PostgresKeyValue) -> None:
    """Any string is a key and a value."""
    for key, value in (
        ("", ""),
        ("ключ 🔑", "текст 📄"),
        ("a'b\"c\\d%e_f", "'; DROP TABLE"),
        ("A", "1"),
    ):
        assert await kv.get(key) is None
        await kv.set(key, value)
        assert await kv.get(key) == value
        assert await kv.exists(key)
        assert await kv.delete(key) is True
        assert await kv.delete(key) is False
        assert not await kv.exists(key)


async def test_set_replaces_the_value_and_its_time_to_live(kv: PostgresKeyValue) -> None:
    """Without `ttl`, a previous one is removed."""
    await kv.set("a", "1", ttl=BLINK)
    await kv.set("a", "2")
    await asyncio.sleep(0.1)
    assert await kv.get("a") == "2"


async def test_values_expire(kv: PostgresKeyValue) -> None:
    """By the database's clock, for every method."""
    await kv.set("long", "2", ttl="1h")
    await kv.set("none", "3", ttl=0)
    # Last, and long enough for one more round trip, however slow the machine is.
    await kv.set("short", "1", ttl="2s")
    assert await kv.keys() == ["long", "short"]
    async with asyncio.timeout(60):
        while await kv.get("short") is not None:
            await asyncio.sleep(0.05)
    assert await kv.get_many(["short", "long", "none"]) == [None, "2", None]
    assert not await kv.exists("short")
    assert await kv.keys() == ["long"]
    assert await kv.delete("short") is False


async def test_expired_values_are_purged(kv: PostgresKeyValue, postgres_url: str) -> None:
    """Later writes delete them."""
    for number in range(30):
        await kv.set(f"{number}", "x", ttl=BLINK)
    await asyncio.sleep(0.1)
    await kv.set("0", "again")
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT key FROM perdure_keyvalue").fetchall() == [("0",)]


async def test_only_the_star_is_special_in_a_pattern(kv: PostgresKeyValue) -> None:
    """`%`, `_`, `.`, `[`, `?` and `\\` match themselves."""
    keys = ["a%b", "a_b", "a.b", "a[b]", "a\\b", "a?b", "axb", "ab", "A%B", "a\nb"]
    for key in keys:
        await kv.set(key, "1")
    for key in keys:
        assert await kv.keys(key) == [key]
    assert await kv.keys("a*b") == sorted(set(keys) - {"a[b]", "A%B"})
    assert await kv.keys("*") == sorted(keys)
    assert await kv.keys("a%*") == ["a%b"]
    assert await kv.keys("*\\*") == ["a\\b"]
    assert await kv.keys("") == []


async def test_compare_and_set(kv: PostgresKeyValue) -> None:
    """`replace` compares and sets atomically; `None` stands for a missing key."""
    assert await kv.replace("a", None, None) is True
    assert await kv.replace("a", "x", "1") is False
    assert await kv.replace("a", None, "1") is True
    assert await kv.replace("a", None, "2") is False
    assert await kv.replace("a", "1", "2") is True
    assert await kv.replace("a", "1", None) is False
    assert await kv.replace("a", "2", None) is True
    assert await kv.get("a") is None
    await kv.set("a", "old", ttl=BLINK)
    await asyncio.sleep(0.1)
    assert await kv.replace("a", "old", "new") is False
    assert await kv.replace("a", None, "new") is True
    assert await kv.get("a") == "new"


async def test_one_of_many_concurrent_replacements_succeeds(kv: PostgresKeyValue) -> None:
    """However many processes replace the same value at once."""
    await kv.set("a", "0")
    won = await asyncio.gather(*(kv.replace("a", "0", f"{n}") for n in range(1, 20)))
    assert sum(won) == 1
    added = await asyncio.gather(*(kv.replace("b", None, f"{n}") for n in range(20)))
    assert sum(added) == 1


@pytest.mark.parametrize("value", [None, 7, b"x", "a\0b"])
async def test_values_other_than_strings_are_refused(kv: PostgresKeyValue, value: object) -> None:
    """As a key and as a value; the error names the parameter."""
    with pytest.raises(InvalidArgument, match="value"):
        await kv.set("a", value)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="key"):
        await kv.get(value)  # type: ignore[arg-type]  # on purpose


async def test_concurrent_first_uses_are_safe(postgres_url: str) -> None:
    """Set-up is lazy, and safe if many stores start together."""
    kvs = [PostgresKeyValue(postgres_url, max_connections=1) for _ in range(20)]
    await asyncio.gather(*(kv.set(f"{number}", "x") for number, kv in enumerate(kvs)))
    assert len(await kvs[0].keys()) == 20
    await asyncio.gather(*(kv.close() for kv in kvs))
    with pytest.raises(StoreClosed):
        await kvs[0].get("0")


async def test_it_works_behind_a_pooler(pgbouncer_server: PgBouncer, pgbouncer_url: str) -> None:
    """Without prepared statements."""
    async with PostgresKeyValue(pgbouncer_url, prepared_statements=False) as kv:
        await asyncio.gather(*(kv.set(f"{number}", "x") for number in range(30)))
        assert len(await kv.keys("1*")) == 11


async def test_awaitlys_own_table_is_used_as_it_is(postgres_url: str) -> None:
    """Each reads what the other stored."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(AWAITLY)
    async with PostgresKeyValue(postgres_url, table="awaitly_workflow_state") as kv:
        persistence = StatePersistence(kv)
        state = await persistence.load("wf-123")
        assert state is not None
        assert list(state.steps) == ["user:1"]
        assert await persistence.list() == ["wf-123"]
        await persistence.save("wf-4", ResumeState({}))
        await kv.set("short", "1", ttl=BLINK)
        await asyncio.sleep(0.1)
        assert await kv.get("short") is None
    with psycopg.connect(postgres_url) as connection:
        keys = connection.execute("SELECT key FROM awaitly_workflow_state WHERE key LIKE '%wf-4'")
        assert keys.fetchall() == [("workflow:state:wf-4",)]


AWAITLY = """
    CREATE TABLE awaitly_workflow_state (
        key TEXT PRIMARY KEY, value TEXT NOT NULL, expires_at TIMESTAMP, updated_at TIMESTAMPTZ
    );
    INSERT INTO awaitly_workflow_state (key, value) VALUES ('workflow:state:wf-123',
        '{"version":1,"entries":{"user:1":{"result":{"ok":true,"value":{"id":"1"}}}}}');
"""
