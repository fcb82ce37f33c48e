"""Texts under keys in PostgreSQL, with times to live that the database keeps."""

from collections.abc import Sequence
from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores._lifecycle import Lifecycle
from perdure.stores.postgres.database import Database
from perdure.stores.postgres.pool import open_connections
from perdure.stores.postgres.schema import Names, Schema

GET = """
    SELECT key, value FROM {table}
    WHERE key = ANY ($1::text[]) AND (expires_at IS NULL OR expires_at > statement_timestamp())
"""

# What has expired is removed by later writes, a little each time.
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
    INSERT INTO {table} AS old (key, value, updated_at) VALUES ($1, $2, statement_timestamp())
    ON CONFLICT (key) DO UPDATE SET
        value = excluded.value, expires_at = NULL, updated_at = excluded.updated_at
    WHERE old.expires_at <= statement_timestamp()
    RETURNING key
"""

REPLACE = """
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


class PostgresKeyValue(AsyncCloseable):
    """A `KeyValueStore` with compare-and-set; what has expired is purged by later writes.

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
        self._names = Names(table)
        self._database = Database(
            open_connections(
                url, pool, max_connections, prepared_statements, connect_timeout, clock
            ),
            table=self._names.table,
            prepared=prepared_statements,
            timeout=parse_duration(timeout, "timeout").total_seconds(),
        )
        forget = self._database.connections.forget
        self._life = Lifecycle("PostgreSQL key-value", self._set_up, on_move=forget)

    async def get(self, key: str, /) -> str | None:
        """Give the text, or None when there is none or its time is over."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Give the text of each key, in order."""
        found = dict(await self._fetch(GET, [_checked(key, "key") for key in keys]))
        return [found.get(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` when that is given and else until it is deleted."""
        span = None if ttl is None else parse_duration(ttl, "ttl")
        await self._fetch(SET, _checked(key, "key"), _checked(value, "value"), span)

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        rows = await self._fetch(DELETE, _checked(key, "key"))
        return bool(rows and rows[0][0])

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match; `*` stands for any text, everything else for itself."""
        like = _checked(pattern, "pattern")
        for special in "\\%_":
            like = like.replace(special, "\\" + special)
        return [key for (key,) in await self._fetch(KEYS, like.replace("*", "%"))]

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Put `new` where `old` is, in one atomic act; None stands for nothing."""
        _checked(key, "key")
        if old is None and new is None:
            return await self.get(key) is None
        # Sent twice after a lost answer it would say False of what it did itself.
        if old is None:
            rows = await self._fetch(ADD, key, _checked(new, "new"), repeatable=False)
        elif new is None:
            rows = await self._fetch(REMOVE, key, old, repeatable=False)
        else:
            rows = await self._fetch(REPLACE, key, old, _checked(new, "new"), repeatable=False)
        return bool(rows)

    async def close(self) -> None:
        """Close the connections that were opened here; a pool that was passed in stays open."""
        if self._life.close():
            await self._database.connections.close()

    async def _fetch(
        self, statement: str, *values: object, repeatable: bool = True
    ) -> Sequence[Any]:
        await self._life.ready()
        filled = self._names.fill(statement, purge=self._names.fill(_PURGE))
        return await self._database.fetch(filled, *values, repeatable=repeatable)

    async def _set_up(self) -> None:
        await Schema("migrations_keyvalue", self._names).set_up(self._database)


def _checked(text: object, parameter: str) -> str:
    if isinstance(text, str) and "\0" not in text:
        return text
    raise InvalidArgument(parameter, text, "text without NUL")
