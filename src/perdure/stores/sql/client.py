"""The client that `SqlStore` stands on: one method, and what it may give."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from perdure.errors import StoreError, StoreUnavailable
from perdure.stores.sql.dialects import ParamStyle


class SqlClient(Protocol):
    """Anything that runs a statement, each in a transaction of its own, which it commits.

    A client may have an attribute `paramstyle` that says how it wants values marked: "dollar"
    (`$1`), "format" (`%s`), "qmark" (`?`) or "named" (`:p1`).
    """

    async def query(self, sql: str, params: Sequence[Any], /) -> Any:
        """Give the rows and how many rows were affected: a pair, or an object with `rows` and
        `rowcount`. A row is a tuple, a mapping in the order of its columns, or iterable."""
        ...


class Answer:
    """What one statement gave."""

    __slots__ = ("affected", "rows")

    def __init__(self, rows: Sequence[tuple[Any, ...]], affected: int) -> None:
        self.rows = rows
        self.affected = affected


async def ask(client: SqlClient, sql: str, params: Sequence[Any]) -> Answer:
    """Give what the client answers, in one form; its exceptions become ours."""
    try:
        answer = await client.query(sql, params)
    except (OSError, TimeoutError) as error:
        name = type(client).__name__
        raise StoreUnavailable(f"{name} cannot reach its database: {error}") from error
    except Exception as error:
        name = type(client).__name__
        raise StoreError(f"{name} did not do what it was asked: {error}") from error
    rows, affected = answer if isinstance(answer, tuple) else (answer.rows, answer.rowcount)
    return Answer([_values(row) for row in rows or ()], affected or 0)


def _values(row: Any) -> tuple[Any, ...]:
    values = row.values() if isinstance(row, Mapping) else row
    return tuple(value.decode() if isinstance(value, bytes) else value for value in values)


def sqlalchemy_client(engine: Any) -> "SqlalchemyClient":
    """Give the client of a SQLAlchemy `AsyncEngine`, which is never disposed here.

    store = SqlStore(sqlalchemy_client(engine), dialect="postgres")
    """
    return SqlalchemyClient(engine)


class SqlalchemyClient:
    """Runs each statement in a transaction of a SQLAlchemy engine."""

    paramstyle: ParamStyle = "named"

    def __init__(self, engine: Any) -> None:
        # Lazy: whoever has an engine has the package too.
        from sqlalchemy import text

        self._engine = engine
        self._text = text

    async def query(self, sql: str, params: Sequence[Any], /) -> tuple[Sequence[Any], int]:
        """Give the rows and how many rows were affected."""
        values = {f"p{number}": value for number, value in enumerate(params, 1)}
        async with self._engine.begin() as connection:
            result = await connection.execute(self._text(sql), values)
            return (result.fetchall() if result.returns_rows else []), result.rowcount
