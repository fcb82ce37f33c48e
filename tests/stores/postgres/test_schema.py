"""The tables of the PostgreSQL store: migrations and names, and awaitly's own table."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.store import Count, Entry, Grant, LeaseRequest, NewRun, Query, Rest, Verdict
from perdure.stores import postgres
from perdure.stores._migrations import read_migrations
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.schema import Tables
from perdure.testing.conformance.samples import as_json, snapshot
from tests.servers.proxy import TcpProxy

LONG = timedelta(minutes=5)
COLUMNS = """
    SELECT table_name, column_name, data_type, is_nullable, column_default
    FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, ordinal_position
"""
INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1"


def schema_at(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return [row for query in (COLUMNS, INDEXES) for row in connection.execute(query.encode())]


async def test_the_migrations_create_the_whole_schema(postgres_url: str) -> None:
    """Run by hand, the scripts create the same tables as the store."""
    async with postgres(postgres_url) as store:
        await store.load("run")
    schema = schema_at(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for table in (
            "perdure_runs",
            "perdure_runs_journal",
            "perdure_runs_inbox",
            "perdure_runs_tags",
        ):
            connection.execute(f"DROP TABLE {table}".encode())
        for migration in read_migrations("perdure.stores.postgres"):
            connection.execute(Tables("perdure_runs").sql(migration.script).encode())
    assert schema_at(postgres_url) == schema


def test_migrations_are_numbered_without_a_gap() -> None:
    """Each has a name after its number."""
    migrations = read_migrations("perdure.stores.postgres")
    assert [migration.version for migration in migrations] == list(range(1, len(migrations) + 1))
    assert all(Path(migration.name).stem[4] == "_" for migration in migrations)


async def test_fifty_concurrent_first_uses_create_the_schema_once(postgres_url: str) -> None:
    """Many processes may start together."""
    stores = [postgres(postgres_url, max_connections=1) for _ in range(50)]
    await asyncio.gather(*(store.save(f"{n}", snapshot()) for n, store in enumerate(stores)))
    assert len(await stores[0].list()) == 50
    with psycopg.connect(postgres_url) as connection:
        applied = connection.execute("SELECT count(*) FROM perdure_runs_migrations").fetchone()
    assert applied == (len(read_migrations("perdure.stores.postgres")),)
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_failed_set_up_is_retried(postgres_url: str) -> None:
    """A failed first attempt is not remembered."""
    async with (
        TcpProxy.before(postgres_url) as proxy,
        postgres(proxy.url, connect_timeout=0.2) as store,
    ):
        proxy.refuse()
        with pytest.raises(StoreUnavailable):
            await store.load("run")
        proxy.accept()
        assert await store.load("run") is None


async def test_tables_of_a_newer_version_are_refused(postgres_url: str) -> None:
    """Writing to them could break the newer version."""
    async with postgres(postgres_url) as store:
        await store.load("run")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("INSERT INTO perdure_runs_migrations VALUES (9999, '9999_future')")
    async with postgres(postgres_url) as store:
        with pytest.raises(StoreError, match="newer version of perdure"):
            await store.load("run")


def migrate_until(connection: psycopg.Connection, version: int) -> None:
    """Apply the migrations up to a version, as an earlier perdure did."""
    connection.execute(
        "CREATE TABLE perdure_runs_migrations (version integer PRIMARY KEY, name text NOT NULL, "
        "applied_at timestamptz NOT NULL DEFAULT now())"
    )
    for migration in read_migrations("perdure.stores.postgres")[:version]:
        connection.execute(Tables("perdure_runs").sql(migration.script).encode())
        record = "INSERT INTO perdure_runs_migrations VALUES (%s, %s)"
        connection.execute(record, [migration.version, migration.name])


def documented_statements() -> list[str]:
    """Return the statements that the fourth migration advises to run beforehand."""
    script = Tables("perdure_runs").sql(read_migrations("perdure.stores.postgres")[3].script)
    lines = [line[7:] for line in script.splitlines() if line.startswith("--     ")]
    return "\n".join(lines).split(";")[:3]


async def test_indexes_that_were_built_beforehand_are_used(postgres_url: str) -> None:
    """They can be built without blocking writers; the result is the same schema."""
    async with postgres(postgres_url) as store:
        await store.load("run")
    indexes = schema_at(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        migrate_until(connection, 3)
        for statement in documented_statements():
            connection.execute(statement.encode())
        built = connection.execute(INDEX_FILES).fetchall()
        assert len(built) == 2
        async with postgres(postgres_url) as store:
            await store.load("run")
        assert connection.execute(INDEX_FILES).fetchall() == built
    assert sorted(map(str, schema_at(postgres_url))) == sorted(map(str, indexes))


async def test_an_index_whose_build_failed_is_replaced(postgres_url: str) -> None:
    """The server keeps such an index, and never uses it."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        migrate_until(connection, 3)
        for statement in documented_statements():
            connection.execute(statement.encode())
        connection.execute(
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = 'perdure_runs_due_idx'::regclass"
        )
        async with postgres(postgres_url) as store:
            await store.load("run")
        assert connection.execute(
            "SELECT bool_and(indisvalid), count(*) FROM pg_index "
            "WHERE indrelid = 'perdure_runs'::regclass"
        ).fetchone() == (True, 4)


INDEX_FILES = """
    SELECT relname, relfilenode FROM pg_class
    WHERE relname IN ('perdure_runs_due_idx', 'perdure_runs_workflow_idx') ORDER BY 1
"""


async def test_a_run_of_an_earlier_version_has_its_time_of_creation(postgres_url: str) -> None:
    """It is known without the column, and is used when the run gets its first tags."""
    async with postgres(postgres_url) as store:
        await store.enqueue([NewRun("run", "order", as_json(snapshot()))])
        (created,) = await store.summaries(["run"])
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("UPDATE perdure_runs SET created_at = NULL")
        assert await store.summaries(["run"]) == [created]
        (grant,) = await store.acquire([LeaseRequest("run", "ana", LONG)])
        assert isinstance(grant, Grant)
        rest = Rest("suspended", tags=("customer=1",))
        await store.append([Entry("run", grant.lease.epoch, 1, as_json(snapshot()), rest=rest)])
        (matching_run,) = (await store.search(Query(tags=("customer=1",)), 10)).runs
    assert created is not None
    assert matching_run.created_at == created.created_at


async def test_names_that_are_too_long_for_an_index_are_refused(postgres_url: str) -> None:
    """Before anything is written. Names of ASCII characters are never too long."""
    name = "".join(map(chr, range(0x20000, 0x20000 + 512)))
    async with postgres(postgres_url) as store:
        await store.enqueue([NewRun(name, "order", as_json(snapshot()), queue=name)])
        await store.enqueue([NewRun("run", name, as_json(snapshot()), queue="emails")])
        for run in (
            NewRun(name, name, as_json(snapshot())),
            NewRun("another", name, as_json(snapshot()), queue=name),
        ):
            with pytest.raises(InvalidArgument, match="workflow"):
                await store.enqueue([run])
        with pytest.raises(InvalidArgument, match="workflow"):
            await store.save(name, snapshot(workflow=name))
        assert len(await store.list()) == 2


async def test_the_table_may_include_a_schema(postgres_url: str) -> None:
    """All tables of the store are created beside it."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA billing")
    async with postgres(postgres_url, table="billing.runs") as store:
        await store.save("run", snapshot("a"))
        assert await store.load("run") == snapshot("a")
    with psycopg.connect(postgres_url) as connection:
        query = "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'runs%'"
        assert connection.execute(query).fetchall() == [("billing",)]


@pytest.mark.parametrize(
    "table", ["", "1runs", "runs;", 'ru"ns', "a.b.c", ".runs", "runs.", "rüns", "r" * 49, 7, None]
)
def test_invalid_table_names_are_refused(table: Any) -> None:
    """Table names are the only values that are interpolated into statements."""
    with pytest.raises(InvalidArgument, match="table"):
        postgres("postgresql://localhost/db", table=table)


@pytest.mark.parametrize(
    "options",
    [
        {"url": "localhost/db"},
        {"url": None},
        {"pool": object()},
        {"url": "postgresql://h/d", "max_connections": 0},
        {"url": "postgresql://h/d", "prepared_statements": "no"},
        {"url": "postgresql://h/d", "max_value_size": 0},
        {"url": "postgresql://h/d", "connect_timeout": -1},
        {"url": "postgresql://h/d", "timeout": "soon"},
        {"url": "postgresql://h/d", "prefix": "\0"},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    """At once, with the name of the parameter."""
    with pytest.raises(InvalidArgument):
        postgres(**options)


class TestAwaitlysTable:
    """A table that awaitly created and filled."""

    @pytest.fixture
    async def awaitly(self, postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(postgres_url)
        await connection.execute(AWAITLY)
        yield connection
        await connection.close()

    @pytest.fixture
    async def store(
        self, postgres_url: str, awaitly: asyncpg.Connection
    ) -> AsyncIterator[PostgresStore]:
        async with postgres(postgres_url, table="awaitly_snapshots") as store:
            yield store

    async def test_rows_of_awaitly_are_read(self, store: PostgresStore) -> None:
        """A snapshot is loaded unchanged, and listed."""
        loaded = await store.load("wf1")
        assert loaded is not None
        assert loaded["steps"]["getUser"] == {"ok": True, "value": {"id": "a"}}
        summaries = {
            summary.id: (summary.status, summary.workflow) for summary in await store.list()
        }
        assert summaries == {"wf1": ("running", "wf1"), "state": ("running", None)}
        assert [summary.id for summary in await store.list(workflow="wf1", status="running")] == [
            "wf1"
        ]

    async def test_a_resume_state_is_read_as_a_snapshot(self, store: PostgresStore) -> None:
        """The newer format in which awaitly stores a run."""
        loaded = await store.load("state")
        assert loaded is not None
        assert list(loaded["steps"]) == ["user:1", "b"]
        assert loaded["steps"]["user:1"] == {"ok": True, "value": {"x": 1}}
        assert loaded["steps"]["b"]["ok"] is False

    async def test_its_rows_are_found_by_what_their_snapshots_contain(
        self, store: PostgresStore
    ) -> None:
        """Rows that awaitly wrote have no workflow and no status of their own."""
        for query in (Query(workflows=("wf1",)), Query(workflows=("wf1",), statuses=("running",))):
            assert [run.id for run in (await store.search(query, 10)).runs] == ["wf1"]
        counts = await store.counts(Query(), 10)
        assert sorted(counts, key=str) == [
            Count("wf1", "running", 1),
            Count(None, "running", 1),
        ]

    async def test_its_rows_are_found_by_tags_that_they_get(self, store: PostgresStore) -> None:
        """From then on they have a time of creation, because pages are ordered by it."""
        for id in ("wf1", "state"):
            (grant,) = await store.acquire([LeaseRequest(id, "ana", LONG)])
            assert isinstance(grant, Grant)
            rest = Rest("suspended", tags=("customer=1",))
            whole = as_json(grant.snapshot)
            await store.append([Entry(id, grant.lease.epoch, 1, whole, rest=rest)])
        query = Query(tags=("customer=1",))
        first = await store.search(query, 1)
        second = await store.search(query, 1, after=first.cursor)
        assert [run.id for run in (*first.runs, *second.runs)] == ["state", "wf1"]

    async def test_its_rows_are_not_rewritten(
        self, store: PostgresStore, awaitly: asyncpg.Connection
    ) -> None:
        """Missing columns are added without rewriting the rows."""
        versions = "SELECT id, xmin::text, ctid::text FROM awaitly_snapshots ORDER BY id"
        before = await awaitly.fetch(versions)
        await store.list()
        assert await awaitly.fetch(versions) == before

    async def test_its_rows_are_not_claimed(self, store: PostgresStore) -> None:
        """A worker claims only runs that were created by perdure."""
        assert await store.claim("ana", LONG, 10) == []

    async def test_a_run_is_continued_and_stored_as_awaitly_reads_it(
        self, store: PostgresStore, awaitly: asyncpg.Connection
    ) -> None:
        """A run that awaitly began is finished here, and stored where awaitly reads it."""
        (grant,) = await store.acquire([LeaseRequest("wf1", "ana", LONG)])
        assert isinstance(grant, Grant)
        assert list(grant.snapshot["steps"]) == ["getUser"]
        whole = {**grant.snapshot, "steps": {**grant.snapshot["steps"], "b": {"ok": True}}}
        entry = Entry("wf1", grant.lease.epoch, 1, as_json(whole), rest=Rest("suspended"))
        assert await store.append([entry]) == [Verdict.ACCEPTED]
        steps = await awaitly.fetchval(
            "SELECT snapshot -> 'steps' ->> 'b' FROM awaitly_snapshots WHERE id = 'wf1'"
        )
        assert steps == '{"ok": true}'

    async def test_a_later_write_by_awaitly_is_used(
        self, store: PostgresStore, awaitly: asyncpg.Connection
    ) -> None:
        """If both wrote, the last write is used."""
        await store.save("wf1", snapshot("ours"))
        await awaitly.execute(
            "UPDATE awaitly_snapshots SET updated_at = now(), "
            """snapshot = jsonb_set(snapshot, '{steps,theirs}', '{"ok": true}') WHERE id = 'wf1'"""
        )
        loaded = await store.load("wf1")
        assert loaded is not None
        assert set(loaded["steps"]) == {"ours", "theirs"}

    async def test_what_jsonb_does_not_preserve_is_kept(
        self, store: PostgresStore, awaitly: asyncpg.Connection
    ) -> None:
        """The order of keys, the format of numbers, and characters that jsonb cannot contain."""
        value = {"zz": 1e100, "b": -0.0, "a": "x\0y", "text": "\\u0000", "both": "\\\0"}
        await store.save("run", snapshot("z", "a", odd=value))
        loaded = await store.load("run")
        assert loaded is not None
        assert list(loaded["steps"]) == ["z", "a", "odd"]
        record: Any = loaded["steps"]["odd"]
        assert repr(record["value"]) == repr(value)
        stored = await awaitly.fetchval(
            "SELECT snapshot #> '{steps,odd,value}' FROM awaitly_snapshots WHERE id = 'run'"
        )
        assert '"a": "x\ufffdy"' in stored
        assert '"text": "\\\\u0000"' in stored


AWAITLY = r"""
    CREATE TABLE awaitly_snapshots (
        id text PRIMARY KEY, snapshot jsonb NOT NULL, updated_at timestamptz DEFAULT now()
    );
    CREATE INDEX awaitly_snapshots_updated_at_idx ON awaitly_snapshots (updated_at DESC);
    INSERT INTO awaitly_snapshots (id, snapshot) VALUES ('wf1', '{
        "formatVersion": 1, "workflowName": "wf1",
        "steps": {"getUser": {"ok": true, "value": {"id": "a"}}},
        "execution": {"status": "running", "lastUpdated": "2026-01-01T00:00:00.000Z"},
        "metadata": {"version": 3, "stepOrder": ["getUser"]}
    }'), ('state', '{"kind": "ResumeState", "steps": [
        ["user:1", {"ok": true, "value": {"x": 1}}],
        ["b", {"ok": false, "error": "E", "meta": {"origin": "result"},
            "cause": {"type": "error", "name": "Error", "message": "c", "stack": "…"}}]
    ]}');
"""
