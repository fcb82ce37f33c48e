"""The tables of documents: created when needed, read by their index, swept of what has expired."""

import asyncio
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
from pymongo import MongoClient
from redis import Redis

from perdure.store import NewRun
from perdure.stores import FileStore, SqlStore, mongo, mysql, postgres, redis, sqlite
from perdure.stores.mongo.updates import has_prefix
from perdure.stores.mysql import keyvalue as mysql_table
from perdure.stores.postgres import keyvalue as postgres_table
from perdure.stores.sqlite import keyvalue as sqlite_table
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers import mongo as mongo_servers
from tests.servers import mysql as mysql_kit
from tests.stores.sql.clients import AiosqliteClient

BLINK = timedelta(milliseconds=50)
PAUSE = 0.15
SELECTED = ("0:worker:", "0:worker;")


async def fill(store: Any) -> None:
    """Store documents of two kinds, most of which have a time to live."""
    sets = (store.documents.set(f"act:{n}", "x", ttl="1h") for n in range(200))
    await asyncio.gather(*sets, store.documents.set("worker:a", "1", ttl="1h"))


async def run_a_workflow(store: Any) -> None:
    await store.enqueue([NewRun("run", "w", as_json(snapshot()))])
    assert len(await store.claim("ana", timedelta(hours=1), 10)) == 1


async def expire(store: Any) -> None:
    for n in range(20):
        await store.documents.set(f"worker:{n}", "x", ttl=BLINK)
    await asyncio.sleep(PAUSE)


class TestCreation:
    """A store whose documents are not used has no table for them."""

    async def test_postgres(self, postgres_url: str) -> None:
        async with postgres(postgres_url, table="runs") as store:
            await run_a_workflow(store)
            assert not any("documents" in name for name in postgres_tables(postgres_url))
            await store.documents.set("a", "1")
        assert {"runs_documents", "runs_documents_migrations"} <= postgres_tables(postgres_url)

    async def test_the_longest_name_of_a_table_leaves_room(
        self, postgres_url: str, mysql_url: str
    ) -> None:
        for open, url, length in ((postgres, postgres_url, 38), (mysql, mysql_url, 43)):
            async with open(url, table="t" * length) as store:
                await store.documents.set("a", "1")
                assert await store.documents.keys() == ["a"]
        assert max(map(len, postgres_tables(postgres_url))) <= 63

    async def test_mysql(self, mysql_url: str) -> None:
        async with mysql(mysql_url) as store:
            await run_a_workflow(store)
            assert not mysql_kit.query(mysql_url, "SHOW TABLES LIKE '%%documents%%'")
            await store.documents.set("a", "1")
        assert len(mysql_kit.query(mysql_url, "SHOW TABLES LIKE '%%documents%%'")) == 2

    async def test_sqlite(self, tmp_path: Path) -> None:
        async with sqlite(tmp_path / "runs.db") as store:
            await run_a_workflow(store)
            assert not sqlite_tables(tmp_path / "runs.db")
            await store.documents.set("a", "1")
        assert sqlite_tables(tmp_path / "runs.db")

    async def test_mongo(self, mongo_url: str) -> None:
        async with mongo(mongo_url) as store:
            await run_a_workflow(store)
            with MongoClient[Any](mongo_url, appname=mongo_servers.ADMIN) as client:
                database = client.get_default_database()
                assert "perdure_runs_documents" not in database.list_collection_names()
                await store.documents.set("a", "1")
                assert "perdure_runs_documents" in database.list_collection_names()

    async def test_files(self, tmp_path: Path) -> None:
        async with FileStore(tmp_path) as store:
            await run_a_workflow(store)
            assert not (tmp_path / "documents").exists()


def postgres_tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        query = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        return {name for (name,) in connection.execute(query)}


def sqlite_tables(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        query = "SELECT name FROM sqlite_master WHERE name LIKE '%documents%'"
        return [name for (name,) in connection.execute(query)]


class TestKeys:
    """Keys with a literal prefix are found in an index, without reading others."""

    async def test_postgres(self, postgres_url: str) -> None:
        async with postgres(postgres_url, table="runs") as store:
            await fill(store)
        statement = postgres_table.KEYS.format(
            table="runs_documents", end=postgres_table.BEFORE_END
        )
        statement = statement.replace("$1", "%s").replace("$2", "%s")
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SET enable_seqscan = off")
            plan = [line for (line,) in connection.execute(f"EXPLAIN {statement}", SELECTED)]
        assert any("Index Cond" in line and ">=" in line and "<" in line for line in plan), plan

    async def test_mysql(self, mysql_url: str) -> None:
        async with mysql(mysql_url, table="runs") as store:
            await fill(store)
        condition = f"id >= %s AND id < %s AND {mysql_table.IS_LIVE}"
        statement = mysql_table.KEYS.format(table="runs_documents") % condition
        bounds = [bound.encode() for bound in SELECTED]
        [(_, _, _, access, _, index, *_)] = mysql_kit.query(
            mysql_url, f"EXPLAIN {statement}", *bounds
        )
        assert (access, index) == ("range", "PRIMARY")

    async def test_sqlite(self, tmp_path: Path) -> None:
        async with sqlite(tmp_path / "runs.db") as store:
            await fill(store)
        statement = sqlite_table._KEYS + sqlite_table._BEFORE_END
        statement = statement.replace("$table", "perdure_runs_documents").replace("$now", ":now")
        values = {"prefix": SELECTED[0], "end": SELECTED[1], "now": 0}
        with sqlite3.connect(tmp_path / "runs.db") as connection:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
        assert any("(key>? AND key<?)" in line for line in plan), plan

    async def test_mongo(self, mongo_url: str) -> None:
        async with mongo(mongo_url) as store:
            await fill(store)
        with MongoClient[Any](mongo_url, appname=mongo_servers.ADMIN) as client:
            collection = client.get_default_database()["perdure_runs_documents"]
            statistics = collection.find(has_prefix(SELECTED[0])).explain()["executionStats"]
        assert statistics["totalKeysExamined"] <= 2

    async def test_files_of_other_kinds_are_not_read(self, tmp_path: Path) -> None:
        async with FileStore(tmp_path) as store:
            for key in ("act:1", "worker:a"):
                await store.documents.set(key, "1")
            [damaged] = (tmp_path / "documents").glob("*/*act*.json")
            damaged.write_text("{")
            assert await store.documents.keys("worker:*") == ["worker:a"]


class TestSweep:
    """What has expired is removed by later calls."""

    async def test_mysql(self, mysql_url: str) -> None:
        async with mysql(mysql_url) as store:
            await expire(store)
        async with mysql(mysql_url) as another:
            await another.documents.set("worker:0", "again")
        rows = mysql_kit.query(mysql_url, "SELECT id FROM perdure_runs_documents")
        assert rows == ((b"0:worker:0",),)

    async def test_generic_sql(self, tmp_path: Path) -> None:
        path = tmp_path / "runs.db"
        async with aiosqlite.connect(path, isolation_level=None) as connection:
            client = AiosqliteClient(connection)
            await expire(SqlStore(client, dialect="sqlite"))
            await SqlStore(client, dialect="sqlite").documents.set("worker:0", "again")
            rows, _ = await client.query("SELECT id FROM workflow_runs_documents", ())
        assert [id for (id,) in rows] == ["0:worker:0"]

    async def test_sqlite(self, tmp_path: Path) -> None:
        async with sqlite(tmp_path / "runs.db") as store:
            await expire(store)
            await store.documents.set("worker:0", "again")
        with sqlite3.connect(tmp_path / "runs.db") as connection:
            rows = connection.execute("SELECT key FROM perdure_runs_documents").fetchall()
        assert rows == [("0:worker:0",)]

    async def test_files(self, tmp_path: Path) -> None:
        async with FileStore(tmp_path) as store:
            await expire(store)
            assert await store.documents.keys("worker:*") == []
        assert not [*(tmp_path / "documents").glob("*/*")]

    async def test_redis(self, redis_url: str, redis_prefix: str) -> None:
        """The server deletes the documents, and the store what finds them."""
        async with redis(redis_url, namespace=redis_prefix) as store:
            await expire(store)
            for n in range(50):
                await store.documents.set(f"{n}", "x")
                await store.documents.delete(f"{n}")
        with Redis.from_url(redis_url) as client:
            assert [*client.scan_iter(f"{redis_prefix}*document*")] == []

    async def test_redis_forgets_what_it_finds_expired(
        self, redis_url: str, redis_prefix: str
    ) -> None:
        async with redis(redis_url, namespace=redis_prefix) as store:
            await expire(store)
            assert await store.documents.keys() == []
        with Redis.from_url(redis_url) as client:
            assert [*client.scan_iter(f"{redis_prefix}*:documents")] == []


class TestDamagedFiles:
    async def test_a_damaged_document_harms_no_other(self, tmp_path: Path) -> None:
        """It is left out, and can be deleted or set again."""
        async with FileStore(tmp_path) as store:
            for key in ("a", "b", "c"):
                await store.documents.set(key, "1")
            for name in ("a", "b"):
                [path] = (tmp_path / "documents").glob(f"*/*{name}-*.json")
                path.write_text("{")
            assert await store.documents.keys() == ["c"]
            await store.documents.set("a", "2")
            assert await store.documents.delete("b")
            assert await store.documents.keys() == ["a", "c"]
