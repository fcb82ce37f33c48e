"""`SqlStore` keeps the whole contract on three databases, each through a client of a few lines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aiosqlite
import asyncmy
import asyncpg
import pytest
from asyncmy.constants import CLIENT
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import Delivery, Entry, NewRun, Rest, Store, Verdict
from perdure.stores import SqlStore
from perdure.stores.sql import SqlClient, sqlalchemy_client
from perdure.stores.sql.client import ask
from perdure.stores.sql.dialects import DialectName, marked, read_scripts
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.harness import asked, granted, rested, step
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers import mysql, postgres
from tests.servers.process import Server

TABLES = ("workflow_runs", "workflow_runs_journal", "workflow_runs_inbox")
LONG = timedelta(minutes=5)


class AsyncpgClient:
    """As a user would write it: an asyncpg pool."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Sequence[Any], int]:
        async with self._pool.acquire() as connection:
            statement = await connection.prepare(sql)
            rows = await statement.fetch(*params)
            affected = statement.get_statusmsg().split()[-1]
            return rows, int(affected) if affected.isdigit() else 0


class AsyncmyClient:
    """As a user would write it: an asyncmy pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Sequence[Any], int]:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(sql, params)
            rows = await cursor.fetchall() if cursor.description else []
            return rows, cursor.rowcount


class AiosqliteClient:
    """As a user would write it: one aiosqlite connection that commits by itself.

    Rows are read as they are fetched: the lock keeps other statements from changing them meanwhile.
    """

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    async def query(self, sql: str, params: Sequence[Any]) -> tuple[Any, int]:
        async with self._lock, self._connection.execute(sql, params) as cursor:
            return await cursor.fetchall(), cursor.rowcount


class DyingClient:
    """A client whose process dies after so many statements."""

    def __init__(self, client: SqlClient, statements: int) -> None:
        self._client = client
        self._left = statements
        if hasattr(client, "paramstyle"):
            self.paramstyle = client.paramstyle

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        if not self._left:
            raise RuntimeError("dead")
        self._left -= 1
        return await self._client.query(sql, params)


class PausedClient:
    """A client that lets something happen before its n-th statement."""

    def __init__(self, client: SqlClient, n: int, happens: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._left = n
        self._happens = happens

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self._left -= 1
        if not self._left:
            await self._happens()
        return await self._client.query(sql, params)


class SqlConformance(StoreConformance):
    """What the three databases share."""

    examples = 5
    dialect: DialectName
    client: SqlClient

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return SqlStore(self.client, dialect=self.dialect, prefix=prefix)

    async def crashing(self, store: Store, writes: int) -> Store:
        set_up = 2
        return SqlStore(DyingClient(self.client, set_up + writes), dialect=self.dialect)


class TestOnPostgres(SqlConformance):
    """Through asyncpg."""

    dialect = "postgres"

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, postgres_server: Server) -> Iterator[str]:
        with postgres.fresh_database(postgres_server) as url:
            yield url

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        async with asyncpg.create_pool(database, min_size=1, max_size=10) as pool:
            self.client = AsyncpgClient(pool)
            yield SqlStore(self.client, dialect="postgres")
            for table in TABLES:
                await pool.execute(f"DELETE FROM {table}")


class TestOnMysql(SqlConformance):
    """Through asyncmy."""

    dialect = "mysql"
    flags = 0

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, mysql_server: Server) -> Iterator[str]:
        with mysql.fresh_database(mysql_server) as url:
            yield url

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        pool = await asyncmy.create_pool(
            **mysql_options(database), autocommit=True, maxsize=10, client_flag=self.flags
        )
        self.client = AsyncmyClient(pool)
        yield SqlStore(self.client, dialect="mysql")
        for table in TABLES:
            await self.client.query(f"DELETE FROM {table}", ())
        pool.close()
        await pool.wait_closed()


@pytest.mark.slow
class TestOnMysqlCountingFoundRows(TestOnMysql):
    """The flag that changes what an affected row is makes no difference."""

    flags = CLIENT.FOUND_ROWS


class TestOnSqlite(SqlConformance):
    """Through aiosqlite."""

    dialect = "sqlite"

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
            await connection.execute("PRAGMA synchronous = OFF")
            self.client = AiosqliteClient(connection)
            yield SqlStore(self.client, dialect="sqlite")


@pytest.mark.slow
class TestOnSqlalchemy(TestOnPostgres):
    """Through an engine of SQLAlchemy, which marks values in its own way and types them."""

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        engine = engine_on(database, "postgresql+asyncpg")
        self.client = sqlalchemy_client(engine)
        yield SqlStore(self.client, dialect="postgres")
        for table in TABLES:
            await self.client.query(f"DELETE FROM {table}", ())
        await engine.dispose()


def engine_on(url: str, scheme: str) -> AsyncEngine:
    return create_async_engine(urlsplit(url)._replace(scheme=scheme).geturl(), pool_size=10)


def mysql_options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    user = unquote(parts.username or "root")
    return {"host": parts.hostname, "port": parts.port, "user": user, "db": parts.path[1:]}


async def live(store: SqlStore) -> None:
    """Lead a run through its whole life."""
    await store.enqueue([NewRun("run", "order", as_json(snapshot("a")))])
    [grant] = await store.claim("ana", LONG, 10, workflows=["order"])
    epoch = grant.lease.epoch
    assert await store.send("run", "paid", b'"yes"', dedup_id="x") is Delivery.DELIVERED
    assert await store.send("run", "paid", b'"yes"', dedup_id="x") is Delivery.DUPLICATE
    [message] = await store.inbox("run")
    entry = Entry("run", epoch, 1, delta("b"), consumes=(message.id,))
    assert await store.append([entry]) == [Verdict.ACCEPTED]
    assert await store.inbox("run") == []
    [renewed] = await store.renew([grant.lease], LONG)
    assert renewed is not None
    whole = as_json(snapshot("a", "b", status="completed"))
    rest = Entry("run", epoch, 2, whole, rest=Rest("completed"))
    assert await store.append([rest, entry]) == [Verdict.ACCEPTED] * 2
    assert (await store.stats()).by_status == {"completed": 1}
    assert await store.prune(timedelta(0)) == 1
    assert await store.load("run") is None


async def test_an_engine_on_mysql(mysql_url: str) -> None:
    """As on PostgreSQL."""
    engine = engine_on(mysql_url, "mysql+asyncmy")
    await live(SqlStore(sqlalchemy_client(engine), dialect="mysql"))
    await engine.dispose()


async def test_an_engine_on_sqlite(tmp_path: Path) -> None:
    """As on PostgreSQL."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    await live(SqlStore(sqlalchemy_client(engine), dialect="sqlite"))
    await engine.dispose()


async def test_a_table_in_a_schema_of_its_own(postgres_url: str) -> None:
    """`schema.table` is taken where the database has schemas."""
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2) as pool:
        await pool.execute("CREATE SCHEMA billing")
        await live(SqlStore(AsyncpgClient(pool), dialect="postgres", table="billing.runs"))


async def test_a_run_that_is_lost_while_it_is_read_is_not_granted(tmp_path: Path) -> None:
    """Whatever statement an owner is paused at, it gets no snapshot without its journal, which
    another owner may have emptied in the meantime."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client = AiosqliteClient(connection)
        store, at = SqlStore(client, dialect="sqlite"), timedelta(0)

        async def take_over() -> None:
            grant = await granted(store, "run", "cem")
            assert await rested(store, grant, Rest("suspended"), "a", "b") is Verdict.ACCEPTED

        for n in range(1, 12):
            old = await granted(store, "run", "ana", at)
            await store.append([step(old, 1, "a")])
            paused = SqlStore(PausedClient(client, n, take_over), dialect="sqlite")
            grant = await asked(paused, "run", "bob", at)
            assert grant is None or list(grant.snapshot["steps"]) in (["a"], ["a", "b"])
            await store.delete("run")


async def test_many_first_uses_at_once(postgres_url: str) -> None:
    """Each makes sure of the tables, and none trips over another."""
    async with asyncpg.create_pool(postgres_url, min_size=10, max_size=20) as pool:
        stores = [SqlStore(AsyncpgClient(pool), dialect="postgres") for _ in range(20)]
        await asyncio.gather(*(store.save(f"{n}", snapshot()) for n, store in enumerate(stores)))
        assert len(await stores[0].list()) == 20


@dataclass
class Result:
    rows: list[dict[str, Any]]
    rowcount: int


class FakeClient:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.asked.append(sql)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_rows_may_be_mappings_in_an_object() -> None:
    """What clients of other kinds give: an object with `rows` and `rowcount`."""
    client = FakeClient(Result([{"version": 1, "name": b"x"}], 1))
    answer = await ask(client, "SELECT 1", ())
    assert (answer.rows, answer.affected) == ([(1, "x")], 1)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ConnectionResetError("reset"), StoreUnavailable), (ValueError("odd"), StoreError)],
)
async def test_the_clients_errors_become_ours(
    raised: Exception, expected: type[StoreError]
) -> None:
    """Translated once, with the cause."""
    store = SqlStore(FakeClient(raised), dialect="mysql")
    with pytest.raises(expected, match="FakeClient") as caught:
        await store.load("run")
    assert caught.value.__cause__ is raised


async def test_a_set_up_that_failed_is_tried_again(tmp_path: Path) -> None:
    """And what it had already done is done again without harm."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client = AiosqliteClient(connection)
        for statements in range(8):
            store = SqlStore(DyingClient(client, statements), dialect="sqlite")
            with pytest.raises(StoreError):
                await store.load("run")
        await live(SqlStore(client, dialect="sqlite"))


async def test_a_closed_store_says_so() -> None:
    """The client stays open; the store is of no more use."""
    store = SqlStore(FakeClient(([], 0)), dialect="sqlite")
    await store.close()
    with pytest.raises(StoreClosed):
        await store.load("run")


@pytest.mark.parametrize(
    "options",
    [
        {"client": object()},
        {"dialect": "oracle"},
        {"table": "runs; DROP TABLE"},
        {"table": "a.b.c"},
        {"table": "x" * 51},
        {"prefix": 7},
        {"random": "dice"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """At once, and by name."""
    usual: dict[str, Any] = {"client": FakeClient(([], 0)), "dialect": "sqlite"}
    arguments = {**usual, **options}
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        SqlStore(arguments.pop("client"), **arguments)


@pytest.mark.parametrize(
    ("style", "marked_statement"),
    [
        ("qmark", "a = ? AND b LIKE '%' OR c = ?"),
        ("format", "a = %s AND b LIKE '%%' OR c = %s"),
        ("dollar", "a = $1 AND b LIKE '%' OR c = $2"),
        ("named", "a = :p1 AND b LIKE '%' OR c = :p2"),
    ],
)
def test_values_are_marked_as_the_client_wants(style: Any, marked_statement: str) -> None:
    """Every driver has its own way."""
    assert marked("a = ? AND b LIKE '%' OR c = ?", style) == marked_statement


@pytest.mark.parametrize("dialect", ["postgres", "mysql", "sqlite"])
def test_migrations_are_numbered_without_a_gap(dialect: str) -> None:
    """And every database has the same ones."""
    numbers = [number for number, _ in read_scripts(dialect)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers == [number for number, _ in read_scripts("postgres")]
