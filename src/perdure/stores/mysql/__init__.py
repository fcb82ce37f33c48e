"""Runs in MySQL or MariaDB: a batch of journal entries is one statement and one commit."""

from ssl import SSLContext
from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores.mysql.database import Database
from perdure.stores.mysql.pool import open_pool
from perdure.stores.mysql.schema import Tables
from perdure.stores.mysql.store import MysqlBackend, MysqlStore

__all__ = ["MysqlStore", "mysql"]


def mysql(
    url: str | None = None,
    *,
    table: str = "perdure_runs",
    prefix: str = "",
    pool: Any = None,
    max_connections: int = 10,
    ssl: SSLContext | bool | None = None,
    connect_timeout: Duration = 10,
    timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> MysqlStore:
    """Return a store in a MySQL or MariaDB database; its tables are created on first use.

    `pool` is an asyncmy pool, which the store uses and never closes, and whose sessions it leaves
    as they are. `ssl` is an `SSLContext`, or True to encrypt without checking the certificate; the
    URL may contain it instead: `?ssl=true` or `?ssl_ca=file`. `connect_timeout` is how long to
    retry while the server is unavailable, and `timeout` how long a statement may take.

    Committed records survive a power failure if the server flushes at each commit, as it does by
    default (`innodb_flush_log_at_trx_commit=1`); otherwise a warning is logged.

        store = mysql("mysql://user:password@localhost/mydb", prefix="orders:")
    """
    capabilities = Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        queues=True,
        inbox=True,
        transaction=True,
        handoff=True,
        transactional_enqueue=True,
        maintenance=True,
        search=True,
        shared="network",
        survives="power_loss",
        max_value_size=max_value_size,
    )
    tables = Tables(table)
    database = Database(
        open_pool(url, pool, max_connections, ssl, connect_timeout, clock),
        timeout=parse_duration(timeout, "timeout").total_seconds(),
    )
    backend = MysqlBackend(database, tables, prefix=prefix)
    return MysqlStore(backend, "MySQL", capabilities)
