"""Strings by key in MongoDB: they expire, and only `*` is special in patterns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo import AsyncMongoClient

from perdure.errors import InvalidArgument, InvalidDuration, StoreClosed
from perdure.keyvalue import CompareAndSet, GetMany, KeyValueStore, glob_match
from perdure.resume import ResumeState, StatePersistence
from perdure.stores.mongo import MongoKeyValue
from tests.servers.process import Server
from tests.stores.mongo.databases import Sandbox, sandbox_on

HOSTILE = ["a%b", "a_b", "a.b", "a[b]c", "a\\b", "a?b", "a'b", "$a", "^a$", "a\nb", "ä😀", "A%B"]
SHORT = timedelta(milliseconds=80)


@pytest.fixture(scope="module")
def sandbox(mongo_standalone: Server) -> Iterator[Sandbox]:
    with sandbox_on(mongo_standalone) as sandbox:
        yield sandbox


@pytest.fixture
async def kv(sandbox: Sandbox) -> AsyncIterator[MongoKeyValue]:
    async with MongoKeyValue(sandbox.url) as kv:
        yield kv
    sandbox.clear()


def test_it_satisfies_the_protocols() -> None:
    """The five methods, compare-and-set, and many keys in one round trip."""
    kv = MongoKeyValue("mongodb://localhost/db")
    assert isinstance(kv, KeyValueStore)
    assert isinstance(kv, CompareAndSet)
    assert isinstance(kv, GetMany)


async def test_a_value_is_stored_until_it_is_deleted(kv: MongoKeyValue) -> None:
    """`set` replaces it, `delete` returns whether it existed."""
    assert await kv.get("a") is None
    await kv.set("a", "one")
    await kv.set("a", "$two")
    assert await kv.get("a") == "$two"
    assert await kv.exists("a")
    assert await kv.delete("a")
    assert not await kv.delete("a")
    assert not await kv.exists("a")


async def test_get_many_returns_values_in_order(kv: MongoKeyValue) -> None:
    """With `None` for a missing key."""
    await kv.set("a", "1")
    await kv.set("b", "2")
    assert await kv.get_many(["b", "missing", "a", "b"]) == ["2", None, "1", "2"]


async def test_a_value_expires_by_the_servers_clock(kv: MongoKeyValue, sandbox: Sandbox) -> None:
    """It is hidden even before the server deletes it."""
    await kv.set("a", "1", ttl=SHORT)
    await kv.set("b", "2", ttl="1h")
    assert await kv.keys() == ["a", "b"]
    await asyncio.sleep(0.1)
    assert await kv.get_many(["a", "b"]) == [None, "2"]
    assert await kv.keys() == ["b"]
    assert not await kv.delete("a")
    assert not await kv.exists("a")
    (index,) = [
        index
        for index in sandbox.database["perdure_keyvalue"].index_information().values()
        if "expireAfterSeconds" in index
    ]
    assert (index["key"], index["expireAfterSeconds"]) == ([("expiresAt", 1)], 0)


async def test_a_new_value_has_a_new_expiry(kv: MongoKeyValue) -> None:
    """Without `ttl` it has none, whatever the previous value had."""
    await kv.set("a", "1", ttl=SHORT)
    await kv.set("a", "2")
    await kv.set("b", "1", ttl=0)
    await asyncio.sleep(0.1)
    assert await kv.get_many(["a", "b"]) == ["2", None]


async def test_only_the_star_is_special(kv: MongoKeyValue) -> None:
    """Everything else in a pattern matches itself, including case."""
    for key in HOSTILE:
        await kv.set(key, key)
    for key in HOSTILE:
        assert await kv.keys(key) == [key]
        assert await kv.keys(f"*{key[1:]}") == sorted(k for k in HOSTILE if k.endswith(key[1:]))
    assert await kv.keys("a*b") == sorted(k for k in HOSTILE if glob_match("a*b", k))
    assert await kv.keys("*") == sorted(HOSTILE)


@given(
    st.lists(st.text(alphabet="a*\0.\n$\\", max_size=4), max_size=6, unique=True),
    st.text(alphabet="a*\0.\n$\\", max_size=4),
)
def test_patterns_mean_the_same_as_in_memory(
    sandbox: Sandbox, keys: list[str], pattern: str
) -> None:
    """The server's regular expressions agree with `glob_match`."""

    async def check() -> None:
        async with MongoKeyValue(sandbox.url) as kv:
            for key in keys:
                await kv.set(key, "1")
            matches = await kv.keys(pattern)
        sandbox.clear()
        assert matches == sorted(key for key in keys if glob_match(pattern, key))

    asyncio.run(check())


async def test_replace_compares_and_sets(kv: MongoKeyValue) -> None:
    """`None` stands for a missing value, on both sides."""
    assert await kv.replace("a", None, None)
    assert not await kv.replace("a", "x", "y")
    assert await kv.replace("a", None, "1")
    assert not await kv.replace("a", None, "2")
    assert not await kv.replace("a", None, "1")
    assert not await kv.replace("a", "2", "3")
    assert await kv.replace("a", "1", "2")
    assert not await kv.replace("a", None, None)
    assert not await kv.replace("a", "1", None)
    assert await kv.replace("a", "2", None)
    assert await kv.get("a") is None


async def test_only_one_of_many_concurrent_replaces_succeeds(kv: MongoKeyValue) -> None:
    """Even if the key is missing or has expired."""
    for old in (None, "1"):
        results = await asyncio.gather(*(kv.replace("a", old, f"{old}{n}") for n in range(20)))
        assert sum(results) == 1
        await kv.set("a", "1")
    await kv.set("a", "1", ttl=0)
    results = await asyncio.gather(*(kv.replace("a", None, f"{n}") for n in range(20)))
    assert sum(results) == 1


async def test_invalid_arguments_are_refused(kv: MongoKeyValue) -> None:
    """A value is a string, a time to live a duration, and a collection has a valid name."""
    with pytest.raises(InvalidArgument):
        await kv.set("a", b"bytes")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="key"):
        await kv.get(7)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgument, match="old"):
        await kv.replace("a", {"$gt": ""}, "1")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidDuration):
        await kv.set("a", "1", ttl=-1)
    with pytest.raises(InvalidArgument):
        MongoKeyValue("mongodb://localhost/db", collection="a$b")


async def test_values_of_awaitly_are_read(sandbox: Sandbox) -> None:
    """From its own collection, with or without an expiry."""
    later = datetime.now(UTC) + timedelta(hours=1)
    sandbox.database["workflow_state"].insert_many(
        [
            {"_id": "workflow:state:1", "value": "a"},
            {"_id": "workflow:state:2", "value": "b", "expiresAt": later},
            {"_id": "workflow:state:3", "value": "c", "expiresAt": None},
            {"_id": "workflow:state:4", "value": "d", "expiresAt": later - timedelta(hours=2)},
        ]
    )
    async with MongoKeyValue(sandbox.url, collection="workflow_state") as kv:
        assert await kv.keys("workflow:state:*") == [f"workflow:state:{n}" for n in (1, 2, 3)]
        assert await kv.get("workflow:state:2") == "b"
    sandbox.clear()


async def test_it_works_with_state_persistence(kv: MongoKeyValue) -> None:
    """Saved states are listed and loaded."""
    persistence = StatePersistence(kv)
    await persistence.save("run", ResumeState({}))
    assert await persistence.list() == ["run"]
    assert await persistence.load("run") == ResumeState({})


async def test_a_client_that_was_passed_in_stays_open(sandbox: Sandbox) -> None:
    """The store itself is closed."""
    client = AsyncMongoClient[dict[str, str]](sandbox.url)
    async with MongoKeyValue(sandbox.url, client=client) as kv:
        await kv.set("a", "1")
    with pytest.raises(StoreClosed):
        await kv.get("a")
    assert await client.get_default_database()["perdure_keyvalue"].count_documents({}) == 1
    await client.close()
    sandbox.clear()
