"""Runs in PostgreSQL: a batch of writes is one statement, one round trip and one commit."""

from typing import TYPE_CHECKING, Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores.postgres.database import open_database
from perdure.stores.postgres.keyvalue import PostgresKeyValue
from perdure.stores.postgres.schema import Tables
from perdure.stores.postgres.store import NotifyingPostgresStore, PostgresBackend, PostgresStore

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["PostgresKeyValue", "PostgresStore", "postgres"]


def postgres(
    url: str | None = None,
    *,
    table: str = "perdure_runs",
    prefix: str = "",
    pool: Any = None,
    engine: "AsyncEngine | None" = None,
    prepared_statements: bool = True,
    max_connections: int = 10,
    connect_timeout: Duration = 10,
    timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> PostgresStore:
    """Return a store in a PostgreSQL database; its tables are created on first use.

    `table` may include a schema (`"billing.runs"`) and may be awaitly's own table. `pool` is an
    asyncpg pool, `engine` SQLAlchemy's `AsyncEngine` on `postgresql+asyncpg`; passed instead of a
    URL, the store uses its connections and never closes it. Behind a pooler in transaction mode,
    such as PgBouncer, pass `prepared_statements=False`; the store then sends no notifications.
    `connect_timeout` is how long to retry while the server is unavailable, and `timeout` how long a
    statement may take.

        store = postgres("postgresql://localhost/mydb", prefix="orders:")
    """
    tables = Tables(table)
    database = open_database(
        url,
        tables.table,
        pool=pool,
        engine=engine,
        prepared_statements=prepared_statements,
        max_connections=max_connections,
        connect_timeout=connect_timeout,
        timeout=timeout,
        clock=clock,
    )
    backend = PostgresBackend(database, tables, prefix=prefix, clock=clock)
    store = NotifyingPostgresStore if prepared_statements else PostgresStore
    return store(backend, "PostgreSQL", _capabilities(prepared_statements, max_value_size))


def _capabilities(notify: bool, max_value_size: int) -> Capabilities:
    return Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        queues=True,
        inbox=True,
        transaction=True,
        transactional_enqueue=True,
        handoff=True,
        notify=notify,
        maintenance=True,
        search=True,
        shared="network",
        survives="power_loss",
        max_value_size=max_value_size,
    )
