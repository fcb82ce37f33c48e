"""What is special about `SqlStore`: clients, dialects, migrations, pauses between statements."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from perdure.errors import InvalidArgument, StoreClosed, StoreError, StoreUnavailable
from perdure.store import (
    Delivery,
    Entry,
    Grant,
    LeaseRequest,
    NewMessage,
    NewRun,
    Query,
    Rest,
    Verdict,
)
from perdure.stores import SqlStore
from perdure.stores._migrations import Migration, read_migrations
from perdure.stores.sql import sqlalchemy_client
from perdure.stores.sql.client import query
from perdure.stores.sql.dialects import number_parameters
from perdure.testing.conformance.harness import (
    acquire_run,
    request_run,
    send_one,
    step,
    supports,
    write_rest,
)
from perdure.testing.conformance.samples import as_json, delta, snapshot
from tests.stores.sql.clients import (
    AiosqliteClient,
    AsyncpgClient,
    CrashingClient,
    PausedClient,
    engine_on,
)

LONG = timedelta(minutes=5)


async def run_lifecycle(store: SqlStore) -> None:
    """Take a run through all of its states."""
    await store.enqueue([NewRun("run", "order", as_json(snapshot("a")))])
    [grant] = await store.claim("ana", LONG, 10, supports=supports("order"))
    epoch = grant.lease.epoch
    assert await send_one(store, "run", "paid", b'"yes"', dedup_id="x") is Delivery.DELIVERED
    assert await send_one(store, "run", "paid", b'"yes"', dedup_id="x") is Delivery.DUPLICATE
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
    """All statements work with SQLAlchemy's parameters."""
    engine = engine_on(mysql_url, "mysql+asyncmy")
    await run_lifecycle(SqlStore(sqlalchemy_client(engine), dialect="mysql"))
    await engine.dispose()


async def test_an_engine_on_sqlite(tmp_path: Path) -> None:
    """All statements work with SQLAlchemy's parameters."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    await run_lifecycle(SqlStore(sqlalchemy_client(engine), dialect="sqlite"))
    await engine.dispose()


async def test_a_table_may_be_in_a_schema(postgres_url: str) -> None:
    """`schema.table` is accepted where the database has schemas."""
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2) as pool:
        await pool.execute("CREATE SCHEMA billing")
        await run_lifecycle(SqlStore(AsyncpgClient(pool), dialect="postgres", table="billing.runs"))


async def test_a_run_that_is_lost_while_it_is_read_is_not_granted(tmp_path: Path) -> None:
    """Wherever an owner is paused, it never gets a snapshot without its journal, which another
    owner may have folded in the meantime."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client = AiosqliteClient(connection)
        store, at = SqlStore(client, dialect="sqlite"), timedelta(0)

        async def take_over() -> None:
            grant = await acquire_run(store, "run", "cem")
            assert await write_rest(store, grant, Rest("suspended"), "a", "b") is Verdict.ACCEPTED

        for n in range(1, 12):
            old = await acquire_run(store, "run", "ana", at)
            await store.append([step(old, 1, "a")])
            paused = SqlStore(PausedClient(client, n, take_over), dialect="sqlite")
            grant = await request_run(paused, "run", "bob", at)
            assert grant is None or list(grant.snapshot["steps"]) in (["a"], ["a", "b"])
            await store.delete("run")


async def state_of(store: SqlStore) -> tuple[list[str] | None, int]:
    """Return the steps of the run, and how many messages it has."""
    loaded = await store.load("run")
    return None if loaded is None else list(loaded["steps"]), len(await store.inbox("run"))


async def save(store: SqlStore, grant: Grant, message: str) -> None:
    await store.save("run", snapshot("saved"))


async def consume(store: SqlStore, grant: Grant, message: str) -> None:
    await store.append([Entry("run", grant.lease.epoch, 2, delta("b"), consumes=(message,))])


async def suspend(store: SqlStore, grant: Grant, message: str) -> None:
    folded, rest = as_json(snapshot("a", "b")), Rest("waiting", awaits=("paid",))
    entry = Entry("run", grant.lease.epoch, 2, folded, rest=rest, consumes=(message,))
    await store.append([entry])


async def end(store: SqlStore, grant: Grant, message: str) -> None:
    rest = Rest("completed", delete=True)
    await store.append([Entry("run", grant.lease.epoch, 2, b"", rest=rest)])


async def delete(store: SqlStore, grant: Grant, message: str) -> None:
    await store.delete("run")


@pytest.mark.parametrize(
    ("verb", "after"),
    [
        (save, (["saved"], 1)),
        (consume, (["a", "b"], 0)),
        (suspend, (["a", "b"], 0)),
        (end, (None, 0)),
        (delete, (None, 0)),
    ],
)
async def test_a_crash_between_statements_leaves_the_state_before_or_after(
    tmp_path: Path, verb: Callable[[SqlStore, Grant, str], Awaitable[None]], after: object
) -> None:
    """Entries and messages are never lost, consumed without their entry, or merged twice."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client, set_up = AiosqliteClient(connection), 2
        store = SqlStore(client, dialect="sqlite")
        for statements in range(30):
            grant = await acquire_run(store, "run")
            await store.append([step(grant, 1, "a")])
            await send_one(store, "run", "paid", b"1")
            [message] = await store.inbox("run")
            crashing = SqlStore(CrashingClient(client, set_up + statements), dialect="sqlite")
            try:
                await verb(crashing, grant, message.id)
            except StoreError:
                assert await state_of(store) in ((["a"], 1), after)
                await store.delete("run")
                continue
            assert await state_of(store) == after
            return
        pytest.fail("the verb took more than 30 statements")


async def enqueue_tagged(store: SqlStore) -> None:
    run = NewRun("run", "order", as_json(snapshot()), tags=("plan=pro", "x=1"))
    await store.enqueue([run, NewRun("other", "order", as_json(snapshot()))])


async def acquire_tagged(store: SqlStore) -> None:
    tags = ("plan=pro", "x=1")
    await store.acquire([LeaseRequest("run", "bob", LONG, as_json(snapshot()), tags=tags)])


async def rest_tagged(store: SqlStore) -> None:
    rest = Rest("completed", tags=("plan=pro", "x=1"))
    await write_rest(store, await acquire_run(store, "run", "ana"), rest)


async def save_tagged(store: SqlStore) -> None:
    await store.save("run", snapshot(metadata={"tags": {"plan": "pro", "x": "1"}}))


@pytest.mark.parametrize("verb", [enqueue_tagged, acquire_tagged, rest_tagged, save_tagged])
@pytest.mark.parametrize("old_tags", [None, (), ("plan=free",)])
async def test_a_run_is_found_by_the_tags_it_has_wherever_its_writer_crashes(
    tmp_path: Path,
    verb: Callable[[SqlStore], Awaitable[None]],
    old_tags: tuple[str, ...] | None,
) -> None:
    """Tags are written before the run; those that a crash leaves behind are ignored, and deleted
    with the run."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client, set_up = AiosqliteClient(connection), 2
        store, is_done = SqlStore(client, dialect="sqlite"), False
        for statements in range(40):
            if old_tags is not None:
                await store.enqueue([NewRun("run", "order", as_json(snapshot()), tags=old_tags)])
            crashing = SqlStore(CrashingClient(client, set_up + statements), dialect="sqlite")
            try:
                await verb(crashing)
                is_done = True
            except StoreError:
                pass
            await check_tags(store)
            await store.delete("run")
            if is_done:
                tag_rows = await connection.execute_fetchall("SELECT * FROM workflow_runs_tags")
                assert list(tag_rows) == []
                return
        pytest.fail("the verb took more than 40 statements")


async def check_tags(store: SqlStore) -> None:
    """Check that the run is found by its tags and by no others."""
    (run,) = await store.summaries(["run"])
    for tag in ("plan=pro", "plan=free", "x=1"):
        runs = (await store.search(Query(tags=(tag,)), 10)).runs
        has_tag = run is not None and tag in run.tags
        assert [each.id for each in runs] == (["run"] if has_tag else [])


async def test_duplicates_in_a_batch_are_distinguished_from_new_messages(tmp_path: Path) -> None:
    """One statement sends the batch; its receipts name those that were there before."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        store = SqlStore(AiosqliteClient(connection), dialect="sqlite")
        await acquire_run(store, "run")
        await send_one(store, "run", "paid", b"1", dedup_id="b")
        names = ["a", "b", None, "c", "a"]
        receipts = await store.send([NewMessage("run", "paid", b"1", name) for name in names])
        assert [(receipt.delivery.value, receipt.unconsumed) for receipt in receipts] == [
            ("delivered", 2),
            ("duplicate", 2),
            ("delivered", 3),
            ("delivered", 4),
            ("duplicate", 4),
        ]


async def test_many_stores_can_start_at_once(postgres_url: str) -> None:
    """All of them migrate, without an error."""
    async with asyncpg.create_pool(postgres_url, min_size=10, max_size=20) as pool:
        stores = [SqlStore(AsyncpgClient(pool), dialect="postgres") for _ in range(20)]
        await asyncio.gather(*(store.save(f"{n}", snapshot()) for n, store in enumerate(stores)))
        assert len(await stores[0].list()) == 20


@dataclass
class Result:
    rows: list[dict[str, Any]]
    rowcount: int


class FakeClient:
    """Returns or raises a fixed answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_rows_may_be_mappings_in_an_object() -> None:
    """As other clients return them: an object with `rows` and `rowcount`."""
    client = FakeClient(Result([{"version": 1, "name": b"x"}], 1))
    assert await query(client, "SELECT 1", ()) == ([(1, "x")], 1)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ConnectionResetError("reset"), StoreUnavailable), (ValueError("odd"), StoreError)],
)
async def test_errors_of_the_client_are_translated(
    raised: Exception, expected: type[StoreError]
) -> None:
    """The cause is the client's exception."""
    store = SqlStore(FakeClient(raised), dialect="mysql")
    with pytest.raises(expected, match="FakeClient") as caught:
        await store.load("run")
    assert caught.value.__cause__ is raised


async def test_a_failed_migration_is_retried(tmp_path: Path) -> None:
    """Statements that succeeded before can be repeated."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client = AiosqliteClient(connection)
        for statements in range(8):
            store = SqlStore(CrashingClient(client, statements), dialect="sqlite")
            with pytest.raises(StoreError):
                await store.load("run")
        await run_lifecycle(SqlStore(client, dialect="sqlite"))


async def test_the_schema_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """An older program does not write to tables whose rules it does not know."""
    async with aiosqlite.connect(tmp_path / "runs.db", isolation_level=None) as connection:
        client = AiosqliteClient(connection)
        await SqlStore(client, dialect="sqlite").save("run", snapshot())
        await connection.execute("INSERT INTO workflow_runs_migrations VALUES (99)")
        with pytest.raises(StoreError, match="newer version of perdure"):
            await SqlStore(client, dialect="sqlite").load("run")


async def test_a_closed_store_refuses_calls() -> None:
    """Its client stays open."""
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
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    """The error names the option."""
    valid: dict[str, Any] = {"client": FakeClient(([], 0)), "dialect": "sqlite"}
    arguments = {**valid, **options}
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        SqlStore(arguments.pop("client"), **arguments)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("qmark", "a = ? AND b LIKE '%' OR c = ?"),
        ("format", "a = %s AND b LIKE '%%' OR c = %s"),
        ("dollar", "a = $1 AND b LIKE '%' OR c = $2"),
        ("named", "a = :p1 AND b LIKE '%' OR c = :p2"),
    ],
)
def test_parameters_have_the_style_of_the_client(style: Any, expected: str) -> None:
    """Drivers have different styles."""
    assert number_parameters("a = ? AND b LIKE '%' OR c = ?", style) == expected


def migrations(dialect: str) -> Sequence[Migration]:
    return read_migrations("perdure.stores.sql", f"migrations/{dialect}")


@pytest.mark.parametrize("dialect", ["postgres", "mysql", "sqlite"])
def test_migrations_are_numbered_without_a_gap(dialect: str) -> None:
    """All databases have the same versions."""
    numbers = [migration.version for migration in migrations(dialect)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers == [migration.version for migration in migrations("postgres")]
