"""`trigger(connection=…)`: the run exists if and only if the caller's transaction commits."""

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiosqlite
import asyncmy
import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from perdure import Client, Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument, MissingAbility, RunConflict
from perdure.stores import MemoryStore, open_store
from tests.servers.mysql import connect_arguments

Connect = Callable[["Place"], AbstractAsyncContextManager[Any]]


@workflow("ship")
async def ship(step: Step, order: int) -> str:
    return f"shipped {order}"


@dataclass
class Place:
    """A database, and how SQLAlchemy calls it."""

    url: str
    dialect: str


@asynccontextmanager
async def by_session(place: Place) -> AsyncIterator[Any]:
    engine = create_async_engine(place.dialect)
    try:
        async with AsyncSession(engine) as session, session.begin():
            yield session
    finally:
        await engine.dispose()


@asynccontextmanager
async def by_connection(place: Place) -> AsyncIterator[Any]:
    engine = create_async_engine(place.dialect)
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def by_asyncpg(place: Place) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(place.url, min_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(isolation="repeatable_read"),
    ):
        yield connection


@asynccontextmanager
async def by_asyncmy(place: Place) -> AsyncIterator[Any]:
    connection = await asyncmy.connect(**connect_arguments(place.url), charset="utf8mb4")
    try:
        yield connection
        await connection.commit()
    finally:
        await connection.ensure_closed()


@asynccontextmanager
async def by_sqlite3(place: Place) -> AsyncIterator[Any]:
    with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as connection, connection:
        connection.row_factory = lambda *_: {"a": "dict"}
        connection.execute("BEGIN")
        yield connection


@asynccontextmanager
async def by_aiosqlite(place: Place) -> AsyncIterator[Any]:
    async with aiosqlite.connect(place.url.removeprefix("sqlite:///")) as connection:
        await connection.execute("BEGIN")
        yield connection
        await connection.commit()


WAYS = [
    ("postgres", by_session),
    ("postgres", by_connection),
    ("postgres", by_asyncpg),
    ("mysql", by_session),
    ("mysql", by_asyncmy),
    ("sqlite", by_session),
    ("sqlite", by_connection),
    ("sqlite", by_sqlite3),
    ("sqlite", by_aiosqlite),
]


def place_of(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if backend == "sqlite":
        path = tmp_path / "runs.db"
        return Place(f"sqlite:////{path}", f"sqlite+aiosqlite:///{path}")
    url: str = request.getfixturevalue(f"{backend}_url")
    driver = {"postgres": "postgresql+asyncpg://", "mysql": "mysql+asyncmy://"}[backend]
    return Place(url, driver + url.partition("://")[2])


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1].__name__}")
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Connect]:
    backend, connect = request.param
    return place_of(backend, request, tmp_path), connect


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


@asynccontextmanager
async def client_on(place: Place) -> AsyncIterator[Client]:
    async with Client(place.url, workflows=[ship]) as client:
        # The tables of a SQLite file must exist before a transaction of the user locks it.
        await client.list_runs(limit=1)
        yield client


class Oops(Exception):
    pass


# --- Every kind of connection


async def test_the_run_exists_when_the_transaction_commits(way: tuple[Place, Connect]) -> None:
    place, connect = way
    async with client_on(place) as client:
        async with connect(place) as connection:
            run = await client.trigger(
                ship, 7, run_id="1", tags={"é": "ü"}, delay="1h", connection=connection
            )
            assert (run.id, run.status) == ("1", "queued")
            assert await client.get_run("1") is None
        stored = await client.get_run("1")
        assert stored is not None
        assert (stored.status, stored.tags) == ("queued", {"é": "ü"})
        assert [each.id for each in await client.list_runs(tags={"é": "ü"})] == ["1"]


async def test_no_run_is_left_when_the_transaction_rolls_back(way: tuple[Place, Connect]) -> None:
    place, connect = way
    async with client_on(place) as client:
        try:
            async with connect(place) as connection:
                await client.trigger(ship, 7, run_id="1", connection=connection)
                raise Oops
        except Oops:
            pass
        assert await client.get_run("1") is None


async def test_an_existing_id_does_not_abort_the_transaction(way: tuple[Place, Connect]) -> None:
    place, connect = way
    async with client_on(place) as client:
        await client.trigger(ship, 7, run_id="old")
        async with connect(place) as connection:
            same = await client.trigger(ship, 7, run_id="old", connection=connection)
            new = await client.trigger(ship, 8, run_id="new", connection=connection)
            again = await client.trigger(ship, 8, run_id="new", connection=connection)
            with pytest.raises(RunConflict, match="payload is 7"):
                await client.trigger(ship, 9, run_id="old", connection=connection)
            with pytest.raises(RunConflict):
                await client.trigger(
                    ship, 7, run_id="old", if_exists="error", connection=connection
                )
        assert [run.status for run in (same, new, again)] == ["queued"] * 3
        assert {run.id for run in await client.list_runs()} == {"old", "new"}


# --- Refused


async def test_a_connection_that_commits_by_itself_is_refused(place: Place) -> None:
    engine = create_async_engine(place.dialect, isolation_level="AUTOCOMMIT")
    async with client_on(place) as client:
        async with engine.connect() as connection:
            with pytest.raises(InvalidArgument, match="with an open transaction"):
                await client.trigger(ship, 7, run_id="1", connection=connection)
        assert await client.list_runs() == []
    await engine.dispose()


async def test_a_driver_connection_without_a_transaction_is_refused(place: Place) -> None:
    engine = create_async_engine(place.dialect, isolation_level="AUTOCOMMIT")
    async with client_on(place) as client:
        async with engine.connect() as connection:
            raw = (await connection.get_raw_connection()).driver_connection
            with pytest.raises(InvalidArgument, match="with an open transaction"):
                await client.trigger(ship, 7, connection=raw)
        assert await client.list_runs() == []
    await engine.dispose()


async def test_a_connection_to_another_database_is_refused(place: Place, tmp_path: Path) -> None:
    other = place.dialect.rpartition("/")[0] + "/postgres"
    if "mysql" in other:
        other = place.dialect.rpartition("/")[0] + "/mysql"
    if "sqlite" in other:
        other = f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"
    engine = create_async_engine(other)
    async with client_on(place) as client, engine.connect() as connection:
        with pytest.raises(InvalidArgument, match="to"):
            await client.trigger(ship, 7, connection=connection)
        # The transaction was not aborted.
        assert (await connection.execute(text("SELECT 1"))).scalar() == 1
    await engine.dispose()


async def test_a_store_without_the_ability_says_so() -> None:
    with pytest.raises(MissingAbility, match="transactional_enqueue"):
        await Client(MemoryStore(), workflows=[ship]).trigger(ship, 7, connection=object())


async def test_a_finished_run_is_not_started_again_in_a_transaction(place: Place) -> None:
    async with client_on(place) as client, by_session(place) as session:
        with pytest.raises(InvalidArgument, match="if_exists"):
            await client.trigger(
                ship, 7, run_id="1", if_exists="restart_if_over", connection=session
            )


async def test_a_new_sqlite_file_is_refused_at_once(tmp_path: Path) -> None:
    """The store cannot create its tables while the caller's transaction has locked the file."""
    path = tmp_path / "new.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
        connection.execute("INSERT INTO orders VALUES (1)")
        async with Client(f"sqlite:////{path}", workflows=[ship]) as client:
            with pytest.raises(Exception, match="use the store once"):
                await client.trigger(ship, 7, connection=connection)


# --- With a runtime, a worker, and in a step


async def test_a_runtime_leaves_the_run_to_a_worker(place: Place) -> None:
    async with Runtime(place.url, workflows=[ship]) as runtime:
        await runtime.list_runs(limit=1)
        async with Worker(runtime):
            async with by_session(place) as session:
                run = await runtime.trigger(ship, 7, connection=session)
                assert run.status == "queued"
            assert await runtime.result(run, timeout="20s") == "shipped 7"


async def test_a_transactional_step_starts_a_run_exactly_once(place: Place) -> None:
    @workflow("order")
    async def order(step: Step) -> None:
        await step.transaction("start", start)
        await step.transaction("fail", fail)

    async def start(connection: Any) -> None:
        await runtime.trigger(ship, 7, run_id="kept", connection=connection)

    async def fail(connection: Any) -> None:
        await runtime.trigger(ship, 7, run_id="dropped", connection=connection)
        raise Oops

    async with Runtime(place.url, workflows=[ship, order]) as runtime:
        run = await runtime.trigger(order, run_id="order")
        assert isinstance(run.error, Oops)
        assert {each.id for each in await runtime.list_runs()} == {"kept", "order"}


# --- kill -9


KILLED = """
import asyncio, os, signal, sys
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from perdure import Client

async def main(url, dialect, moment):
    async with Client(url) as client, AsyncSession(create_async_engine(dialect)) as session:
        await client.list_runs(limit=1)
        await session.execute(text("INSERT INTO orders VALUES (7)"))
        await client.trigger("ship", 7, run_id="7", connection=session)
        if moment == "after commit":
            await session.commit()
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("moment", ["before commit", "after commit"])
async def test_a_killed_process_leaves_both_or_neither(place: Place, moment: str) -> None:
    engine = create_async_engine(place.dialect)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    arguments = ["-c", KILLED, place.url, place.dialect, moment]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    assert await process.wait() == -signal.SIGKILL
    async with open_store(place.url) as store, engine.connect() as connection:
        orders = (await connection.execute(text("SELECT count(*) FROM orders"))).scalar()
        exists = await store.load("7") is not None
    await engine.dispose()
    assert (orders == 1, exists) == ((moment == "after commit"),) * 2
