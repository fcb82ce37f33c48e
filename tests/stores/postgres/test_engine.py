"""The PostgreSQL store on the connections of a SQLAlchemy engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from perdure import Runtime, Step, workflow
from perdure.errors import InvalidArgument, StoreError, StoreUnavailable
from perdure.integrations.sqlalchemy import session
from perdure.stores import postgres
from perdure.stores.postgres import PostgresKeyValue
from perdure.testing.conformance.samples import snapshot
from tests.servers.process import Server, free_port


@pytest.fixture(scope="session")
def postgres_server(debian_postgres_server: Server) -> Server:
    """One of the two: how connections are pooled does not depend on the server."""
    return debian_postgres_server


def engine_for(url: str, **options: Any) -> AsyncEngine:
    return create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), **options)


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    # Long enough for a busy machine to replace the connections that a server has closed.
    engine = engine_for(postgres_url, pool_size=3, max_overflow=0, pool_timeout=2)
    yield engine
    await engine.dispose()


def terminate_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_an_engine_lends_its_connections_and_stays_open(engine: AsyncEngine) -> None:
    async with postgres(engine=engine) as store:
        await asyncio.gather(*(store.load(str(number)) for number in range(3)))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of QueuePool
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM perdure_runs"))).scalar() == 0


async def test_a_step_writes_with_a_session_of_the_same_engine(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE notes (note text, data jsonb)"))

    async def write(connection: Any, note: str) -> None:
        async with session(connection) as db:
            await db.execute(text("INSERT INTO notes VALUES (:note, '{}')"), {"note": note})

    @workflow("notes")
    async def notes(step: Step) -> None:
        await step.transaction("write", write, "hello")

    async with postgres(engine=engine) as store:
        assert (await Runtime(store).trigger(notes)).status == "completed"
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT note, data FROM notes"))
        assert rows.all() == [("hello", {})]


async def test_connections_that_the_server_closed_are_replaced(
    engine: AsyncEngine, postgres_url: str
) -> None:
    async with postgres(engine=engine) as store:
        async with engine.connect() as first, engine.connect() as second:
            lent = [await each.get_raw_connection() for each in (first, second)]
            drivers: list[Any] = [each.driver_connection for each in lent]
        terminate_connections(postgres_url)
        while not all(driver.is_closed() for driver in drivers):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(store.save(str(number), snapshot()) for number in range(5)))
        assert len(await store.list()) == 5


async def test_a_cancelled_statement_does_not_cost_the_pool_a_connection(
    engine: AsyncEngine, postgres_url: str
) -> None:
    async with postgres(engine=engine) as store:
        await store.save("run", snapshot())
        with psycopg.connect(postgres_url) as connection:
            connection.execute("LOCK TABLE perdure_runs")
            for _ in range(4):
                waiting = asyncio.ensure_future(store.load("run"))
                await asyncio.sleep(0.1)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        assert await store.load("run") is not None
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of QueuePool


async def test_a_pool_without_a_free_connection_is_an_unavailable_store(
    engine: AsyncEngine,
) -> None:
    async with engine.connect(), engine.connect(), engine.connect():
        with pytest.raises(StoreUnavailable, match="the engine's pool has no free connection"):
            await postgres(engine=engine).load("run")


async def test_a_server_that_cannot_be_reached_is_an_unavailable_store() -> None:
    engine = engine_for(f"postgresql://127.0.0.1:{free_port()}/shop")
    with pytest.raises(StoreUnavailable, match=r"PostgreSQL at 127\.0\.0\.1/shop is unavailable"):
        await postgres(engine=engine).load("run")


async def test_a_server_that_refuses_the_connection_says_why(postgres_url: str) -> None:
    engine = engine_for(postgres_url.rpartition("/")[0] + "/no_such_database")
    with pytest.raises(StoreError, match='database "no_such_database" does not exist'):
        await postgres(engine=engine).load("run")


async def test_a_key_value_store_takes_an_engine_too(engine: AsyncEngine) -> None:
    async with PostgresKeyValue(engine=engine) as kv:
        await kv.set("key", "value")
        assert await kv.get("key") == "value"


def test_another_driver_is_refused() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(InvalidArgument, match=r"AsyncEngine on postgresql\+asyncpg"):
        postgres(engine=engine)


def test_an_engine_and_a_url_are_refused() -> None:
    engine = engine_for("postgresql://localhost/db")
    with pytest.raises(InvalidArgument, match="one of url, pool and engine"):
        postgres("postgresql://localhost/db", engine=engine)
