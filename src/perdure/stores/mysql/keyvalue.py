"""Strings under keys in MySQL or MariaDB, with times to live by the server's clock."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import count

from perdure.stores._keyvalue import SETS_PER_SWEEP, KeyValueBackend
from perdure.stores._prefix import end_of_prefix
from perdure.stores.mysql.database import Database
from perdure.stores.mysql.literals import Statement
from perdure.stores.mysql.schema import Schema, Tables, dialect_of
from perdure.stores.mysql.statements import Conditions, Statements

_MICROSECOND = timedelta(microseconds=1)

VERSION = Statement(b"SELECT VERSION()")

IS_LIVE = "(expires_at IS NULL OR expires_at > UTC_TIMESTAMP(6))"

GET = """
    SELECT id, CAST(value AS BINARY) FROM {table}
    WHERE id IN (%s) AND (expires_at IS NULL OR expires_at > UTC_TIMESTAMP(6))
"""
SET = """
    REPLACE INTO {table} (id, value, expires_at)
    VALUES (%s, %s, UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND)
"""
DELETE = """
    DELETE FROM {table}
    WHERE id = %s AND (expires_at IS NULL OR expires_at > UTC_TIMESTAMP(6))
"""
DELETE_EXPIRED = "DELETE FROM {table} WHERE id = %s AND expires_at <= UTC_TIMESTAMP(6)"
ADD = "INSERT IGNORE INTO {table} (id, value) VALUES (%s, %s)"
# Comparing a digest of the old value leaves room in the packet for the new one.
SWAP = """
    UPDATE {table} SET value = %s, expires_at = NULL, revision = revision + 1
    WHERE id = %s AND SHA2(value, 256) = %s
        AND (expires_at IS NULL OR expires_at > UTC_TIMESTAMP(6))
"""
REMOVE = """
    DELETE FROM {table}
    WHERE id = %s AND SHA2(value, 256) = %s
        AND (expires_at IS NULL OR expires_at > UTC_TIMESTAMP(6))
"""
KEYS = "SELECT id FROM {table} WHERE %s"
SWEEP = """
    DELETE FROM {table} WHERE expires_at <= UTC_TIMESTAMP(6) ORDER BY expires_at LIMIT 100
"""


class KeyValueTable(KeyValueBackend):
    """Strings in one table; every hundredth `set` deletes some keys that have expired."""

    _statements: Statements

    def __init__(self, database: Database, tables: Tables, prefix: str) -> None:
        super().__init__(prefix)
        self._database = database
        self._tables = tables
        self._sets = count()

    async def set_up(self) -> None:
        [(version,)] = (await self._database.run_alone(VERSION)).rows
        dialect = dialect_of(version)
        await Schema(self._tables, dialect, "migrations_keyvalue").set_up(self._database)
        self._statements = Statements(self._tables, dialect)

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        statement = self._statements.bind(GET, [key.encode() for key in keys])
        rows = (await self._database.run_alone(statement)).rows
        return {key.decode(): value.decode() for key, value in rows}

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        micros = None if ttl is None else ttl // _MICROSECOND
        await self._database.run_alone(self._statements.bind(SET, key.encode(), value, micros))
        if next(self._sets) % SETS_PER_SWEEP == 0:
            await self._database.run_alone(self._statements.bind(SWEEP))

    async def delete(self, key: str) -> bool:
        statement = self._statements.bind(DELETE, key.encode())
        return (await self._database.run_alone(statement)).count > 0

    async def keys(self, prefix: str) -> list[str]:
        conditions = Conditions()
        conditions.add("id >= %s", prefix.encode())
        conditions.add(IS_LIVE)
        if (end := end_of_prefix(prefix)) is not None:
            conditions.add("id < %s", end.encode())
        statement = self._statements.bind(KEYS, self._statements.all(conditions))
        rows = (await self._database.run_alone(statement)).rows
        return [key.decode() for (key,) in rows]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        bind, id = self._statements.bind, key.encode()
        if old is None:
            statements = [bind(DELETE_EXPIRED, id), bind(ADD, id, new)]
        elif new is None:
            statements = [bind(REMOVE, id, _digest(old))]
        else:
            statements = [bind(SWAP, new, id, _digest(old))]
        # Not repeatable: sent again after a lost reply, it would return False for its own success.
        *_, result = await self._database.run(*statements, repeatable=False)
        return result.count > 0


def _digest(value: str) -> str:
    return sha256(value.encode()).hexdigest()
