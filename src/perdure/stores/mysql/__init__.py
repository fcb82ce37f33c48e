"""Runs in MySQL or MariaDB: a batch of journal entries is one statement and one commit."""

from ssl import SSLContext
from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores.mysql.database import Database
from perdure.stores.mysql.pool import open_connections
from perdure.stores.mysql.schema import Names
from perdure.stores.mysql.store import MysqlStore

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
    """Give the store on a MySQL or MariaDB database, whose tables are made at first use.

    `pool` is an asyncmy pool of yours, which is never closed here and whose sessions stay as they
    are. `ssl` is an `SSLContext`, or True to encrypt without looking at the certificate; the URL
    may say it, too: `?ssl=true` or `?ssl_ca=file`. `connect_timeout` is how long a server that is
    away is tried for, `timeout` how long it may take to answer.

    An answer survives a power cut when the server flushes at each commit, as it does by default
    (`innodb_flush_log_at_trx_commit=1`); one that does not is warned of.

        store = mysql("mysql://user:password@localhost/mydb", prefix="orders:")
    """
    capabilities = Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        inbox=True,
        transaction=True,
        maintenance=True,
        shared="network",
        survives="power_loss",
        max_value_size=max_value_size,
    )
    names = Names(table)
    database = Database(
        open_connections(url, pool, max_connections, ssl, connect_timeout, clock),
        timeout=parse_duration(timeout, "timeout").total_seconds(),
    )
    return MysqlStore(database, names, prefix=prefix, capabilities=capabilities)
