"""The stores on servers, and what each of them does when a reply is lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import psycopg
from pymongo import MongoClient

from perdure.store import Verdict
from perdure.stores import libsql, mongo, mysql, postgres, redis
from tests.servers import mongo as mongo_servers
from tests.servers import mysql as mysql_kit
from tests.servers import sqld
from tests.servers.proxy import TcpProxy

Call = Literal["lease", "new lease", "message", "claim"]

_COUNT_ENTRIES = "SELECT count(*) FROM perdure_runs_journal"


@dataclass(frozen=True)
class Backend:
    """How a store is opened, how its requests are recognized on the wire, and what is expected.

    A test names the run, message or owner that it sends, and the request contains this name.
    `traps` has, by kind of call, what to look for instead: where an earlier request of the same
    call contains the name, or none does. With `trap` the same bytes are used for all calls.
    """

    server: str
    url: str
    open: Callable[..., Any]
    address: str
    unavailable: str
    """The error while the server is unavailable; `{address}` is the host and port."""
    lost: str
    """The error of a call whose reply was lost and which is not repeated."""
    repeats: frozenset[Call]
    """The calls that the store itself repeats after a lost reply, besides appends."""
    creation: Literal["granted", "refused", "error"]
    """The answer to a request for a new run (`existing=False`) whose reply was lost."""
    deletion: Verdict
    """The verdict on a rest with `delete` whose reply was lost."""
    count_entries: Callable[[str], int] | None = None
    trap: bytes | None = None
    traps: dict[str, bytes] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    one_connection: dict[str, Any] = field(default_factory=lambda: {"max_connections": 1})
    query: str = ""
    recovery: float = 0
    """How many seconds the driver needs to notice that a server is available again."""
    hides_restarts: bool = True
    """Whether appends do not fail while the server restarts within `connect_timeout`."""

    def retry_for(self, seconds: float) -> dict[str, Any]:
        """Return the options of a store that retries for this time while it cannot connect."""
        return {"connect_timeout": seconds}

    def trap_for(self, kind: str, name: str) -> bytes:
        """Return what the request of a call with this name contains on the wire."""
        return self.trap or self.traps.get(kind) or name.encode()


class Place:
    """An empty database of one backend, and a proxy in front of it."""

    def __init__(self, backend: Backend, url: str, options: dict[str, Any]) -> None:
        self.backend = backend
        self.url = url
        self.options = {**backend.options, **options}
        self.proxy = TcpProxy.before(url)

    def open(self, **options: Any) -> Any:
        return self.backend.open(self.url, **{**self.options, **options})

    def open_through_proxy(self, **options: Any) -> Any:
        url = self.proxy.url
        if self.backend.query:
            url = urlsplit(url)._replace(query=self.backend.query).geturl()
        return self.backend.open(url, **{**self.options, **options})

    def drop_reply(self, kind: str, name: str) -> None:
        """Drop the reply to the next call of this kind with this name."""
        self.proxy.drop_next_reply(to=self.backend.trap_for(kind, name))


def count_postgres_entries(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(_COUNT_ENTRIES).fetchone()
    assert row is not None
    return int(row[0])


def count_mysql_entries(url: str) -> int:
    return int(mysql_kit.query(url, _COUNT_ENTRIES)[0][0])


def count_libsql_entries(url: str) -> int:
    return int(sqld.query(url, _COUNT_ENTRIES)[0][0])


def count_mongo_entries(url: str) -> int:
    with MongoClient[Any](url, appname=mongo_servers.ADMIN) as client:
        return client.get_default_database()["perdure_runs_journal"].count_documents({})


def _postgres(server: str, url: str, **special: Any) -> Backend:
    return Backend(
        server=server,
        url=url,
        open=postgres,
        address="postgresql://ana:secret@{address}/db",
        unavailable=r"PostgreSQL at {address}/\w+ is unavailable: .* \(tried for 0\.",
        lost=r"PostgreSQL at .* is unavailable: ",
        repeats=frozenset({"lease", "new lease", "message", "claim"}),
        # The request is repeated, and finds the run that it created.
        creation="refused",
        deletion=Verdict.UNKNOWN,
        count_entries=count_postgres_entries,
        **special,
    )


def _mongo(server: str, url: str) -> Backend:
    return Backend(
        server=server,
        url=url,
        open=mongo,
        address="mongodb://ana:secret@{address}/db",
        unavailable=r"MongoDB at {address} is unavailable, tried for 0\.",
        lost=r"MongoDB at .* became unavailable after \d+\.\ds: ",
        repeats=frozenset({"new lease", "message"}),
        creation="granted",
        deletion=Verdict.ACCEPTED,
        count_entries=count_mongo_entries,
        # Most calls look their runs up first.
        traps={
            "entry": b"\x02insert\x00",
            "rest": b"\x02update\x00",
            "deletion": b"\x02delete\x00",
            "lease": b"findAndModify",
            "new lease": b"\x02insert\x00",
            # Only this write makes a message count.
            "message": b"setIntersection",
        },
        one_connection={"client_options": {"maxPoolSize": 1}},
        # The driver must not repeat writes itself, nor bypass the proxy.
        query="directConnection=true&retryWrites=false",
        recovery=0.6,
    )


BACKENDS = {
    "postgres": _postgres("postgres_server", "postgres_url"),
    "newest_postgres": _postgres("newest_postgres_server", "newest_postgres_url"),
    "pgbouncer": _postgres(
        "postgres_server",
        "pgbouncer_url",
        # Without prepared statements a write is a transaction of several requests.
        trap=b"COMMIT",
        options={"prepared_statements": False},
        # PgBouncer itself refuses logins for some time after one has failed.
        hides_restarts=False,
    ),
    "mysql": Backend(
        server="mysql_server",
        url="mysql_url",
        open=mysql,
        address="mysql://ana:secret@{address}/db",
        unavailable=r"MySQL at {address}/\w+ is unavailable: .* \(tried for 0\.",
        lost=r"MySQL at .* is unavailable: ",
        repeats=frozenset({"lease", "new lease", "message"}),
        creation="error",
        deletion=Verdict.UNKNOWN,
        count_entries=count_mysql_entries,
        traps={"deletion": b"DELETE"},
    ),
    "redis": Backend(
        server="redis_server",
        url="redis_url",
        open=redis,
        address="redis://ana:secret@{address}/0",
        unavailable=r"Redis at {address}/0 is unavailable, tried for 0\.",
        lost=r"Redis at .* is unavailable, tried for 0\.",
        repeats=frozenset({"lease", "new lease"}),
        # The request is repeated, and finds the run that it created.
        creation="refused",
        deletion=Verdict.UNKNOWN,
    ),
    "libsql": Backend(
        server="sqld_server",
        url="sqld_url",
        open=libsql,
        address="http://{address}/db",
        unavailable=r"libSQL at http://{address}\S* does not answer: .*\(tried for 0\.",
        lost=r"libSQL at http://.* does not answer: .*it may have received the request",
        repeats=frozenset(),
        creation="error",
        deletion=Verdict.ACCEPTED,
        count_entries=count_libsql_entries,
        # The data of entries is encoded.
        traps={"entry": b"_journal", "rest": b"_journal"},
        one_connection={},
    ),
    "mongo": _mongo("mongo_server", "mongo_url"),
    "mongo_standalone": _mongo("mongo_standalone", "mongo_standalone_url"),
}
