"""Each server starts, responds to its real driver, and survives `kill -9`."""

import asyncio
from pathlib import Path
from typing import Any

import asyncmy
import asyncpg
import pytest
from pymongo import AsyncMongoClient
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster as ClusterClient

from tests.servers import postgres, sqld
from tests.servers.fixtures import started
from tests.servers.mysql import connect_arguments
from tests.servers.process import NotReady, Server, ServerMissing
from tests.servers.redis import RedisCluster

PG_SCHEMAS = "SELECT nspname, nspowner, nspacl FROM pg_namespace ORDER BY nspname"


def mongo_client(url: str) -> AsyncMongoClient[dict[str, Any]]:
    return AsyncMongoClient(url)


async def kill_and_restart(server: Server) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)


@pytest.mark.parametrize("name", ["postgres", "newest_postgres"])
async def test_postgres_keeps_what_was_committed_through_kill_9(
    name: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{name}_server")
    postgres_url = request.getfixturevalue(f"{name}_url")
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    await connection.close()
    await kill_and_restart(server)
    connection = await asyncpg.connect(postgres_url)
    assert await connection.fetchval("SELECT n FROM kept") == 42
    assert await connection.fetchval("SHOW fsync") == "on"
    await connection.close()


def test_the_newest_postgres_is_one_of_the_latest_releases(newest_postgres_server: Server) -> None:
    assert float(newest_postgres_server.version.split()[1]) >= 18


def test_a_missing_npm_package_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_NODE_CACHE", str(tmp_path))
    with pytest.raises(ServerMissing, match=r"embedded-postgres.* run: make servers"):
        postgres.NewestPostgresServer().start()


async def test_pgbouncer_shares_connections_between_transactions(pgbouncer_url: str) -> None:
    clients = [await asyncpg.connect(pgbouncer_url, statement_cache_size=0) for _ in range(20)]
    backends = {await client.fetchval("SELECT pg_backend_pid()") for client in clients}
    assert len(backends) < len(clients)
    for client in clients:
        await client.close()


async def test_mysql_keeps_what_was_committed_through_kill_9(
    mysql_server: Server, mysql_url: str
) -> None:
    async def query(statement: str) -> object:
        arguments = connect_arguments(mysql_url)
        async with (
            asyncmy.connect(**arguments, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            await cursor.execute(statement)
            return await cursor.fetchone()

    await query("CREATE TABLE kept AS SELECT 42 AS n")
    await kill_and_restart(mysql_server)
    assert await query("SELECT n, @@innodb_flush_log_at_trx_commit FROM kept") == (42, 1)


async def test_redis_keeps_what_was_written_through_kill_9(
    redis_server: Server, redis_url: str, redis_prefix: str
) -> None:
    async with Redis.from_url(redis_url) as client:
        await client.set(f"{redis_prefix}kept", 42)
    await kill_and_restart(redis_server)
    async with Redis.from_url(redis_url) as client:
        assert await client.get(f"{redis_prefix}kept") == b"42"


async def test_redis_cluster_spreads_keys_and_survives_kill_9(
    redis_cluster: RedisCluster, redis_cluster_url: str, redis_cluster_prefix: str
) -> None:
    keys = [f"{redis_cluster_prefix}{n}" for n in range(30)]
    async with ClusterClient.from_url(redis_cluster_url) as client:
        for key in keys:
            await client.set(key, key)
        assert len({client.get_node_from_key(key) for key in keys}) == 3
    await kill_and_restart(redis_cluster)
    async with ClusterClient.from_url(redis_cluster_url) as client:
        assert [await client.get(key) for key in keys] == [key.encode() for key in keys]


async def test_mongo_has_transactions_and_survives_kill_9(
    mongo_server: Server, mongo_url: str
) -> None:
    async with mongo_client(mongo_url) as client:
        kept = client.get_default_database().kept
        async with client.start_session() as session, await session.start_transaction():
            await kept.insert_one({"_id": "a", "n": 42}, session=session)
    await kill_and_restart(mongo_server)
    async with mongo_client(mongo_url) as client:
        assert await client.get_default_database().kept.find_one() == {"_id": "a", "n": 42}


async def test_mongo_standalone_responds(mongo_standalone_url: str) -> None:
    async with mongo_client(mongo_standalone_url) as client:
        assert "setName" not in await client.admin.command("hello")


async def test_sqld_keeps_what_was_committed_through_kill_9(
    sqld_server: Server, sqld_url: str
) -> None:
    sqld.query(sqld_url, "CREATE TABLE kept AS SELECT 42 AS n")
    await kill_and_restart(sqld_server)
    assert sqld.query(sqld_url, "SELECT n FROM kept") == [["42"]]


async def test_a_server_that_a_test_killed_is_restarted_for_the_next(redis_server: Server) -> None:
    redis_server.kill()
    redis_server.ensure()
    async with Redis.from_url(redis_server.url) as client:
        assert await client.ping()


def test_a_connection_that_was_left_open_is_reported(postgres_server: Server) -> None:
    async def leave_open(url: str) -> asyncpg.Connection:
        return await asyncpg.connect(url)

    runner = asyncio.Runner()
    with (
        pytest.raises(NotReady, match="left connections"),
        postgres.fresh_database(postgres_server) as url,
    ):
        connection = runner.run(leave_open(url))
    connection.terminate()
    runner.close()


@pytest.mark.parametrize(
    ("variable", "outcome"), [("CI", pytest.fail.Exception), ("HOME", pytest.skip.Exception)]
)
def test_a_missing_server_fails_in_ci_and_skips_elsewhere(
    variable: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PERDURE_TEST_REQUIRE_SERVERS", raising=False)
    monkeypatch.setenv(variable, "1")

    def start() -> Server:
        raise ServerMissing("no such server")

    with pytest.raises(outcome, match="no such server"):
        started(start)


async def test_a_postgres_database_is_empty_when_it_is_used_again(
    debian_postgres_server: Server,
) -> None:
    with postgres.fresh_database(debian_postgres_server) as url:
        connection = await asyncpg.connect(url)
        before = await connection.fetch(PG_SCHEMAS)
        await connection.execute("CREATE TABLE kept (id int); CREATE SCHEMA billing")
        await connection.execute("CREATE EXTENSION hstore SCHEMA billing")
        await connection.close()
    with postgres.fresh_database(debian_postgres_server) as again:
        connection = await asyncpg.connect(again)
        assert await connection.fetch(PG_SCHEMAS) == before
        assert await connection.fetch("SELECT FROM pg_tables WHERE tablename = 'kept'") == []
        assert await connection.fetch("SELECT FROM pg_extension WHERE extname = 'hstore'") == []
        await connection.close()
    assert again == url or not debian_postgres_server.ours


async def test_a_postgres_database_with_other_settings_is_not_used_again(
    debian_postgres_server: Server,
) -> None:
    with postgres.fresh_database(debian_postgres_server) as url:
        connection = await asyncpg.connect(url)
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET work_mem = "1MB"')
        await connection.close()
    with postgres.fresh_database(debian_postgres_server) as again:
        assert again != url
