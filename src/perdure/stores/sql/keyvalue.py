"""Strings under keys in any SQL database, with times to live by the database's clock."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from perdure.stores._keyvalue import SETS_PER_SWEEP, KeyValueBackend
from perdure.stores._prefix import end_of_prefix
from perdure.stores.sql.client import Result, SqlClient, query
from perdure.stores.sql.dialects import Statements
from perdure.stores.sql.executor import chunks, to_micros
from perdure.stores.sql.schema import set_up

GET = """
    SELECT id, value FROM $table
    WHERE id IN ([?], ...) AND (expires_at IS NULL OR expires_at > $now)
"""
SET = """
    INSERT INTO $table (id, value, expires_at, revision) VALUES (?, ?, $now + $number, 0)
    $on_same_id value = ${new}value$end, expires_at = ${new}expires_at$end
"""
DELETE = "DELETE FROM $table WHERE id = ? AND (expires_at IS NULL OR expires_at > $now)"
DELETE_EXPIRED = "DELETE FROM $table WHERE id = ? AND expires_at <= $now"
ADD = "$insert $table (id, value, revision) VALUES (?, ?, 0) $or_ignore"
SWAP = """
    UPDATE $table SET value = ?, expires_at = NULL, revision = revision + 1
    WHERE id = ? AND value = ? AND (expires_at IS NULL OR expires_at > $now)
"""
REMOVE = """
    DELETE FROM $table
    WHERE id = ? AND value = ? AND (expires_at IS NULL OR expires_at > $now)
"""
KEYS = """
    SELECT id FROM $table WHERE id >= $key AND (expires_at IS NULL OR expires_at > $now)
"""
BEFORE_END = "AND id < $key"
# MySQL accepts a limit only in a derived table. The time is compared again, because the key may
# have been set after it was found.
SWEEP = """
    DELETE FROM $table WHERE expires_at <= $now AND id IN (
        SELECT expired.id FROM (
            SELECT id FROM $table WHERE expires_at <= $now LIMIT 100
        ) AS expired
    )
"""


class KeyValueTable(KeyValueBackend):
    """Strings in one table; every hundredth `set` deletes some keys that have expired."""

    def __init__(self, client: SqlClient, statements: Statements, prefix: str) -> None:
        super().__init__(prefix)
        self._client = client
        self._statements = statements
        self._sets = count()

    async def set_up(self) -> None:
        await set_up(self._client, self._statements)

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        values: dict[str, str] = {}
        for chunk in chunks(keys):
            rows = await query(self._client, self._statements.many(GET, len(chunk)), chunk)
            values |= dict(rows.rows)
        return values

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        await self._run(SET, key, value, None if ttl is None else to_micros(ttl))
        if next(self._sets) % SETS_PER_SWEEP == 0:
            await self._run(SWEEP)

    async def delete(self, key: str) -> bool:
        return (await self._run(DELETE, key)).rowcount > 0

    async def keys(self, prefix: str) -> list[str]:
        end = end_of_prefix(prefix)
        template, values = KEYS, [prefix]
        if end is not None:
            template, values = KEYS + BEFORE_END, [prefix, end]
        return [key for (key,) in (await self._run(template, *values)).rows]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        if old is None:
            # If another process sets the expired key again in the meantime, this does not delete
            # it.
            await self._run(DELETE_EXPIRED, key)
            return (await self._run(ADD, key, new)).rowcount > 0
        if new is None:
            return (await self._run(REMOVE, key, old)).rowcount > 0
        return (await self._run(SWAP, new, key, old)).rowcount > 0

    async def _run(self, template: str, *values: Any) -> Result:
        return await query(self._client, self._statements.sql(template), values)
