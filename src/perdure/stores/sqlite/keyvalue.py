"""Strings under keys in a SQLite file, or on a libSQL server."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from string import Template
from typing import Any, Protocol, TypeVar

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import StoreError
from perdure.stores._durability import Durability, check_durability
from perdure.stores._keyvalue import DatabaseKeyValue, KeyValueBackend
from perdure.stores._prefix import end_of_prefix
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sqlite.runs import MICROSECOND, Verb, json_text
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.statements import NOW, Outcome, Statement, Value, check_name
from perdure.stores.sqlite.threads import Database

T = TypeVar("T")

_GET = """
    SELECT key, value FROM $table
    WHERE key IN (SELECT value FROM json_each(:keys))
        AND (expires_at IS NULL OR expires_at > $now)
"""

_SET = """
    INSERT INTO $table (key, value, expires_at) VALUES (:key, :value, $now + :ttl)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at
"""

_DELETE = """
    DELETE FROM $table WHERE key = :key AND (expires_at IS NULL OR expires_at > $now)
"""

_ADD = """
    INSERT INTO $table (key, value) VALUES (:key, :new)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value, expires_at = NULL
    WHERE expires_at <= $now
"""

_SWAP = """
    UPDATE $table SET value = :new, expires_at = NULL
    WHERE key = :key AND value = :old AND (expires_at IS NULL OR expires_at > $now)
"""

_REMOVE = """
    DELETE FROM $table
    WHERE key = :key AND value = :old AND (expires_at IS NULL OR expires_at > $now)
"""

_KEYS = """
    SELECT key FROM $table
    WHERE key >= :prefix AND (expires_at IS NULL OR expires_at > $now)
"""
_BEFORE_END = " AND key < :end"

# Sent with every write, so it deletes only a few rows at a time.
_PURGE = """
    DELETE FROM $table
    WHERE key IN (SELECT key FROM $table WHERE expires_at <= $now ORDER BY expires_at LIMIT 100)
"""


class Run(Protocol):
    """Runs an operation in a transaction and returns its result."""

    async def __call__(self, verb: Callable[[], Verb[T]], /) -> T: ...


class KeyValueTable(KeyValueBackend):
    """Strings in one table of a database with SQLite's SQL, on any transport.

    `now` returns the time in microseconds, or `None` to use the database's clock.
    """

    def __init__(
        self, read: Run, write: Run, table: str, now: Callable[[], int | None], prefix: str = ""
    ) -> None:
        super().__init__(prefix)
        self._run_read = read
        self._run_write = write
        self._schema = Schema("migrations_keyvalue", table)
        self._names = {"table": f'"{table}"', "now": NOW}
        self._now = now

    async def set_up(self) -> None:
        if not await self._run_read(self._schema.missing):
            return
        try:
            await self._run_write(self._schema.migrate)
        except StoreError:
            # Another process may have migrated at the same time.
            if await self._run_read(self._schema.missing):
                raise

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        return dict(await self._read(_GET, keys=json_text(keys)))

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        micros = None if ttl is None else ttl // MICROSECOND
        await self._write(_SET, key=key, value=value, ttl=micros)

    async def delete(self, key: str) -> bool:
        return await self._write(_DELETE, key=key)

    async def keys(self, prefix: str) -> list[str]:
        end = end_of_prefix(prefix)
        template, values = _KEYS, {"prefix": prefix}
        if end is not None:
            template, values = _KEYS + _BEFORE_END, {"prefix": prefix, "end": end}
        return [key for (key,) in await self._read(template, **values)]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        if old is None:
            return await self._write(_ADD, key=key, new=new)
        if new is None:
            return await self._write(_REMOVE, key=key, old=old)
        return await self._write(_SWAP, key=key, old=old, new=new)

    async def _read(self, template: str, **values: Value) -> Sequence[Any]:
        """Run a statement and return its rows."""
        [outcome] = await self._run_read(self._verb(template, values))
        return outcome.rows

    async def _write(self, template: str, **values: Value) -> bool:
        """Run a statement and return whether it changed rows; also delete some expired rows."""
        outcome, _ = await self._run_write(self._verb(template, values, _PURGE))
        return outcome.changed > 0

    def _verb(
        self, template: str, values: Mapping[str, Value], purge: str | None = None
    ) -> Callable[[], Verb[Sequence[Outcome]]]:
        # The threads keep a reference to their last operation, which must not keep the store alive.
        return partial(_execute, self._sql(template), values, purge and self._sql(purge), self._now)

    def _sql(self, template: str) -> str:
        return Template(template).substitute(self._names)


class SqliteKeyValue(DatabaseKeyValue):
    """A `KeyValueStore` with compare-and-set in a SQLite file; later writes delete expired keys.

    persistence = StatePersistence(SqliteKeyValue("state.db"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        table: str = "perdure_keyvalue",
        durability: Durability = "full",
        busy_timeout: Duration = 60,
        clock: Clock = SystemClock(),
    ) -> None:
        check_durability(durability)
        database = Database(
            os.fspath(path),
            Schema("migrations_keyvalue", check_name(table)),
            durability=durability,
            busy_timeout=parse_duration(busy_timeout, "busy_timeout"),
        )
        rows = KeyValueTable(
            database.read, database.write, table, lambda: to_microseconds(clock.now())
        )
        super().__init__(f"SQLite ({database.path})", rows, close=database.close, any_loop=True)
        # The threads of a store that was never closed end with it.
        weakref.finalize(self, database.stop)


def _execute(
    script: str, values: Mapping[str, Value], purge: str | None, now: Callable[[], int | None]
) -> Verb[Sequence[Outcome]]:
    # The clock is read when the statements are about to run, after any wait for a lock.
    time: Mapping[str, Value] = {"now": now()}
    statements = [Statement(script, {**values, **time})]
    if purge is not None:
        # A server rejects values that a statement does not use.
        statements.append(Statement(purge, time))
    return (yield statements)
