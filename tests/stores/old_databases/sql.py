"""Old SQL databases, filled by one query per recorded row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import Connection, connect
from typing import Any, ClassVar

import httpx
import psycopg
import pymysql

from tests.servers.mysql import connect_arguments
from tests.stores.old_databases import (
    COPIED,
    Row,
    Value,
    recorded,
    recorded_schema,
    split_statements,
)

_TIMES = ("updated_at", "wake_at")


class OldSql(ABC):
    """A connection to a database that is being filled.

    `kind` names what was recorded, and `schemas` the scripts that created the tables.
    """

    placeholder: ClassVar[str] = "%s"
    concat: ClassVar[str] = "{} || {}"

    def __init__(self, kind: str, *schemas: str) -> None:
        self._kind = kind
        self._schemas = schemas or (kind,)

    @abstractmethod
    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Run one statement."""

    def fill(self, copies: int) -> None:
        """Create the tables and fill them, in the end with so many copies of each run."""
        for schema in self._schemas:
            for statement in split_statements(recorded_schema(schema)):
                self.execute(statement)
        tables: dict[str, list[Row]] = recorded(self._kind)
        for table, rows in tables.items():
            if table.endswith("_floor"):
                self.execute(f"DELETE FROM {table}")
            for row in rows:
                self._insert(table, row)
        self.after_rows()
        for table, rows in tables.items():
            for row in rows:
                if row.get("run", row.get("id")) in (*COPIED, "awaitly"):
                    self._multiply(table, row, copies)
        self.finish()

    def after_rows(self) -> None:  # noqa: B027 - most databases need nothing
        """Do what is necessary before rows without a number are inserted."""

    def finish(self) -> None:  # noqa: B027 - not every connection has to commit
        """Commit, and let the database learn how its rows are distributed."""

    def insert_clause(self, table: str, columns: Sequence[str]) -> str:
        """Return the beginning of an INSERT."""
        return f"INSERT INTO {table} ({', '.join(columns)})"

    def earlier(self, value: Value) -> str:
        """Return an expression for a time that is so many seconds earlier as `n` says."""
        return f"{self.placeholder} - n * 1000000"

    def _insert(self, table: str, row: Row) -> None:
        values = ", ".join([self.placeholder] * len(row))
        insert = self.insert_clause(table, list(row))
        self.execute(f"{insert} VALUES ({values})", list(map(_decoded, row.values())))

    def _multiply(self, table: str, row: Row, copies: int) -> None:
        row = {name: value for name, value in row.items() if name != "seq"}
        expressions = ", ".join(self._expression(name, value) for name, value in row.items())
        sql = f"{self.insert_clause(table, list(row))} SELECT {expressions} {_numbers(copies)}"
        self.execute(sql, list(map(_decoded, row.values())))

    def _expression(self, column: str, value: Any) -> str:
        if column in ("id", "run"):
            return self.concat.format(self.concat.format(self.placeholder, "' '"), "n")
        if column in _TIMES and value is not None:
            return self.earlier(value)
        return self.placeholder


class OldPostgres(OldSql):
    """Filled through psycopg, which writes the values into the statement."""

    def __init__(self, connection: "psycopg.Connection[Any]", kind: str, *schemas: str) -> None:
        super().__init__(kind, *schemas)
        self._cursor = psycopg.ClientCursor(connection)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        self._cursor.execute(sql.encode(), values or None)

    def insert_clause(self, table: str, columns: Sequence[str]) -> str:
        clause = super().insert_clause(table, columns)
        return f"{clause} OVERRIDING SYSTEM VALUE" if "seq" in columns else clause

    def earlier(self, value: Value) -> str:
        if str(value).isdigit():
            return "CAST(%s AS bigint) - CAST(n AS bigint) * 1000000"
        return "CAST(%s AS timestamptz) - n * interval '1 second'"

    def after_rows(self) -> None:
        inbox = next(table for table in recorded(self._kind) if table.endswith("_inbox"))
        sequence = f"pg_get_serial_sequence('{inbox}', 'seq')"
        self.execute(f"SELECT setval({sequence}, (SELECT max(seq) FROM {inbox}))")

    def finish(self) -> None:
        self.execute("ANALYZE")


class OldMysql(OldSql):
    """Filled through PyMySQL."""

    concat = "CONCAT({}, {})"

    def __init__(self, connection: Any, kind: str) -> None:
        super().__init__(kind)
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values or None)

    def earlier(self, value: Value) -> str:
        if isinstance(value, int):
            return super().earlier(value)
        return "CAST(%s AS DATETIME(6)) - INTERVAL n SECOND"

    def finish(self) -> None:
        self._connection.commit()


class OldSqlite(OldSql):
    """Filled through the standard library."""

    placeholder = "?"

    def __init__(self, connection: Connection, kind: str) -> None:
        super().__init__(kind)
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        self._connection.execute(sql, values)

    def earlier(self, value: Value) -> str:
        if isinstance(value, int):
            return super().earlier(value)
        if len(str(value)) == len("2030-01-01 00:00:00"):
            return "datetime(?, '-' || n || ' seconds')"
        return "strftime('%Y-%m-%dT%H:%M:%f000Z', ?, '-' || n || ' seconds')"

    def finish(self) -> None:
        self._connection.commit()


class OldLibsql(OldSqlite):
    """Filled over HTTP."""

    def __init__(self, client: httpx.Client, kind: str) -> None:
        OldSql.__init__(self, kind)
        self._client = client

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        statement = {"sql": sql, "args": list(map(_hrana, values))}
        request = {"requests": [{"type": "execute", "stmt": statement}, {"type": "close"}]}
        response = self._client.post("/v2/pipeline", json=request).raise_for_status()
        result = response.json()["results"][0]
        if result["type"] == "error":
            raise AssertionError(f"{sql}: {result['error']['message']}")

    def finish(self) -> None:
        """Do nothing: each statement was committed."""


def _numbers(count: int) -> str:
    """Return a FROM clause with the numbers `n` from 1, which every database understands."""
    places = range(len(str(count)))
    digits = " UNION ALL ".join(f"SELECT {digit} AS digit" for digit in range(10))
    tables = ", ".join(f"({digits}) AS d{place}" for place in places)
    sum_of_digits = " + ".join(f"{10**place} * d{place}.digit" for place in places)
    return (
        f"FROM (SELECT {sum_of_digits} AS n FROM {tables}) AS numbers WHERE n BETWEEN 1 AND {count}"
    )


def _decoded(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _hrana(value: Value) -> dict[str, str]:
    if value is None:
        return {"type": "null"}
    return {"type": "integer" if isinstance(value, int) else "text", "value": str(value)}


def fill_sql(kind: str, address: str, copies: int) -> None:
    """Fill the empty database at a URL or path."""
    with _connected(kind, address) as database:
        database.fill(copies)


@contextmanager
def _connected(kind: str, address: str) -> Iterator[OldSql]:
    if kind in ("postgres", "postgres_jsonb", "sql_postgres"):
        schemas = ("awaitly_postgres", "postgres") if kind == "postgres_jsonb" else ()
        with psycopg.connect(address) as postgres:
            yield OldPostgres(postgres, kind, *schemas)
    elif kind in ("mysql", "sql_mysql"):
        with pymysql.connect(
            **connect_arguments(address), charset="utf8mb4", ssl_disabled=True
        ) as mysql:
            yield OldMysql(mysql, kind)
    elif kind == "libsql":
        with httpx.Client(base_url=address, timeout=120, verify=False) as client:
            yield OldLibsql(client, "sqlite")
    else:
        with closing(connect(Path(address))) as sqlite:
            yield OldSqlite(sqlite, kind)
