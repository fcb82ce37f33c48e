"""The MySQL store with sessions and URLs of the user's choice."""

import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import asyncmy
import pytest

from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, Rest, Store, Verdict
from perdure.stores import mysql, open_store
from perdure.stores.mysql.url import connect_options, host_and_database
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mysql import connect_arguments, query
from tests.stores.kit_parts import ConnectionConformance
from tests.stores.mysql.kit import MysqlHarness

LONG = timedelta(minutes=5)
ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN

# In these modes quotes and backslashes have another meaning than by default.
STRANGE = (
    "SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,IGNORE_SPACE', "
    "SESSION time_zone = '-07:00', SESSION autocommit = 0"
)


@pytest.mark.slow
class TestWithAPool(MysqlHarness, ConnectionConformance):
    """With a pool of the user, whose sessions have modes that break careless statements."""

    examples = 5

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        options = connect_arguments(empty_url) | {"init_command": STRANGE, "autocommit": None}
        self.pool = await asyncmy.create_pool(minsize=0, maxsize=10, **options)
        async with self.pool, mysql(pool=self.pool) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return mysql(pool=self.pool, prefix=prefix)


@pytest.mark.parametrize("client_flag", [0, 2], ids=["changed rows", "found rows"])
@pytest.mark.parametrize("autocommit", [True, False])
async def test_verdicts_do_not_depend_on_how_rows_are_counted(
    mysql_url: str, client_flag: int, autocommit: bool
) -> None:
    """The user may set CLIENT.FOUND_ROWS, which changes the row count of an UPDATE."""
    options: dict[str, Any] = {"client_flag": client_flag, "autocommit": autocommit}
    pool = await asyncmy.create_pool(minsize=0, **connect_arguments(mysql_url), **options)
    async with pool, mysql(pool=pool) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        epoch = grant.lease.epoch
        for n, rest in ((1, None), (2, Rest("completed"))):
            data = as_json(snapshot("b"))
            assert await store.append([Entry("run", epoch - 1, n, data, rest=rest)]) == [FENCED]
            assert await store.append([Entry("none", epoch, n, data, rest=rest)]) == [UNKNOWN]
            for _ in range(2):
                assert await store.append([Entry("run", epoch, n, data, rest=rest)]) == [ACCEPTED]
        assert await store.renew([grant.lease], LONG) == [None]
        assert (await store.delete("run"), await store.delete("run")) == (True, False)


async def test_a_session_without_autocommit_is_committed(mysql_url: str) -> None:
    """Even if the driver does not know of it."""
    hidden: dict[str, Any] = {"init_command": "SET autocommit = 0", "autocommit": None}
    pool = await asyncmy.create_pool(minsize=0, maxsize=1, **connect_arguments(mysql_url), **hidden)
    async with pool, mysql(pool=pool) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        for n in range(3):
            entry = Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")))
            for _ in range(2):
                assert await store.append([entry]) == [ACCEPTED]
        assert query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_journal") == ((3,),)


async def test_the_pools_sessions_are_not_changed(mysql_url: str) -> None:
    """Isolation level and mode are unchanged, and no transaction is left open."""
    settings = (
        "SHOW SESSION VARIABLES WHERE Variable_name LIKE '%isolation' OR Variable_name IN "
        "('sql_mode', 'autocommit', 'innodb_lock_wait_timeout', 'time_zone')"
    )
    pool = await asyncmy.create_pool(minsize=1, maxsize=1, **connect_arguments(mysql_url))
    async with pool:
        before = await fetch(pool, settings)
        async with mysql(pool=pool) as store:
            await store.save("run", snapshot("a"))
            await store.acquire([LeaseRequest("run", "ana", LONG)])
            await store.list()
        connection = await pool.acquire()
        assert connection.get_transaction_status() is False
        await pool.release(connection)
        assert await fetch(pool, settings) == before
        assert await fetch(pool, "SELECT COUNT(*) FROM perdure_runs") == ((1,),)


async def fetch(pool: Any, statement: str) -> Any:
    async with pool.acquire() as connection, connection.cursor() as cursor:
        await cursor.execute(statement)
        rows = await cursor.fetchall()
        await connection.rollback()
        return rows


async def test_a_pool_with_another_character_set_is_refused(mysql_url: str) -> None:
    """It would replace unknown characters by question marks."""
    options = connect_arguments(mysql_url) | {"charset": "latin1"}
    pool = await asyncmy.create_pool(minsize=0, **options)
    async with pool, mysql(pool=pool) as store:
        with pytest.raises(InvalidArgument, match="charset='utf8mb4'"):
            await store.load("run")


async def test_a_closed_pool_makes_the_store_unavailable(mysql_url: str) -> None:
    """The driver's own error is translated."""
    pool = await asyncmy.create_pool(minsize=0, **connect_arguments(mysql_url))
    store = mysql(pool=pool)
    async with pool:
        await store.load("run")
    with pytest.raises(StoreUnavailable, match="pool that was passed in"):
        await store.load("run")


async def test_a_mariadb_url_opens_the_store(mysql_url: str) -> None:
    """`mariadb://` is the same as `mysql://`."""
    async with open_store(mysql_url.replace("mysql://", "mariadb://", 1)) as store:
        await store.save("run", snapshot("a"))
    assert query(mysql_url, "SELECT id, status FROM perdure_runs") == (("run", "running"),)


class TestUrls:
    """Connection options in a URL."""

    def test_a_url_contains_all_options(self) -> None:
        """User, password, host, port, database and encryption."""
        options = connect_options("mysql://ana%40x:p%C3%A4ss%2F@db.example:3307/my%20db?ssl=true")
        assert options == {
            "host": "db.example",
            "port": 3307,
            "user": "ana@x",
            "password": "päss/".encode(),
            "database": "my db",
            "ssl": True,
        }
        assert host_and_database(options) == "db.example:3307/my db"

    def test_missing_parts_have_defaults(self) -> None:
        """localhost, 3306, root."""
        options = connect_options("mariadb:///db")
        assert (options["host"], options["port"], options["user"]) == ("localhost", 3306, "root")
        assert "ssl" not in options

    def test_certificates_and_sockets_are_file_names(self) -> None:
        """A certificate authority, and a socket instead of a host."""
        options = connect_options("mysql://h/db?ssl_ca=/ca.pem&ssl=true&unix_socket=/run/my.sock")
        assert (options["ssl"], options["unix_socket"]) == ({"ca": "/ca.pem"}, "/run/my.sock")
        assert host_and_database(options) == "/run/my.sock/db"

    def test_the_option_overrides_the_url(self) -> None:
        """An `SSLContext` has more options than a URL."""
        context = ssl.create_default_context()
        assert connect_options("mysql://h/db?ssl=true", context)["ssl"] is context
        assert connect_options("mysql://h/db?ssl=false")["ssl"] is None

    @pytest.mark.parametrize(
        "url",
        [
            None,
            7,
            "localhost/db",
            "postgres://h/db",
            "mysql://h",
            "mysql://h/",
            "mysql://h:x/db",
            "mysql://h:0/db",
            "mysql://h/db?sll=true",
            "mysql://h/db?ssl=maybe",
            "mysql://h/db?ssl_ca=",
        ],
    )
    def test_an_invalid_url_is_refused(self, url: Any) -> None:
        """At once, with the name of the parameter."""
        with pytest.raises(InvalidArgument, match="url"):
            mysql(url)

    def test_a_password_is_not_shown(self) -> None:
        """Not even if the URL is invalid."""
        with pytest.raises(InvalidArgument) as caught:
            mysql("mysql://ana:secret@h")
        assert "secret" not in str(caught.value)


async def test_a_password_may_contain_any_characters(mysql_url: str) -> None:
    """The driver would encode a string as Latin-1."""
    query(mysql_url, "DROP USER IF EXISTS ana")
    query(mysql_url, "CREATE USER ana IDENTIFIED BY 'жπ'")
    query(mysql_url, "GRANT ALL ON *.* TO ana")
    parts = urlsplit(mysql_url)
    at = parts.netloc.rpartition("@")[2]
    try:
        url = parts._replace(netloc=f"ana:{quote('жπ')}@{at}").geturl()
        async with mysql(url) as store:
            assert await store.load("run") is None
    finally:
        query(mysql_url, "DROP USER ana")
