"""Runs in PostgreSQL: a batch of writes is one statement, one round trip and one commit."""

from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.keyvalue import PostgresKeyValue
from perdure.stores.postgres.notify import HintingPostgresStore
from perdure.stores.postgres.pool import open_connections
from perdure.stores.postgres.schema import Names
from perdure.stores.postgres.store import PostgresStore

__all__ = ["PostgresKeyValue", "PostgresStore", "postgres"]


def postgres(
    url: str | None = None,
    *,
    table: str = "perdure_runs",
    prefix: str = "",
    pool: Any = None,
    prepared_statements: bool = True,
    max_connections: int = 10,
    connect_timeout: Duration = 10,
    timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> PostgresStore:
    """Give the store on a PostgreSQL database, whose tables are made at first use.

    `table` may name a schema (`"billing.runs"`) and may be awaitly's own. `pool` is an asyncpg pool
    of yours, which is never closed here. Behind a pooler in transaction mode, such as PgBouncer,
    pass `prepared_statements=False`; there are no hints then. `connect_timeout` is how long a
    server that is away is tried for, `timeout` how long it may take to answer.

        store = postgres("postgresql://localhost/mydb", prefix="orders:")
    """
    capabilities = Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        inbox=True,
        transaction=True,
        notify=prepared_statements,
        maintenance=True,
        shared="network",
        survives="power_loss",
        max_value_size=max_value_size,
    )
    names = Names(table)
    database = Database(
        open_connections(url, pool, max_connections, prepared_statements, connect_timeout, clock),
        table=names.table,
        prepared=prepared_statements,
        timeout=parse_duration(timeout, "timeout").total_seconds(),
    )
    if prepared_statements:
        return HintingPostgresStore(
            database, names, prefix=prefix, capabilities=capabilities, clock=clock
        )
    return PostgresStore(database, names, prefix=prefix, capabilities=capabilities)
