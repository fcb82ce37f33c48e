"""The documents of every store: strings under keys, beside the runs."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import aiosqlite
import asyncmy
import asyncpg
import pytest
from asyncmy.constants import CLIENT

from perdure.errors import InvalidArgument, StoreClosed, ValueTooLarge
from perdure.keyvalue import Documents, MemoryKeyValue
from perdure.stores import (
    FileStore,
    MemoryStore,
    SqlStore,
    keyvalue,
    libsql,
    mongo,
    mysql,
    postgres,
    redis,
    sqlite,
)
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore
from perdure.stores.sql import sqlalchemy_client
from perdure.testing.conformance.samples import snapshot
from tests.stores.counting import COUNTER, increment
from tests.stores.sql.clients import (
    AiosqliteClient,
    AsyncmyClient,
    AsyncpgClient,
    engine_on,
    mysql_options,
)

Open: TypeAlias = Callable[..., Any]
Start: TypeAlias = Callable[[pytest.FixtureRequest, AsyncExitStack], Awaitable["Place"]]

# Said by the library of the drivers.
pytestmark = pytest.mark.filterwarnings("ignore:A configured store is unstable")

BLINK = timedelta(milliseconds=50)
PAUSE = 0.15


@dataclass(frozen=True)
class Place:
    """An empty database: how to open a store on it, here and in another process."""

    open: Open
    url: str = ""
    options: str = "{}"


async def _memory(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    shared = MemoryStore()
    return Place(lambda **options: MemoryStore(shares=shared, **options))


async def _file(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    directory: Path = request.getfixturevalue("tmp_path")
    return Place(lambda **options: FileStore(directory, **options), f"file://{directory}")


async def _sqlite(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    path: Path = request.getfixturevalue("tmp_path") / "runs.db"
    return Place(lambda **options: sqlite(path, **options), f"sqlite:///{path}")


async def _libsql_file(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    path: Path = request.getfixturevalue("tmp_path") / "runs.db"
    return Place(lambda **options: libsql(f"file:{path}", **options))


def _server(open: Open, fixture: str, scheme: str = "", **settings: Any) -> Start:
    async def start(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
        url: str = request.getfixturevalue(fixture)
        arguments = json.dumps(settings)
        return Place(lambda **options: open(url, **settings, **options), scheme + url, arguments)

    return start


def _redis(name: str) -> Start:
    async def start(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
        namespace: str = request.getfixturevalue(f"{name}_prefix")
        url: str = request.getfixturevalue(f"{name}_url")
        settings: dict[str, Any] = {"namespace": namespace, "cluster": name == "redis_cluster"}
        arguments = json.dumps(settings)
        return Place(lambda **options: redis(url, **settings, **options), url, arguments)

    return start


async def _sql_on_postgres(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    url: str = request.getfixturevalue("postgres_url")
    pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=1, max_size=10))
    client = AsyncpgClient(pool)
    return Place(lambda **options: SqlStore(client, dialect="postgres", **options))


async def _sql_on_sqlalchemy(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    engine = engine_on(request.getfixturevalue("postgres_url"), "postgresql+asyncpg")
    stack.push_async_callback(engine.dispose)
    client = sqlalchemy_client(engine)
    return Place(lambda **options: SqlStore(client, dialect="postgres", **options))


def _sql_on_mysql(flags: int = 0) -> Start:
    async def start(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
        database = mysql_options(request.getfixturevalue("mysql_url"))
        pool = await asyncmy.create_pool(**database, autocommit=True, maxsize=10, client_flag=flags)
        stack.push_async_callback(pool.wait_closed)
        stack.callback(pool.close)
        client = AsyncmyClient(pool)
        return Place(lambda **options: SqlStore(client, dialect="mysql", **options))

    return start


async def _sql_on_sqlite(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    path: Path = request.getfixturevalue("tmp_path") / "runs.db"
    connecting = aiosqlite.connect(path, isolation_level=None)
    client = AiosqliteClient(await stack.enter_async_context(connecting))
    return Place(lambda **options: SqlStore(client, dialect="sqlite", **options))


async def _keyvalue(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    kv = MemoryKeyValue()
    return Place(lambda **options: keyvalue(kv, **options))


async def _keyvalue_driver(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Place:
    from key_value.aio.stores.simple import SimpleStore

    driver = SimpleStore()
    return Place(lambda **options: keyvalue(driver, **options))


LOCAL: dict[str, Start] = {
    "memory": _memory,
    "file": _file,
    "sqlite": _sqlite,
    "libsql_file": _libsql_file,
    "sql_sqlite": _sql_on_sqlite,
    "keyvalue": _keyvalue,
    "keyvalue_driver": _keyvalue_driver,
}
SERVERS: dict[str, Start] = {
    "libsql": _server(libsql, "sqld_url", "libsql+"),
    "postgres": _server(postgres, "postgres_url"),
    "pgbouncer": _server(postgres, "pgbouncer_url", prepared_statements=False),
    "mysql": _server(mysql, "mysql_url"),
    "mongo": _server(mongo, "mongo_url"),
    "mongo_standalone": _server(mongo, "mongo_standalone_url"),
    "redis": _redis("redis"),
    "redis_cluster": _redis("redis_cluster"),
    "sql_postgres": _sql_on_postgres,
    "sql_sqlalchemy": _sql_on_sqlalchemy,
    "sql_mysql": _sql_on_mysql(),
    "sql_mysql_found_rows": _sql_on_mysql(CLIENT.FOUND_ROWS),
}
PLACES = LOCAL | SERVERS
SHARED_BY_PROCESSES = ("file", "sqlite", *(name for name in SERVERS if "sql_" not in name))


@pytest.fixture(
    params=[*LOCAL, *(pytest.param(name, marks=pytest.mark.server) for name in SERVERS)]
)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await PLACES[request.param](request, stack)


@pytest.fixture
async def open_store(place: Place) -> AsyncIterator[Open]:
    """Opens stores on one database, and closes them after the test."""
    async with AsyncExitStack() as stack:

        def open(**options: Any) -> Any:
            store = place.open(**options)
            stack.push_async_callback(store.close)
            return store

        yield open


@pytest.fixture
def store(open_store: Open) -> Any:
    return open_store()


@pytest.fixture
def documents(store: Any) -> Documents:
    documents: Documents = store.documents
    return documents


HOSTILE = (
    "a'b\"c`d",
    "path/../../etc/passwd",
    "🦊 ключ",
    "100%_done",
    "a*b[c]?d",
    "back\\slash\\",
    "trailing space ",
    " ",
    "{tag}:x:y",
    "line\nbreak\ttab",
    "A",
    "a",
    "ß",
    "$table ? $1 :p1 %s",
    "\U0010ffff",
    "\ud7ff\ue000",
    "x" * 512,
    "🦊" * 512,
)


class TestVerbs:
    def test_documents_are_a_key_value_store_with_all_abilities(self, documents: Documents) -> None:
        assert isinstance(documents, Documents)

    async def test_a_value_is_stored_until_it_is_deleted(self, documents: Documents) -> None:
        assert await documents.get("view:a") is None
        assert not await documents.exists("view:a")
        assert not await documents.delete("view:a")
        await documents.set("view:a", "1")
        await documents.set("view:a", "2")
        assert await documents.get("view:a") == "2"
        assert await documents.exists("view:a")
        assert await documents.delete("view:a")
        assert not await documents.exists("view:a")
        assert not await documents.delete("view:a")

    async def test_get_many_answers_in_the_order_of_the_keys(self, documents: Documents) -> None:
        keys = [f"n:{n}" for n in range(120)]
        for key in keys[::2]:
            await documents.set(key, f"value of {key}")
        values = await documents.get_many([*reversed(keys), keys[0]])
        expected = [None if n % 2 else f"value of n:{n}" for n in reversed(range(120))]
        assert list(values) == [*expected, "value of n:0"]
        assert list(await documents.get_many([])) == []

    async def test_keys_are_found_by_pattern_in_order(self, documents: Documents) -> None:
        names = ["worker:b", "worker:a", "worker", "worker;c", "view:a", "Worker:d", "a*:b"]
        for name in names:
            await documents.set(name, "x")
        assert await documents.keys() == sorted(names)
        assert await documents.keys("worker:*") == ["worker:a", "worker:b"]
        assert await documents.keys("worker*") == ["worker", "worker:a", "worker:b", "worker;c"]
        assert await documents.keys("*:a") == ["view:a", "worker:a"]
        assert await documents.keys("w*r:*a") == ["worker:a"]
        assert await documents.keys("worker") == ["worker"]
        assert await documents.keys("a*:b") == ["a*:b"]
        assert await documents.keys("nothing:*") == []

    async def test_replace_compares_before_it_writes(self, documents: Documents) -> None:
        assert await documents.replace("a", None, None)
        assert not await documents.replace("a", "1", "2")
        assert await documents.replace("a", None, "1")
        assert not await documents.replace("a", None, "2")
        assert not await documents.replace("a", None, None)
        assert not await documents.replace("a", "1 ", "2")
        assert await documents.replace("a", "1", "1")
        assert await documents.replace("a", "1", "2")
        assert await documents.get("a") == "2"
        assert not await documents.replace("a", "1", None)
        assert await documents.replace("a", "2", None)
        assert not await documents.exists("a")
        assert await documents.keys() == []


class TestTimeToLive:
    async def test_an_expired_key_is_missing_for_every_verb(self, documents: Documents) -> None:
        for key in ("get", "delete", "replace", "remove", "add"):
            await documents.set(key, "1", ttl=BLINK)
        await documents.set("at once", "1", ttl=0)
        await documents.set("later", "1", ttl="1h")
        await asyncio.sleep(PAUSE)
        assert await documents.keys() == ["later"]
        assert list(await documents.get_many(["get", "at once", "later"])) == [None, None, "1"]
        assert not await documents.exists("get")
        assert not await documents.delete("delete")
        assert not await documents.replace("replace", "1", "2")
        assert not await documents.replace("remove", "1", None)
        assert await documents.replace("add", None, "2")
        assert await documents.keys() == ["add", "later"]

    async def test_a_write_replaces_the_time_to_live(self, documents: Documents) -> None:
        for key in ("kept", "extended"):
            await documents.set(key, "1", ttl=BLINK)
        await documents.set("kept", "2")
        await documents.set("extended", "2", ttl="1h")
        await documents.set("shortened", "1")
        await documents.set("shortened", "2", ttl=BLINK)
        # Long enough for one more round trip, however slow the machine is.
        await documents.set("replaced", "1", ttl="2s")
        assert await documents.replace("replaced", "1", "2")
        await asyncio.sleep(2.1)
        assert await documents.keys() == ["extended", "kept", "replaced"]

    async def test_a_key_set_again_after_it_expired_exists(self, documents: Documents) -> None:
        await documents.set("worker:a", "1", ttl=BLINK)
        await asyncio.sleep(PAUSE)
        await documents.set("worker:a", "2", ttl="1h")
        assert await documents.keys("worker:*") == ["worker:a"]
        assert await documents.get("worker:a") == "2"


class TestHostileInput:
    async def test_any_key_and_value_are_stored_unchanged(self, documents: Documents) -> None:
        for key in HOSTILE:
            await documents.set(key, f"value of {key}")
        values = await documents.get_many(HOSTILE)
        assert list(values) == [f"value of {key}" for key in HOSTILE]
        assert await documents.keys() == sorted(HOSTILE)
        for key in HOSTILE:
            keys = await documents.keys(f"{key.partition('*')[0]}*")
            assert key in keys
            assert all(each.startswith(key.partition("*")[0]) for each in keys)
        for key in HOSTILE:
            assert await documents.replace(key, f"value of {key}", key * 2)
            assert await documents.get(key) == key * 2
            assert await documents.delete(key)
        assert await documents.keys() == []

    async def test_other_keys_are_refused(self, documents: Documents) -> None:
        keys: list[Any] = ["", "a\0b", "x" * 513, "\ud800", 5]
        for key in keys:
            with pytest.raises(InvalidArgument, match=r"^key: "):
                await documents.set(key, "1")
            with pytest.raises(InvalidArgument, match=r"^key: "):
                await documents.get_many(["a", key])
            with pytest.raises(InvalidArgument, match=r"^key: "):
                await documents.replace(key, None, "1")

    async def test_other_values_are_refused(self, documents: Documents) -> None:
        values: list[Any] = ["a\0b", "\ud800", 5, None]
        for value in values:
            with pytest.raises(InvalidArgument, match=r"^value: "):
                await documents.set("a", value)

    async def test_a_value_may_be_as_large_as_a_snapshot(self, open_store: Open) -> None:
        documents = open_store(max_value_size=4_000_000).documents
        values = [letter * 4_000_000 for letter in "ab"]
        await documents.set("a", values[0])
        assert await documents.replace("a", *values)
        assert await documents.get("a") == values[1]
        with pytest.raises(ValueTooLarge, match="document 'a'"):
            await documents.set("a", "é" * 2_000_001)
        with pytest.raises(ValueTooLarge, match="document 'a'"):
            await documents.replace("a", values[1], values[1] + "x")

    async def test_a_key_too_long_with_its_prefix_is_refused(self, open_store: Open) -> None:
        documents = open_store(prefix="🦊" * 300).documents
        with pytest.raises(InvalidArgument, match="2,500 bytes"):
            await documents.set("🦊" * 400, "1")
        await documents.set("x" * 512, "1")
        assert await documents.keys("x*") == ["x" * 512]


class TestWithStores:
    async def test_stores_with_other_prefixes_do_not_see_them(self, open_store: Open) -> None:
        """Not even if one prefix begins with the other."""
        stores = {prefix: open_store(prefix=prefix) for prefix in ("", "a", "a:", "a*", "a:b")}
        for prefix, store in stores.items():
            await store.documents.set("b:c", f"of {prefix}")
        for prefix, store in stores.items():
            assert await store.documents.keys() == ["b:c"]
            assert await store.documents.get("b:c") == f"of {prefix}"
        assert await stores[""].documents.delete("b:c")
        assert await stores["a"].documents.exists("b:c")

    async def test_a_second_store_sees_them(self, open_store: Open) -> None:
        await open_store(prefix="a").documents.set("view:a", "1")
        assert await open_store(prefix="a").documents.get("view:a") == "1"

    async def test_runs_and_documents_are_separate(self, store: Any) -> None:
        await store.documents.set("run", "1")
        assert list(await store.list()) == []
        assert await store.load("run") is None
        await store.save("other", snapshot(status="completed"))
        assert [run.id for run in await store.list()] == ["other"]
        assert dict((await store.stats()).by_status) == {"completed": 1}
        await asyncio.sleep(0.01)
        assert await store.prune(timedelta(0)) == 1
        assert await store.documents.keys() == ["run"]
        assert not await store.delete("run")
        assert await store.documents.get("run") == "1"

    async def test_a_closed_store_refuses_its_documents(self, open_store: Open) -> None:
        store = open_store()
        documents = store.documents
        await documents.set("a", "1")
        await store.close()
        for call in (
            documents.get("a"),
            documents.set("a", "2"),
            documents.delete("a"),
            documents.exists("a"),
            documents.keys(),
            documents.replace("a", "1", "2"),
            store.documents.get("a"),
        ):
            with pytest.raises(StoreClosed):
                await call

    async def test_stores_that_race_lose_no_increment(self, open_store: Open) -> None:
        stores = [open_store() for _ in range(3)]
        await asyncio.gather(*(increment(store.documents, 10) for store in stores))
        assert await stores[0].documents.get(COUNTER) == "30"

    async def test_stores_that_first_use_them_together_set_them_up(self, open_store: Open) -> None:
        stores = [open_store() for _ in range(4)]
        sets = (store.documents.set(f"{n}", "1") for n, store in enumerate(stores) for _ in "ab")
        await asyncio.gather(*sets)
        assert await stores[0].documents.keys() == ["0", "1", "2", "3"]


@pytest.mark.parametrize("place", SHARED_BY_PROCESSES, indirect=True)
async def test_processes_that_race_lose_no_increment(place: Place) -> None:
    counting = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.stores.counting", place.url, place.options, "20")
        )
        for _ in range(2)
    ]
    assert [await process.wait() for process in counting] == [0, 0]
    async with place.open() as store:
        assert await store.documents.get(COUNTER) == "40"


def test_a_store_of_snapshots_only_has_no_documents() -> None:
    assert not hasattr(SnapshotOnlyStore(MemoryStore()), "documents")
