"""Strings under keys in PostgreSQL, with times to live by the database's clock."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.errors import InvalidArgument
from perdure.stores._keyvalue import DatabaseKeyValue
from perdure.stores.postgres.database import open_database
from perdure.stores.postgres.schema import Schema, Tables

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

KEYS = """
    SELECT key FROM {table}
    WHERE key LIKE $1 AND (expires_at IS NULL OR expires_at > statement_timestamp())
    ORDER BY key
"""


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
        prepared_statements: bool = True,
        max_connections: int = 10,
        connect_timeout: Duration = 10,
        timeout: Duration = 60,
        clock: Clock = SystemClock(),
    ) -> None:
        self._tables = Tables(table)
        self._database = open_database(
            url,
            self._tables.table,
            pool=pool,
            prepared_statements=prepared_statements,
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            timeout=timeout,
            clock=clock,
        )
        super().__init__(
            "PostgreSQL",
            set_up=self._set_up,
            close=self._database.pool.close,
            forget_loop=self._database.pool.forget_loop,
        )

    async def _set_up(self) -> None:
        await Schema(self._tables, "migrations_keyvalue").set_up(self._database)

    async def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        return dict(await self._fetch(GET, [*keys]))

    async def _set(self, key: str, value: str, ttl: timedelta | None) -> None:
        await self._fetch(SET, key, value, ttl)

    async def _delete(self, key: str) -> bool:
        rows = await self._fetch(DELETE, key)
        return bool(rows and rows[0][0])

    async def _keys(self, pattern: str) -> list[str]:
        for special in "\\%_":
            pattern = pattern.replace(special, "\\" + special)
        return [key for (key,) in await self._fetch(KEYS, pattern.replace("*", "%"))]

    async def _replace(self, key: str, old: str | None, new: str | None) -> bool:
        if old is None:
            template, values = ADD, [new]
        elif new is None:
            template, values = REMOVE, [old]
        else:
            template, values = SWAP, [old, new]
        # Not repeatable: sent again after a lost reply, it would return False for its own success.
        return bool(await self._fetch(template, key, *values, repeatable=False))

    async def _fetch(
        self, template: str, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        statement = self._tables.sql(template, purge=self._tables.sql(_PURGE))
        return await self._database.fetch(statement, *values, repeatable=repeatable)

    def _check(self, value: object, parameter: str) -> None:
        if not isinstance(value, str) or "\0" in value:
            raise InvalidArgument(parameter, value, "a string without NUL")
