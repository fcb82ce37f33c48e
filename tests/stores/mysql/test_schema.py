"""The tables of the MySQL store: migrations, names and the rows that statements read."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.store import Entry, Grant, LeaseRequest, NewRun, Query, Rest
from perdure.stores import mysql
from perdure.stores._migrations import read_migrations
from perdure.stores.mysql import MysqlStore
from perdure.stores.mysql.schema import Dialect, Tables, dialect_of
from perdure.stores.mysql.statements import REST
from perdure.testing.conformance.harness import send_one, supports
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.servers.mysql import query
from tests.servers.proxy import TcpProxy

LONG = timedelta(minutes=5)
TABLES = ("perdure_runs", "perdure_runs_journal", "perdure_runs_inbox", "perdure_runs_tags")


def schema_at(url: str) -> list[str]:
    return [query(url, f"SHOW CREATE TABLE {table}")[0][1] for table in TABLES]


async def test_the_migrations_create_the_whole_schema(mysql_url: str) -> None:
    """Run by hand, the scripts create the same tables as the store."""
    async with mysql(mysql_url) as store:
        await store.load("run")
    schema = schema_at(mysql_url)
    for table in TABLES:
        query(mysql_url, f"DROP TABLE {table}")
    [(version,)] = query(mysql_url, "SELECT VERSION()")
    for migration in read_migrations("perdure.stores.mysql"):
        script = Tables("perdure_runs").sql(migration.script, dialect_of(version))
        query(mysql_url, script.decode())
    assert schema_at(mysql_url) == schema


def test_migrations_are_numbered_without_a_gap() -> None:
    """Each has a name after its number."""
    migrations = read_migrations("perdure.stores.mysql")
    assert [migration.version for migration in migrations] == list(range(1, len(migrations) + 1))
    assert all(Path(migration.name).stem[4] == "_" for migration in migrations)


async def test_an_interrupted_migration_is_applied_again(mysql_url: str) -> None:
    """Creating a table cannot be rolled back: a crash may occur before it is recorded."""
    async with mysql(mysql_url) as store:
        await store.save("run", snapshot("a"))
    schema = schema_at(mysql_url)
    query(mysql_url, "DELETE FROM perdure_runs_migrations WHERE version > 1")
    async with mysql(mysql_url) as store:
        assert await store.load("run") == snapshot("a")
    assert schema_at(mysql_url) == schema
    [(applied,)] = query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_migrations")
    assert applied == len(read_migrations("perdure.stores.mysql"))


async def test_fifty_concurrent_first_uses_create_the_schema_once(mysql_url: str) -> None:
    """Many processes may start together."""
    stores = [mysql(mysql_url, max_connections=1) for _ in range(50)]
    await asyncio.gather(*(store.save(f"{n}", snapshot()) for n, store in enumerate(stores)))
    assert len(await stores[0].list()) == 50
    [(applied,)] = query(mysql_url, "SELECT COUNT(*) FROM perdure_runs_migrations")
    assert applied == len(read_migrations("perdure.stores.mysql"))
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_failed_set_up_is_retried(mysql_url: str) -> None:
    """A failed first attempt is not remembered, and leaves no lock behind."""
    async with TcpProxy.before(mysql_url) as proxy, mysql(proxy.url, connect_timeout=0.2) as store:
        proxy.refuse()
        with pytest.raises(StoreUnavailable):
            await store.load("run")
        proxy.accept()
        proxy.drop_next_reply(to=b"CREATE TABLE")
        assert await store.load("run") is None
        assert proxy.dropped == 1


async def test_tables_of_a_newer_version_are_refused(mysql_url: str) -> None:
    """Writing to them could break the newer version."""
    async with mysql(mysql_url) as store:
        await store.load("run")
    query(mysql_url, "INSERT INTO perdure_runs_migrations VALUES (9999, '9999_future', NOW())")
    async with mysql(mysql_url) as store:
        with pytest.raises(StoreError, match="newer version of perdure"):
            await store.load("run")


async def test_the_table_may_include_a_database(mysql_url: str) -> None:
    """All tables of the store are created beside it."""
    database = urlsplit(mysql_url).path[1:]
    elsewhere = urlsplit(mysql_url)._replace(path="/mysql").geturl()
    async with mysql(elsewhere, table=f"{database}.runs") as store:
        await store.save("run", snapshot("a"))
        (grant,) = await store.acquire([LeaseRequest("run", "ana", LONG)])
        assert isinstance(grant, Grant)
        entries = [Entry("run", grant.lease.epoch, n, delta(f"{n}")) for n in range(3)]
        await store.append(entries)
        await store.append([rest_entry(grant, 4)])
    names = {name for (name,) in query(mysql_url, "SHOW TABLES")}
    assert names == {"runs", "runs_journal", "runs_inbox", "runs_tags", "runs_migrations"}


async def test_the_tables_are_readable_with_plain_sql(mysql_url: str) -> None:
    """Strings, times and JSON are stored as such."""
    async with mysql(mysql_url, prefix="büro:") as store:
        await store.save("run", snapshot("a", workflow="order", status="completed"))
    [row] = query(
        mysql_url,
        "SELECT id, workflow, status, JSON_VALUE(snapshot, '$.steps.a.value'), "
        "ABS(TIMESTAMPDIFF(SECOND, updated_at, UTC_TIMESTAMP())) < 60 FROM perdure_runs",
    )
    assert row == ("büro:run", "order", "completed", "a", 1)


async def test_tags_that_an_older_version_left_behind_do_no_harm(mysql_url: str) -> None:
    """It deletes a run without its tags, which the next run of that id may or may not have."""
    async with mysql(mysql_url) as store:
        await store.enqueue([NewRun("run", "order", b"{}", tags=("a=1", "b=2"))])
        query(mysql_url, "DELETE FROM perdure_runs")
        assert (await store.search(Query(tags=("a=1",)), 10)).runs == ()
        assert await store.enqueue([NewRun("run", "order", b"{}", tags=("b=2",))]) == [True]
        assert (await store.search(Query(tags=("a=1",)), 10)).runs == ()
        assert (await store.search(Query(tags=("b=2", "a=1")), 10)).runs == ()
        [matching_run] = (await store.search(Query(tags=("b=2",)), 10)).runs
        assert matching_run.tags == ("b=2",)


async def test_a_run_that_an_older_version_creates_is_claimed(mysql_url: str) -> None:
    """It knows neither queues nor lanes."""
    async with mysql(mysql_url) as store:
        await store.load("run")
        columns = "id, snapshot, workflow, wake_at, updated_at, epoch"
        data = as_json(snapshot()).decode()
        query(
            mysql_url,
            f"INSERT INTO perdure_runs ({columns}) "
            "VALUES ('run', %s, 'ördér', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 5)",
            data,
        )
        [grant] = await store.claim("ana", LONG, 10, supports=supports("ördér"))
        assert (grant.queue, grant.version) == ("", 0)


async def test_an_old_run_is_found_by_tag_from_its_first_tags_on(mysql_url: str) -> None:
    """It has no time of creation until then."""
    async with mysql(mysql_url) as store:
        await store.save("run", snapshot())
        query(mysql_url, "UPDATE perdure_runs SET created_at = NULL")
        (grant,) = await store.acquire([LeaseRequest("run", "ana", LONG)])
        assert isinstance(grant, Grant)
        rest = Rest("suspended", tags=("a=1",))
        data = as_json(snapshot())
        await store.append([Entry("run", grant.lease.epoch, 1, data, rest=rest)])
        [matching_run] = (await store.search(Query(tags=("a=1",)), 10)).runs
        assert matching_run.created_at == matching_run.updated_at


@pytest.mark.parametrize(
    ("version", "dialect"),
    [
        ("10.11.19-MariaDB-0+deb12u1", Dialect("utf8mb4_nopad_bin")),
        ("10.6.0-MariaDB", Dialect("utf8mb4_nopad_bin")),
        ("10.5.9-MariaDB-log", Dialect("utf8mb4_nopad_bin", skip_locked="")),
        ("11.4.2-MariaDB", Dialect("utf8mb4_nopad_bin")),
        ("8.0.36", Dialect("utf8mb4_0900_bin", new_value="new.{}", new_row="AS new")),
        ("8.4.0-commercial", Dialect("utf8mb4_0900_bin", new_value="new.{}", new_row="AS new")),
        ("9.1.0", Dialect("utf8mb4_0900_bin", new_value="new.{}", new_row="AS new")),
    ],
)
def test_the_dialect_depends_on_the_version(version: str, dialect: Dialect) -> None:
    """The version is the one that the server reports."""
    assert dialect_of(version) == dialect


@pytest.mark.parametrize("version", ["5.7.44", "8.0.18", "10.2.44-MariaDB", "5.5.5"])
def test_a_server_that_is_too_old_is_refused(version: str) -> None:
    """The error names the versions that are supported."""
    with pytest.raises(StoreError, match=r"MySQL 8\.0\.19 or MariaDB 10\.3"):
        dialect_of(version)


def test_an_upsert_refers_to_the_new_row() -> None:
    """MariaDB lacks MySQL's syntax, and MySQL deprecates MariaDB's."""
    tables = Tables("t")
    maria, my = (tables.sql(REST, dialect_of(version)) for version in ("11.4.2-MariaDB", "8.4.0"))
    assert b"status = VALUES(status)" in maria
    assert b"AS new\n    ON DUPLICATE KEY UPDATE folded = new.folded" in my


@pytest.mark.parametrize(
    "table", ["", "1runs", "runs;", "ru`ns", "a.b.c", ".runs", "runs.", "rüns", "r" * 54, 7, None]
)
def test_invalid_table_names_are_refused(table: Any) -> None:
    """Table names are the only values that are interpolated into statements."""
    with pytest.raises(InvalidArgument, match="table"):
        mysql("mysql://localhost/db", table=table)


@pytest.mark.parametrize(
    "options",
    [
        {"url": None},
        {"pool": object()},
        {"url": "mysql://h/d", "max_connections": 0},
        {"url": "mysql://h/d", "connect_timeout": -1},
        {"url": "mysql://h/d", "timeout": "soon"},
        {"url": "mysql://h/d", "prefix": "\0"},
        {"url": "mysql://h/d", "ssl": "yes"},
        {"url": "mysql://h/d", "clock": 7},
        {"url": "mysql://h/d", "max_value_size": 0},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    """At once, with the name of the parameter."""
    with pytest.raises(InvalidArgument):
        mysql(**options)


async def test_an_id_too_long_for_an_index_is_refused(mysql_url: str) -> None:
    """Prefix and id together have at most 760 characters of any kind."""
    fox = "🦊"
    async with mysql(mysql_url, prefix=fox * 300) as store:
        with pytest.raises(InvalidArgument, match="760 characters including the prefix"):
            await store.save(fox * 461, snapshot())
        longest = fox * 460
        (grant,) = await store.acquire(
            [LeaseRequest(longest, "ana", LONG, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        await store.append([Entry(longest, grant.lease.epoch, n, delta(f"{n}")) for n in (1, 2)])
        await send_one(store, longest, "paid", b"1", dedup_id="x")
        loaded = await store.load(longest)
        assert loaded is not None
        assert list(loaded["steps"]) == ["1", "2"]


def rest_entry(grant: Grant, n: int, *, delete: bool = False) -> Entry:
    data = as_json(snapshot("a", status="completed"))
    return Entry(grant.lease.id, grant.lease.epoch, n, data, rest=Rest("completed", delete=delete))


class TestPlans:
    """With 100,000 runs, every query uses an index."""

    @pytest.fixture
    async def store(self, mysql_url: str) -> AsyncIterator[MysqlStore]:
        async with mysql(mysql_url, max_connections=1) as store:
            await store.load("run")
            query(mysql_url, MANY_RUNS)
            query(mysql_url, "ANALYZE TABLE perdure_runs")
            yield store

    async def test_no_verb_reads_more_than_it_needs(self, store: MysqlStore) -> None:
        """The server counts the rows it reads."""
        for verb in (self.list_runs, self.schedule, self.write, self.maintain):
            await self.run_statement(store, "FLUSH STATUS")
            await verb(store)
            rows = await self.run_statement(store, READ)
            assert sum(int(count) for _, count in rows) < 5_000, (verb.__name__, rows)

    async def run_statement(self, store: MysqlStore, statement: str) -> Any:
        """Run a statement on the store's own connection, which counts for itself."""
        pool = store._backend._database.pool
        connection = await pool.acquire()
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
            rows = await cursor.fetchall()
        await pool.release(connection, reusable=True)
        return rows

    async def list_runs(self, store: MysqlStore) -> None:
        page = await store.list(limit=20)
        assert len(page) == 20
        await store.list(limit=20, after=page[-1].cursor)
        await store.list(limit=20, status="failed")
        await store.list(limit=20, prefix="run ", workflow="order", after=page[-1].cursor)
        assert await store.load("run 77") is not None

    async def schedule(self, store: MysqlStore) -> None:
        now = datetime.now(UTC)
        assert len(await store.due(now, 100)) == 100
        await store.due(now, 100, supports=supports("order", "other"))
        grants = await store.claim("ana", LONG, 50)
        assert len(grants) == 50
        assert len(await store.claim("ana", LONG, 50, supports=supports("order"))) == 50
        await store.renew([grant.lease for grant in grants], LONG)
        await store.release([grant.lease for grant in grants])

    async def write(self, store: MysqlStore) -> None:
        requests = [
            LeaseRequest(f"new {n}", "ana", LONG, create=as_json(snapshot())) for n in range(40)
        ]
        await store.acquire(requests)
        others = [LeaseRequest(request.id, "bob", LONG) for request in requests]
        await store.acquire(others)
        await store.acquire([replace(request, instead_of="ana") for request in others])
        requests = [replace(request, instead_of="bob") for request in requests]
        one, *many = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
        entries = [Entry(g.lease.id, g.lease.epoch, 1, delta("a")) for g in many]
        await store.append([Entry(one.lease.id, one.lease.epoch, 1, delta("a"))])
        await store.append(entries)
        await store.append([*entries, rest_entry(many[0], 2), rest_entry(many[1], 2, delete=True)])
        await store.append([rest_entry(one, 2)])
        await store.append([rest_entry(many[2], 2, delete=True)])

    async def maintain(self, store: MysqlStore) -> None:
        await send_one(store, "run 5", "paid", b"1", dedup_id="x")
        assert await store.inbox("run 5")
        await store.save("saved", snapshot())
        runs = [NewRun(f"queued {n}", "order", b"{}") for n in range(20)]
        await store.enqueue(runs)
        await store.enqueue([*runs, NewRun("another", "order", b"{}")])
        await store.delete("saved")
        assert await store.prune(timedelta(0), status="failed", limit=10) == 10
        assert await store.prune(timedelta(0), limit=10) == 10


DIGIT = "(SELECT 0 AS d" + "".join(f" UNION ALL SELECT {d}" for d in range(1, 10)) + ")"
MANY_RUNS = f"""
    INSERT INTO perdure_runs (id, snapshot, workflow, status, wake_at, updated_at, epoch)
    SELECT CONCAT('run ', n), '{{"formatVersion":1,"steps":{{}},"execution":{{}}}}',
        IF(MOD(n, 3) = 0, 'order', 'other'),
        CASE WHEN MOD(n, 50) = 0 THEN 'failed' WHEN MOD(n, 2) = 0 THEN 'completed'
            ELSE 'suspended' END,
        IF(MOD(n, 2) = 1, UTC_TIMESTAMP(6) + INTERVAL (n - 5000) SECOND, NULL),
        UTC_TIMESTAMP(6) - INTERVAL n SECOND, 1
    FROM (
        SELECT a.d + 10 * b.d + 100 * c.d + 1000 * d.d + 10000 * e.d AS n
        FROM {DIGIT} AS a, {DIGIT} AS b, {DIGIT} AS c, {DIGIT} AS d, {DIGIT} AS e
    ) AS number
"""
READ = "SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%'"
