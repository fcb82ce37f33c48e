"""Runs in any SQL database, through any client that can run a statement."""

from random import Random, SystemRandom

from perdure.errors import InvalidArgument
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._keyvalue import scope_of
from perdure.stores._shell import StoreShell
from perdure.stores.sql.backend import SqlBackend
from perdure.stores.sql.client import SqlalchemyClient, SqlClient, sqlalchemy_client
from perdure.stores.sql.dialects import DialectName, Statements, find_dialect, paramstyle_of
from perdure.stores.sql.keyvalue import KeyValueTable
from perdure.validation import check_prefix, check_random

__all__ = ["SqlClient", "SqlStore", "SqlalchemyClient", "sqlalchemy_client"]


class SqlStore(StoreShell[SqlBackend]):
    """Stores runs in a SQL database through your own client, which it never closes.

    A client is any object with `async query(sql, params)` that runs a statement, commits it, and
    returns the rows and the number of affected rows. `sqlalchemy_client` returns one for a
    SQLAlchemy engine. If there is a dedicated store for your database, it is faster.

        store = SqlStore(client, dialect="postgres")
    """

    def __init__(
        self,
        client: SqlClient,
        *,
        dialect: DialectName,
        table: str = "workflow_runs",
        prefix: str = "",
        random: Random | None = None,
        max_value_size: int = MAX_VALUE_SIZE,
    ) -> None:
        if not callable(getattr(client, "query", None)):
            raise InvalidArgument("client", client, "an object with `async query(sql, params)`")
        sql_dialect = find_dialect(dialect)
        style = paramstyle_of(client, sql_dialect)
        tables = Statements(
            sql_dialect, table, style, suffix="_documents", folder="migrations_keyvalue"
        )
        backend = SqlBackend(
            client,
            Statements(sql_dialect, table, style),
            KeyValueTable(client, tables, scope_of(check_prefix(prefix))),
            prefix=prefix,
            random=check_random(random or SystemRandom()),
        )
        is_local = dialect == "sqlite"
        capabilities = Capabilities(
            journal=True,
            lease="atomic",
            schedule=True,
            queues=True,
            inbox=True,
            maintenance=True,
            search=True,
            shared="machine" if is_local else "network",
            survives="process_crash" if is_local else "power_loss",
            max_value_size=max_value_size,
        )
        super().__init__(backend, "SQL", capabilities)
