"""Servers as fixtures: started on first use, shared by the session, with one database per test.

Variables such as `PERDURE_TEST_POSTGRES_URL` name a server that already runs. If a server is
missing, its tests are skipped on a developer's machine, and fail in CI and under `make test`.
"""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.servers import mongo, mysql, postgres, redis, sqld
from tests.servers.external import ExternalServer
from tests.servers.pgbouncer import PgBouncer
from tests.servers.process import Server, ServerMissing

T = TypeVar("T")

_versions: list[str] = []


def _serve(
    variable: str, start: Callable[[], Server], version_at: Callable[[str], str]
) -> Iterator[Server]:
    server = _external(variable, version_at) or started(start)
    _versions.append(server.version)
    yield server
    server.close()


def _external(variable: str, version_at: Callable[[str], str]) -> Server | None:
    url = os.environ.get(variable)
    return ExternalServer(variable, url, f"{version_at(url)} (external)") if url else None


def started(start: Callable[[], T]) -> T:
    """Return the server or program of `start`; end the test if it is not available."""
    try:
        return start()
    except ServerMissing as error:
        if os.environ.get("CI") or os.environ.get("PERDURE_TEST_REQUIRE_SERVERS"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def debian_postgres_server() -> Iterator[Server]:
    """Debian's PostgreSQL."""
    yield from _serve(
        "PERDURE_TEST_POSTGRES_URL",
        lambda: postgres.PostgresServer().start(),
        postgres.postgres_version,
    )


@pytest.fixture(scope="session")
def newest_postgres_server() -> Iterator[Server]:
    """The newest PostgreSQL."""
    yield from _serve(
        "PERDURE_TEST_NEWEST_POSTGRES_URL",
        lambda: postgres.NewestPostgresServer().start(),
        postgres.postgres_version,
    )


@pytest.fixture(scope="session")
def postgres_server(debian_postgres_server: Server) -> Server:
    """One PostgreSQL. In the tests of the PostgreSQL store: each of them in turn."""
    return debian_postgres_server


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: Server) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode in front of `postgres_server`."""
    server = started(lambda: PgBouncer(postgres_server).start())
    assert isinstance(server, PgBouncer)
    _versions.append(server.version)
    yield server
    server.close()


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[Server]:
    """MariaDB, or the server of `PERDURE_TEST_MYSQL_URL`."""
    yield from _serve(
        "PERDURE_TEST_MYSQL_URL", lambda: mysql.MysqlServer().start(), mysql.mysql_version
    )


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """Redis that calls fsync after every write."""
    yield from _serve(
        "PERDURE_TEST_REDIS_URL", lambda: redis.RedisServer().start(), redis.redis_version
    )


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[redis.RedisCluster]:
    """Redis Cluster: three masters that share the hash slots."""
    server = started(lambda: redis.RedisCluster().start())
    assert isinstance(server, redis.RedisCluster)
    _versions.append(server.version)
    yield server
    server.close()


@pytest.fixture(scope="session")
def mongo_server() -> Iterator[Server]:
    """MongoDB as a replica set of one node, with transactions."""
    yield from _serve(
        "PERDURE_TEST_MONGO_URL", lambda: mongo.MongoServer().start(), mongo.mongo_version
    )


@pytest.fixture(scope="session")
def mongo_standalone() -> Iterator[Server]:
    """MongoDB as a standalone server, without transactions."""
    yield from _serve(
        "PERDURE_TEST_MONGO_STANDALONE_URL",
        lambda: mongo.MongoStandalone().start(),
        mongo.mongo_version,
    )


@pytest.fixture(scope="session")
def sqld_server() -> Iterator[Server]:
    """sqld, the libSQL server."""
    yield from _serve("PERDURE_TEST_SQLD_URL", lambda: sqld.SqldServer().start(), sqld.sqld_version)


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """An empty PostgreSQL database; fails a test that leaves a connection to it open."""
    with postgres.fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def newest_postgres_url(newest_postgres_server: Server) -> Iterator[str]:
    """Like `postgres_url`, on the newest PostgreSQL."""
    with postgres.fresh_database(newest_postgres_server) as url:
        yield url


@pytest.fixture
def pgbouncer_url(postgres_server: Server, pgbouncer_server: PgBouncer) -> Iterator[str]:
    """An empty PostgreSQL database behind PgBouncer."""
    pgbouncer_server.ensure()
    with postgres.fresh_database(postgres_server, pooled=True) as url:
        yield pgbouncer_server.before(url)


@pytest.fixture
def mysql_url(mysql_server: Server) -> Iterator[str]:
    """An empty MariaDB database; fails a test that leaves a connection to it open."""
    with mysql.fresh_database(mysql_server) as url:
        yield url


@pytest.fixture
def redis_prefix(redis_server: Server) -> Iterator[str]:
    """A key prefix for this test; fails a test that leaves other keys or a connection behind."""
    with redis.fresh_prefix(redis_server) as prefix:
        yield prefix


@pytest.fixture
def redis_url(redis_server: Server, redis_prefix: str) -> str:
    """The Redis server; use only keys under `redis_prefix`."""
    return redis_server.url


@pytest.fixture
def redis_cluster_prefix(redis_cluster: redis.RedisCluster) -> Iterator[str]:
    """Like `redis_prefix`, on the cluster."""
    with redis.fresh_prefix(redis_cluster) as prefix:
        yield prefix


@pytest.fixture
def redis_cluster_url(redis_cluster: redis.RedisCluster, redis_cluster_prefix: str) -> str:
    """The first node of the cluster; use only keys under `redis_cluster_prefix`."""
    return redis_cluster.url


@pytest.fixture
def mongo_url(mongo_server: Server) -> Iterator[str]:
    """An empty database on the replica set; fails a test that leaves a connection open."""
    with mongo.fresh_database(mongo_server) as url:
        yield url


@pytest.fixture
def mongo_standalone_url(mongo_standalone: Server) -> Iterator[str]:
    """An empty database on the standalone server; fails a test that leaves a connection open."""
    with mongo.fresh_database(mongo_standalone) as url:
        yield url


@pytest.fixture
def sqld_url(sqld_server: Server) -> Iterator[str]:
    """The HTTP address of sqld with an empty database."""
    with sqld.empty_database(sqld_server) as url:
        yield url


SERVERS = frozenset(
    {
        postgres_server.__name__,
        newest_postgres_server.__name__,
        pgbouncer_server.__name__,
        mysql_server.__name__,
        redis_server.__name__,
        redis_cluster.__name__,
        mongo_server.__name__,
        mongo_standalone.__name__,
        sqld_server.__name__,
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that needs a server, so that `-m "not server"` excludes it."""
    for item in items:
        if isinstance(item, pytest.Function) and SERVERS & set(item.fixturenames):
            item.add_marker(pytest.mark.server)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _versions:
        terminalreporter.write_sep("-", "servers")
        for version in _versions:
            terminalreporter.write_line(version)
