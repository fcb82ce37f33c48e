"""The client that `SqlStore` works with, and the client of a SQLAlchemy engine."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.sql.dialects import ParamStyle


class SqlClient(Protocol):
    """Runs each statement in its own transaction, and commits it.

    A client may have an attribute `paramstyle`: "dollar" (`$1`), "format" (`%s`), "qmark" (`?`) or
    "named" (`:p1`).
    """

    async def query(self, sql: str, params: Sequence[Any], /) -> Any:
        """Return the rows and the number of affected rows.

        The result is a pair, or an object with `rows` and `rowcount`. A row is a tuple, a mapping
        in column order, or any other iterable.
        """
        ...


class Result(NamedTuple):
    """The rows that one statement returned, and how many rows it affected."""

    rows: Sequence[tuple[Any, ...]]
    rowcount: int


async def query(client: SqlClient, sql: str, params: Sequence[Any]) -> Result:
    """Run a statement; translate the client's result and exceptions."""
    try:
        answer = await client.query(sql, params)
    except (OSError, TimeoutError) as error:
        name = type(client).__name__
        raise StoreUnavailable(f"{name} cannot reach its database: {error}") from error
    except Exception as error:
        raise StoreError(f"{type(client).__name__} failed: {error}") from error
    rows, rowcount = answer if isinstance(answer, tuple) else (answer.rows, answer.rowcount)
    return Result([_values(row) for row in rows or ()], rowcount or 0)


def _values(row: Any) -> tuple[Any, ...]:
    values = row.values() if isinstance(row, Mapping) else row
    return tuple(value.decode() if isinstance(value, bytes) else value for value in values)


def sqlalchemy_client(engine: Any) -> "SqlalchemyClient":
    """Return the client of a SQLAlchemy `AsyncEngine`, which it never disposes.

    store = SqlStore(sqlalchemy_client(engine), dialect="postgres")
    """
    return SqlalchemyClient(engine)


class SqlalchemyClient:
    """Runs each statement in a transaction of a SQLAlchemy engine."""

    paramstyle: ParamStyle = "named"

    def __init__(self, engine: Any) -> None:
        # SQLAlchemy is optional, but a caller that passes an engine has it installed.
        from sqlalchemy import text

        self._engine = engine
        self._text = text

    async def query(self, sql: str, params: Sequence[Any], /) -> tuple[Sequence[Any], int]:
        """Return the rows and the number of affected rows."""
        values = {f"p{number}": value for number, value in enumerate(params, 1)}
        async with self._engine.begin() as connection:
            result = await connection.execute(self._text(sql), values)
            return (result.fetchall() if result.returns_rows else []), result.rowcount
