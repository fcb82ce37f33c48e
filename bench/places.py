"""The measured stores, each with a server that is started for it and its raw driver."""

import platform
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import raw
from perdure.store import Store
from perdure.stores import open_store
from tests.servers import mongo, mysql, postgres, redis, sqld
from tests.servers.process import LocalServer


@dataclass(frozen=True)
class Place:
    """One measured store.

    `peer_url` is the URL with which another library uses the same kind of store; empty if none
    does. Without a raw driver, only wake-ups are measured.
    """

    name: str
    url: str
    version: str
    settings: str
    open_raw: Callable[[], Awaitable[raw.Raw]] | None = None
    peer_url: str = ""

    def open(self) -> Store:
        return open_store(self.url)


@contextmanager
def place(name: str) -> Iterator[Place]:
    """Start what the store needs, and stop it in the end."""
    with ExitStack() as stack:
        yield STARTERS[name](stack)


def _started(stack: ExitStack, server: LocalServer) -> LocalServer:
    server.start()
    stack.callback(server.close)
    return server


def _sqlite(stack: ExitStack) -> Place:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    async def open_raw() -> raw.Raw:
        return raw.RawSqlite(folder / "raw.db")

    version = f"SQLite {sqlite3.sqlite_version}, Python {platform.python_version()}"
    url, peer_url = f"sqlite:///{folder}/bench.db", f"sqlite:///{folder}/{{peer}}.db"
    return Place("sqlite", url, version, "WAL, synchronous=FULL", open_raw, peer_url)


def _postgres(stack: ExitStack) -> Place:
    server = _started(stack, postgres.PostgresServer())
    url = stack.enter_context(postgres.fresh_database(server))
    settings = "fsync=on, synchronous_commit=on; asyncpg"
    return Place(
        "postgres", url, server.version, settings, lambda: raw.RawPostgres.open(url), peer_url=url
    )


def _mysql(stack: ExitStack) -> Place:
    server = _started(stack, mysql.MysqlServer())
    url = stack.enter_context(mysql.fresh_database(server))
    settings = "innodb_flush_log_at_trx_commit=1; asyncmy"
    return Place("mysql", url, server.version, settings, lambda: raw.RawMysql.open(url))


def _mongo(stack: ExitStack) -> Place:
    server = _started(stack, mongo.MongoServer())
    url = stack.enter_context(mongo.fresh_database(server))
    settings = "w=majority, j=true; PyMongo async"
    return Place("mongo", url, server.version, settings, lambda: raw.RawMongo.open(url))


def _redis(stack: ExitStack) -> Place:
    server = _started(stack, redis.RedisServer())
    url = server.url
    settings = "appendfsync=always; redis-py asyncio"
    return Place("redis", url, server.version, settings, lambda: raw.RawRedis.open(url))


def _libsql(stack: ExitStack) -> Place:
    server = _started(stack, sqld.SqldServer())
    url = server.url
    settings = "as sqld is set; HTTP"
    return Place(
        "libsql", f"libsql+{url}", server.version, settings, lambda: raw.RawLibsql.open(url)
    )


def _file(stack: ExitStack) -> Place:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return Place("file", f"file://{folder}/runs", "the file system", "fsync")


def _standalone(stack: ExitStack) -> Place:
    server = _started(stack, mongo.MongoStandalone())
    url = stack.enter_context(mongo.fresh_database(server))
    return Place("standalone", url, server.version, "j=true; PyMongo async")


STARTERS: dict[str, Callable[[ExitStack], Place]] = {
    "sqlite": _sqlite,
    "postgres": _postgres,
    "mysql": _mysql,
    "mongo": _mongo,
    "redis": _redis,
    "libsql": _libsql,
    "file": _file,
    "standalone": _standalone,
}
