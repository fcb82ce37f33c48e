"""The SQLite schema: created by numbered migrations, even in a table that awaitly created."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template

import pytest

from perdure.errors import StoreError
from perdure.store import Entry, Grant, LeaseRequest, Rest, Verdict
from perdure.stores._migrations import read_migrations
from perdure.stores.sqlite import sqlite
from perdure.stores.sqlite.schema import split_script
from perdure.testing.conformance.harness import send_one
from perdure.testing.conformance.samples import as_json, delta, snapshot

AWAITLY = """
    CREATE TABLE awaitly_snapshots (
        id TEXT PRIMARY KEY,
        snapshot TEXT NOT NULL,
        updated_at TEXT DEFAULT (datetime('now'))
    );
    CREATE INDEX awaitly_snapshots_updated_at_idx ON awaitly_snapshots (updated_at DESC);
"""
UPSERT_OF_AWAITLY = """
    INSERT INTO awaitly_snapshots (id, snapshot, updated_at) VALUES (?, ?, datetime('now'))
    ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot, updated_at = datetime('now')
"""
RESUME_STATE = {"kind": "ResumeState", "steps": [["user:1", {"ok": True, "value": {"x": 1}}]]}
HOUR = timedelta(hours=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def awaitly(path: Path) -> Iterator[sqlite3.Connection]:
    """Awaitly's connection to its table."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(AWAITLY)
        yield connection


def schema_of(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name")
    return [row for row in rows if not row[1].startswith("sqlite_")]


async def test_the_schema_is_what_the_migrations_create(path: Path) -> None:
    """Running the numbered files in order results in exactly the store's schema."""
    async with sqlite(path, table="runs") as store:
        await store.load("run")
    with closing(sqlite3.connect(":memory:")) as by_hand, closing(sqlite3.connect(path)) as file:
        for migration in read_migrations("perdure.stores.sqlite"):
            for statement in split_script(migration.script):
                by_hand.execute(Template(statement).substitute(table="runs"))
        versions = [row for row in schema_of(file) if row[1] == "runs_migrations"]
        assert len(versions) == 1
        assert sorted([*schema_of(by_hand), *versions]) == sorted(schema_of(file))


def test_migrations_are_numbered_without_a_gap() -> None:
    """Files are added at the end and never changed."""
    for folder in ("migrations", "migrations_keyvalue"):
        migrations = read_migrations("perdure.stores.sqlite", folder)
        assert [one.version for one in migrations] == [*range(1, len(migrations) + 1)]
        assert all(one.name[4] == "_" and [*split_script(one.script)] for one in migrations)


async def test_many_stores_can_start_at_once(path: Path) -> None:
    """Twenty stores on a file that does not exist create one schema, without an error."""
    stores = [sqlite(path) for _ in range(20)]
    await asyncio.gather(
        *(store.save(f"run {number}", snapshot()) for number, store in enumerate(stores))
    )
    assert len(await stores[0].list()) == 20
    for store in stores:
        await store.close()


async def test_a_failed_migration_is_retried(path: Path) -> None:
    """Once the obstacle is removed, the same store works."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE perdure_runs_journal (something TEXT)")
        async with sqlite(path) as store:
            with pytest.raises(StoreError, match="perdure_runs_journal"):
                await store.save("run", snapshot())
            assert [row[1] for row in schema_of(other)] == ["perdure_runs_journal"]
            other.execute("DROP TABLE perdure_runs_journal")
            await store.save("run", snapshot())


async def test_the_schema_of_a_newer_version_is_refused(path: Path) -> None:
    """An older program does not write to tables whose rules it does not know."""
    async with sqlite(path) as store:
        await store.save("run", snapshot())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO perdure_runs_migrations (version, name) VALUES (99, 'x')")
    async with sqlite(path) as store:
        with pytest.raises(StoreError, match="newer version of perdure"):
            await store.load("run")


async def test_stores_on_two_tables_share_a_file(path: Path) -> None:
    """Each table has its own journal, inbox and migrations."""
    async with sqlite(path) as one, sqlite(path, table="others") as other:
        await one.save("run", snapshot("a"))
        assert await other.load("run") is None
        await other.save("run", snapshot("b"))
        assert await one.load("run") == snapshot("a")


async def test_awaitlys_rows_are_not_changed(path: Path, awaitly: sqlite3.Connection) -> None:
    """The missing columns are added to awaitly's table; its own stay unchanged."""
    rows = [("a", json.dumps(snapshot("x")), "2024-05-01 09:30:00"), ("b", "{}", None)]
    awaitly.executemany("INSERT INTO awaitly_snapshots VALUES (?, ?, ?)", rows)
    async with sqlite(path, table="awaitly_snapshots") as store:
        assert await store.load("a") == snapshot("x")
        assert len(await store.list()) == 2
        stored = awaitly.execute("SELECT id, snapshot, updated_at FROM awaitly_snapshots")
        assert stored.fetchall() == rows


async def test_awaitlys_resume_state_is_loaded_as_a_snapshot(
    path: Path, awaitly: sqlite3.Connection
) -> None:
    """It has the steps by their keys and the row's time, and the run can be continued."""
    row = ("run", json.dumps(RESUME_STATE), "2024-05-01 09:30:00")
    awaitly.execute("INSERT INTO awaitly_snapshots VALUES (?, ?, ?)", row)
    async with sqlite(path, table="awaitly_snapshots") as store:
        loaded = await store.load("run")
        assert loaded is not None
        assert loaded["steps"] == {"user:1": {"ok": True, "value": {"x": 1}}}
        assert loaded["execution"]["lastUpdated"] == "2024-05-01T09:30:00.000Z"
        [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR)])
        assert isinstance(grant, Grant)
        await store.append([Entry("run", grant.lease.epoch, 1, delta("b"))])
        merged = await store.load("run")
        assert merged is not None
        assert list(merged["steps"]) == ["user:1", "b"]


async def test_awaitlys_times_are_listed_in_order_with_ours(
    path: Path, awaitly: sqlite3.Connection
) -> None:
    """Its times have a space and whole seconds, ours a T and fractions."""
    at = ["2024-05-01 09:30:00", "2024-05-01T09:30:00.500000Z", "2024-05-01 09:30:01"]
    for time in at:
        awaitly.execute("INSERT INTO awaitly_snapshots VALUES (?, '{}', ?)", (time, time))
    async with sqlite(path, table="awaitly_snapshots") as store:
        lines = await store.list()
        assert [line.id for line in lines] == at[::-1]
        assert [line.updated_at for line in lines] == [
            datetime(2024, 5, 1, 9, 30, 1, tzinfo=UTC),
            datetime(2024, 5, 1, 9, 30, 0, 500_000, tzinfo=UTC),
            datetime(2024, 5, 1, 9, 30, 0, tzinfo=UTC),
        ]
        assert [line.id for line in await store.list(after=lines[0].cursor)] == at[1::-1]


async def test_a_list_continues_after_any_time_that_another_program_wrote(
    path: Path, awaitly: sqlite3.Connection
) -> None:
    """Pages of one run list each run once, even those of the same second or without a time."""
    at = ["2024-05-01T09:30:00.000000Z", "2024-05-01 09:30:00", "2024-05-01", None, "yesterday"]
    for n, time in enumerate(at):
        awaitly.execute("INSERT INTO awaitly_snapshots VALUES (?, '{}', ?)", (f"{n}", time))
    async with sqlite(path, table="awaitly_snapshots") as store:
        pages, cursor = [], None
        while page := await store.list(limit=1, after=cursor):
            pages.append((page[0].id, page[0].updated_at))
            cursor = page[0].cursor
    assert pages == [
        ("1", datetime(2024, 5, 1, 9, 30, tzinfo=UTC)),
        ("0", datetime(2024, 5, 1, 9, 30, tzinfo=UTC)),
        ("2", datetime(2024, 5, 1, tzinfo=UTC)),
        ("4", datetime(1970, 1, 1, tzinfo=UTC)),
        ("3", datetime(1970, 1, 1, tzinfo=UTC)),
    ]


async def test_awaitly_reads_what_perdure_writes(path: Path, awaitly: sqlite3.Connection) -> None:
    """At rest, a row contains the complete snapshot as text."""
    async with sqlite(path, table="awaitly_snapshots") as store:
        [grant] = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        epoch = grant.lease.epoch
        await store.append([Entry("run", epoch, 1, delta("a"))])
        whole = as_json(snapshot("a", status="completed"))
        await store.append([Entry("run", epoch, 2, whole, rest=Rest("completed"))])
    stored = awaitly.execute("SELECT snapshot, typeof(snapshot) FROM awaitly_snapshots")
    assert stored.fetchall() == [(whole.decode(), "text")]


async def test_a_run_that_awaitly_started_is_continued(
    path: Path, awaitly: sqlite3.Connection
) -> None:
    """Its row can be leased and journaled like any other."""
    awaitly.execute(UPSERT_OF_AWAITLY, ("run", json.dumps(snapshot("a"))))
    async with sqlite(path, table="awaitly_snapshots") as store:
        [grant] = await store.acquire([LeaseRequest("run", "ana", HOUR)])
        assert isinstance(grant, Grant)
        assert list(grant.snapshot["steps"]) == ["a"]
        entry = Entry("run", grant.lease.epoch, 1, delta("b"))
        assert await store.append([entry]) == [Verdict.ACCEPTED]
        loaded = await store.load("run")
        assert loaded is not None
        assert list(loaded["steps"]) == ["a", "b"]


async def test_nothing_remains_of_a_row_that_awaitly_deletes(
    path: Path, awaitly: sqlite3.Connection
) -> None:
    """The journal is deleted with the row, and the epoch stays stale when the id is reused."""
    async with sqlite(path, table="awaitly_snapshots") as store:
        [grant] = await store.acquire(
            [LeaseRequest("run", "ana", HOUR, create=as_json(snapshot()))]
        )
        assert isinstance(grant, Grant)
        await store.append([Entry("run", grant.lease.epoch, 1, delta("a"))])
        await send_one(store, "run", "hello", b"1")
        awaitly.execute("DELETE FROM awaitly_snapshots")
        awaitly.execute(UPSERT_OF_AWAITLY, ("run", json.dumps(snapshot("new"))))
        assert await store.load("run") == snapshot("new")
        assert await store.inbox("run") == []
        late = Entry("run", grant.lease.epoch, 2, delta("b"))
        assert await store.append([late]) == [Verdict.FENCED]


async def test_each_migration_is_logged_before_it_is_applied(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its number and their total, which `perdure store migrate` shows."""
    caplog.set_level("INFO", "perdure.stores")
    async with sqlite(path) as store:
        await store.list(limit=1)
    migrations = read_migrations("perdure.stores.sqlite")
    progress = [(record.__dict__["done"], record.__dict__["total"]) for record in caplog.records]
    assert progress == [(done, len(migrations)) for done in range(len(migrations))]
    assert "table perdure_runs: applying migration 0001_runs (1 of 7)" in caplog.text
