"""Strings under keys in PostgreSQL, with times to live by the database's clock."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.errors import InvalidArgument
from perdure.stores._keyvalue import DatabaseKeyValue, KeyValueBackend
from perdure.stores._prefix import end_of_prefix
from perdure.stores.postgres.database import Database, open_database
from perdure.stores.postgres.schema import Schema, Tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

GET = """
    SELECT key, value FROM {table}
    WHERE key = ANY ($1::text[]) AND (expires_at IS NULL OR expires_at > statement_timestamp())
"""

# Every write deletes up to 100 keys that have expired.
_PURGE = """
    WITH purged AS (
        DELETE FROM {table} WHERE key = ANY (ARRAY(
            SELECT key FROM {table} WHERE expires_at <= statement_timestamp() AND key <> $1
            LIMIT 100 FOR UPDATE SKIP LOCKED
        ))
    )
"""

SET = """
    {purge}
    INSERT INTO {table} (key, value, expires_at, updated_at)
    VALUES ($1, $2, statement_timestamp() + $3, statement_timestamp())
    ON CONFLICT (key) DO UPDATE SET
        value = excluded.value, expires_at = excluded.expires_at, updated_at = excluded.updated_at
"""

DELETE = """
    DELETE FROM {table} WHERE key = $1
    RETURNING expires_at IS NULL OR expires_at > statement_timestamp()
"""

ADD = """
    {purge}
    INSERT INTO {table} AS existing (key, value, updated_at) VALUES ($1, $2, statement_timestamp())
    ON CONFLICT (key) DO UPDATE SET
        value = excluded.value, expires_at = NULL, updated_at = excluded.updated_at
    WHERE existing.expires_at <= statement_timestamp()
    RETURNING key
"""

SWAP = """
    UPDATE {table} SET value = $3, expires_at = NULL, updated_at = statement_timestamp()
    WHERE key = $1 AND value = $2 AND (expires_at IS NULL OR expires_at > statement_timestamp())
    RETURNING key
"""

REMOVE = """
    DELETE FROM {table}
    WHERE key = $1 AND value = $2 AND (expires_at IS NULL OR expires_at > statement_timestamp())
    RETURNING key
"""

# This is the collation of the index, except in awaitly's own table.
KEYS = """
    SELECT key FROM {table}
    WHERE key COLLATE "C" >= $1 {end} AND (expires_at IS NULL OR expires_at > statement_timestamp())
"""
BEFORE_END = 'AND key COLLATE "C" < $2'


class KeyValueTable(KeyValueBackend):
    """Strings in one table; every write deletes some keys that have expired."""

    def __init__(self, database: Database, tables: Tables, prefix: str = "") -> None:
        super().__init__(prefix)
        self._database = database
        self._tables = tables

    async def set_up(self) -> None:
        await Schema(self._tables, "migrations_keyvalue").set_up(self._database)

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        return dict(await self._fetch(GET, [*keys]))

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        await self._fetch(SET, key, value, ttl)

    async def delete(self, key: str) -> bool:
        rows = await self._fetch(DELETE, key)
        return bool(rows and rows[0][0])

    async def keys(self, prefix: str) -> list[str]:
        end = end_of_prefix(prefix)
        values = [prefix] if end is None else [prefix, end]
        rows = await self._fetch(KEYS, *values, end="" if end is None else BEFORE_END)
        return [key for (key,) in rows]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        if old is None:
            template, values = ADD, [new]
        elif new is None:
            template, values = REMOVE, [old]
        else:
            template, values = SWAP, [old, new]
        # Not repeatable: sent again after a lost reply, it would return False for its own success.
        return bool(await self._fetch(template, key, *values, repeatable=False))

    async def _fetch(
        self, template: str, *values: object, end: str = "", repeatable: bool = True
    ) -> Sequence[Any]:
        statement = self._tables.sql(template, purge=self._tables.sql(_PURGE), end=end)
        return await self._database.fetch(statement, *values, repeatable=repeatable)


class PostgresKeyValue(DatabaseKeyValue):
    """A `KeyValueStore` with compare-and-set; expired keys are deleted by later writes.

    The options are those of `postgres`; `table` may be awaitly's own (`awaitly_workflow_state`).

        kv = PostgresKeyValue("postgresql://localhost/mydb")
        persistence = StatePersistence(kv)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        table: str = "perdure_keyvalue",
        pool: Any = None,
        engine: "AsyncEngine | None" = None,
        prepared_statements: bool = True,
        max_connections: int = 10,
        connect_timeout: Duration = 10,
        timeout: Duration = 60,
        clock: Clock = SystemClock(),
    ) -> None:
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
        super().__init__(
            "PostgreSQL",
            KeyValueTable(database, tables),
            close=database.pool.close,
            forget_loop=database.pool.forget_loop,
        )

    def _check(self, value: object, parameter: str) -> None:
        if not isinstance(value, str) or "\0" in value:
            raise InvalidArgument(parameter, value, "a string without NUL")
