"""The MySQL store keeps the whole contract on sessions that are not its own."""

import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import asyncmy
import pytest

from perdure.errors import InvalidArgument, StoreUnavailable
from perdure.store import Entry, LeaseRequest, Rest, Store, Verdict
from perdure.stores import mysql, open_store
from perdure.stores.mysql.url import connect_options, host_and_database
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.mysql import connect_arguments
from tests.stores.mysql.kit import MysqlConformance, query

LONG = timedelta(minutes=5)
ACCEPTED, FENCED, UNKNOWN = Verdict.ACCEPTED, Verdict.FENCED, Verdict.UNKNOWN

# In these modes quotes, backslashes and NULLs are not what they are by default.
STRANGE = (
    "SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,IGNORE_SPACE', "
    "SESSION time_zone = '-07:00', SESSION autocommit = 0"
)


@pytest.mark.slow
class TestWithAPool(MysqlConformance):
    """With a pool of the user's own, whose sessions are in modes that break careless statements."""

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
    """CLIENT.FOUND_ROWS, which an UPDATE counts by, is the pool's owner's business alone."""
    options: dict[str, Any] = {"client_flag": client_flag, "autocommit": autocommit}
    pool = await asyncmy.create_pool(minsize=0, **connect_arguments(mysql_url), **options)
    async with pool, mysql(pool=pool) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))]
        )
        assert grant is not None
        epoch = grant.lease.epoch
        for n, rest in ((1, None), (2, Rest("completed"))):
            data = as_json(snapshot("b"))
            assert await store.append([Entry("run", epoch - 1, n, data, rest=rest)]) == [FENCED]
            assert await store.append([Entry("none", epoch, n, data, rest=rest)]) == [UNKNOWN]
            for _ in range(2):
                assert await store.append([Entry("run", epoch, n, data, rest=rest)]) == [ACCEPTED]
        assert await store.renew([grant.lease], LONG) == [None]
        assert (await store.delete("run"), await store.delete("run")) == (True, False)


async def test_a_session_that_does_not_commit_by_itself_is_committed(mysql_url: str) -> None:
    """Also when the driver does not know of it."""
    hidden: dict[str, Any] = {"init_command": "SET autocommit = 0", "autocommit": None}
    pool = await asyncmy.create_pool(minsize=0, maxsize=1, **connect_arguments(mysql_url), **hidden)
    async with pool, mysql(pool=pool) as store:
        (grant,) = await store.acquire(
            [LeaseRequest("run", "ana", LONG, create=as_json(snapshot()))]
        )
        assert grant is not None
        for n in range(3):
            entry = Entry("run", grant.lease.epoch, n, as_json(snapshot(f"{n}")))
            for _ in range(2):
                assert await store.append([entry]) == [ACCEPTED]
        assert query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_journal") == ((3,),)


async def test_the_pools_sessions_stay_as_they_are(mysql_url: str) -> None:
    """Neither their isolation, nor their mode, nor an open transaction is left behind."""
    settings = (
        "SHOW SESSION VARIABLES WHERE Variable_name LIKE '%isolation' OR Variable_name IN "
        "('sql_mode', 'autocommit', 'innodb_lock_wait_timeout', 'time_zone')"
    )
    pool = await asyncmy.create_pool(minsize=1, maxsize=1, **connect_arguments(mysql_url))
    async with pool:
        before = await asked(pool, settings)
        async with mysql(pool=pool) as store:
            await store.save("run", snapshot("a"))
            await store.acquire([LeaseRequest("run", "ana", LONG)])
            await store.list()
        connection = await pool.acquire()
        assert connection.get_transaction_status() is False
        await pool.release(connection)
        assert await asked(pool, settings) == before
        assert await asked(pool, "SELECT COUNT(*) FROM perdure_runs") == ((1,),)


async def asked(pool: Any, statement: str) -> Any:
    async with pool.acquire() as connection, connection.cursor() as cursor:
        await cursor.execute(statement)
        rows = await cursor.fetchall()
        await connection.rollback()
        return rows


async def test_a_pool_of_another_character_set_is_refused(mysql_url: str) -> None:
    """It would turn what it does not know into question marks."""
    options = connect_arguments(mysql_url) | {"charset": "latin1"}
    pool = await asyncmy.create_pool(minsize=0, **options)
    async with pool, mysql(pool=pool) as store:
        with pytest.raises(InvalidArgument, match="charset='utf8mb4'"):
            await store.load("run")


async def test_a_closed_pool_is_named(mysql_url: str) -> None:
    """Rather than the driver's own error."""
    pool = await asyncmy.create_pool(minsize=0, **connect_arguments(mysql_url))
    store = mysql(pool=pool)
    async with pool:
        await store.load("run")
    with pytest.raises(StoreUnavailable, match="pool that was passed in"):
        await store.load("run")


async def test_a_mariadb_url_opens_it(mysql_url: str) -> None:
    """By both names."""
    async with open_store(mysql_url.replace("mysql://", "mariadb://", 1)) as store:  # type: ignore[attr-defined]  # the stores in the box have it
        await store.save("run", snapshot("a"))
    assert query(mysql_url, "SELECT id, status FROM perdure_runs") == (("run", "running"),)


class TestUrls:
    """What a URL says."""

    def test_a_url_names_everything(self) -> None:
        """User, password, host, port, database and how to encrypt."""
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

    def test_what_is_not_said_is_usual(self) -> None:
        """localhost, 3306, root."""
        options = connect_options("mariadb:///db")
        assert (options["host"], options["port"], options["user"]) == ("localhost", 3306, "root")
        assert "ssl" not in options

    def test_certificates_and_sockets_are_files(self) -> None:
        """An authority to trust, and a socket in place of a host."""
        options = connect_options("mysql://h/db?ssl_ca=/ca.pem&ssl=true&unix_socket=/run/my.sock")
        assert (options["ssl"], options["unix_socket"]) == ({"ca": "/ca.pem"}, "/run/my.sock")
        assert host_and_database(options) == "/run/my.sock/db"

    def test_an_option_outweighs_the_url(self) -> None:
        """A context says more than a text can."""
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
    def test_a_url_that_says_nothing_is_refused(self, url: Any) -> None:
        """At once, and by name."""
        with pytest.raises(InvalidArgument, match="url"):
            mysql(url)

    def test_a_password_is_not_shown(self) -> None:
        """Not even when the URL is wrong."""
        with pytest.raises(InvalidArgument) as caught:
            mysql("mysql://ana:secret@h")
        assert "secret" not in str(caught.value)


async def test_a_password_of_any_letters_works(mysql_url: str) -> None:
    """The driver would take it to be Latin-1."""
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
