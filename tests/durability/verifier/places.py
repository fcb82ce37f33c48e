"""Where programs run: the stores by name, their servers, and the table of transactions' effects."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psycopg
import pymongo

from tests.durability.verifier.interpreter import Insert
from tests.servers import mongo, mysql, postgres, redis, sqld
from tests.servers.process import LocalServer, Server

TABLE = "verified_effects"
_INSERT = f"INSERT INTO {TABLE} VALUES "


class Place(msgspec.Struct, frozen=True):
    """A store: its name, the URL of its server or files, and options of the store."""

    store: str
    url: str
    options: dict[str, Any] = {}

    @property
    def lease(self) -> float:
        """How long a lease lasts, in seconds."""
        # sqld keeps the write lock of a killed client's transaction for five seconds.
        return 6.0 if self.store == "libsql" else 1.0

    @property
    def on_a_server(self) -> bool:
        """Whether there are connections that can be cut."""
        return self.store not in ("sqlite", "files")

    def store_url(self, url: str = "") -> str:
        """Return the URL to open the store by; `url` leads to its server in another way."""
        url = url or self.url
        if self.store == "libsql":
            return f"libsql+{url}"
        if self.store == "redis_cluster":
            return url.replace("redis://", "redis+cluster://", 1)
        if self.store == "mongo" and url != self.url:
            # Without this the client would bypass the proxy.
            return urlsplit(url)._replace(query="directConnection=true").geturl()
        return url


async def _insert_in_postgres(connection: Any, *row: str) -> None:
    await connection.execute(_INSERT + "($1, $2, $3)", *row)


async def _insert_in_mysql(connection: Any, *row: str) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute(_INSERT + "(%s, %s, %s)", row)


async def _insert_in_sqlite(transaction: Any, *row: str) -> None:
    await transaction.execute(_INSERT + "(?, ?, ?)", row)


async def _insert_in_mongo(transaction: Any, *row: str) -> None:
    document = dict(zip(("run", "path", "token"), row, strict=True))
    await transaction.database[TABLE].insert_one(document, session=transaction.session)


INSERTS: dict[str, Insert] = {
    "postgres": _insert_in_postgres,
    "mysql": _insert_in_mysql,
    "sqlite": _insert_in_sqlite,
    "libsql": _insert_in_sqlite,
    "mongo": _insert_in_mongo,
}


def create_table(place: Place) -> None:
    """Create the table of effects."""
    if place.store == "mongo":
        with pymongo.MongoClient[dict[str, Any]](place.url) as client:
            database = client.get_default_database()
            if TABLE not in database.list_collection_names():
                database.create_collection(TABLE)
            # By default it keeps the transaction of a killed client for a minute.
            client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=3)
    elif place.store in _QUERIES:
        columns = "run VARCHAR(99), path VARCHAR(99), token VARCHAR(99)"
        _QUERIES[place.store](place.url, f"CREATE TABLE IF NOT EXISTS {TABLE} ({columns})")


def rows(place: Place) -> list[tuple[str, str, str]] | None:
    """Return the committed effects: run, path and token; None without transactions."""
    if place.store == "mongo":
        with pymongo.MongoClient[dict[str, Any]](place.url) as client:
            documents = client.get_default_database()[TABLE].find()
            return [(row["run"], row["path"], row["token"]) for row in documents]
    if place.store not in _QUERIES:
        return None
    effects = _QUERIES[place.store](place.url, f"SELECT run, path, token FROM {TABLE}")
    return [(run, path, token) for run, path, token in effects]


def _query_postgres(url: str, statement: str) -> Sequence[Sequence[Any]]:
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(statement.encode())
        return cursor.fetchall() if cursor.description else ()


def _query_sqlite(url: str, statement: str) -> Sequence[Sequence[Any]]:
    path = url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        return connection.execute(statement).fetchall()


_QUERIES: dict[str, Callable[[str, str], Sequence[Sequence[Any]]]] = {
    "postgres": _query_postgres,
    "mysql": mysql.query,
    "sqlite": _query_sqlite,
    "libsql": sqld.query,
}


@cache
def _server(kind: Callable[[], LocalServer]) -> Server:
    return kind().start()


@cache
def _cluster() -> redis.RedisCluster:
    return redis.RedisCluster().start()


@contextmanager
def _sqlite() -> Iterator[Place]:
    with TemporaryDirectory() as folder:
        yield Place("sqlite", f"sqlite:///{folder}/runs.db")


@contextmanager
def _files() -> Iterator[Place]:
    with TemporaryDirectory() as folder:
        yield Place("files", f"file://{folder}/runs")


@contextmanager
def _postgres() -> Iterator[Place]:
    with postgres.fresh_database(_server(postgres.PostgresServer)) as url:
        yield Place("postgres", url)


@contextmanager
def _mysql() -> Iterator[Place]:
    with mysql.fresh_database(_server(mysql.MysqlServer)) as url:
        yield Place("mysql", url)


@contextmanager
def _mongo() -> Iterator[Place]:
    with mongo.fresh_database(_server(mongo.MongoServer)) as url:
        yield Place("mongo", url, {"replica_set": True})


@contextmanager
def _mongo_standalone() -> Iterator[Place]:
    with mongo.fresh_database(_server(mongo.MongoStandalone)) as url:
        yield Place("mongo_standalone", url)


@contextmanager
def _redis() -> Iterator[Place]:
    server = _server(redis.RedisServer)
    with redis.fresh_prefix(server) as prefix:
        yield Place("redis", server.url, {"namespace": prefix})


@contextmanager
def _redis_cluster() -> Iterator[Place]:
    server = _cluster()
    with redis.fresh_prefix(server) as prefix:
        yield Place("redis_cluster", server.url, {"namespace": prefix})


@contextmanager
def _libsql() -> Iterator[Place]:
    with sqld.empty_database(_server(sqld.SqldServer)) as url:
        yield Place("libsql", url)


PLACES: dict[str, Callable[[], AbstractContextManager[Place]]] = {
    "sqlite": _sqlite,
    "files": _files,
    "postgres": _postgres,
    "mysql": _mysql,
    "mongo": _mongo,
    "mongo_standalone": _mongo_standalone,
    "redis": _redis,
    "redis_cluster": _redis_cluster,
    "libsql": _libsql,
}
