"""Strings under keys in a SQLite file."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from string import Template
from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.stores._durability import Durability, check_durability
from perdure.stores._keyvalue import DatabaseKeyValue
from perdure.stores._timestamps import to_microseconds
from perdure.stores.sqlite.runs import MICROSECOND, Verb, json_text
from perdure.stores.sqlite.schema import Schema
from perdure.stores.sqlite.statements import NOW, Outcome, Statement, Value, check_name
from perdure.stores.sqlite.threads import Database

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
    WHERE key GLOB :pattern AND (expires_at IS NULL OR expires_at > $now)
    ORDER BY key
"""

# Sent with every write, so it deletes only a few rows at a time.
_PURGE = """
    DELETE FROM $table
    WHERE key IN (SELECT key FROM $table WHERE expires_at <= $now ORDER BY expires_at LIMIT 100)
"""


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
        self._names = {"table": f'"{check_name(table)}"', "now": NOW}
        self._clock = clock
        self._database = Database(
            os.fspath(path),
            Schema("migrations_keyvalue", table),
            durability=durability,
            busy_timeout=parse_duration(busy_timeout, "busy_timeout"),
        )
        name = f"SQLite ({self._database.path})"
        super().__init__(name, close=self._database.close, any_loop=True)
        # The threads of a store that was never closed end with it.
        weakref.finalize(self, self._database.stop)

    async def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        return dict(await self._read(_GET, keys=json_text(keys)))

    async def _set(self, key: str, value: str, ttl: timedelta | None) -> None:
        micros = None if ttl is None else ttl // MICROSECOND
        await self._write(_SET, key=key, value=value, ttl=micros)

    async def _delete(self, key: str) -> bool:
        return await self._write(_DELETE, key=key)

    async def _keys(self, pattern: str) -> list[str]:
        return [key for (key,) in await self._read(_KEYS, pattern=_glob(pattern))]

    async def _replace(self, key: str, old: str | None, new: str | None) -> bool:
        if old is None:
            return await self._write(_ADD, key=key, new=new)
        if new is None:
            return await self._write(_REMOVE, key=key, old=old)
        return await self._write(_SWAP, key=key, old=old, new=new)

    async def _read(self, template: str, **values: Value) -> Sequence[Any]:
        """Run a statement and return its rows."""
        [outcome] = await self._database.read(self._verb([template], values))
        return outcome.rows

    async def _write(self, template: str, **values: Value) -> bool:
        """Run a statement and return whether it changed rows; also delete some expired ones."""
        outcome, _ = await self._database.write(self._verb([template, _PURGE], values))
        return outcome.changed > 0

    def _verb(
        self, templates: Sequence[str], values: Mapping[str, Value]
    ) -> Callable[[], Verb[Sequence[Outcome]]]:
        # The threads keep their last verb, which must not keep the store alive.
        scripts = [Template(template).substitute(self._names) for template in templates]
        return partial(_execute, scripts, values, self._clock)


def _execute(
    scripts: Sequence[str], values: Mapping[str, Value], clock: Clock
) -> Verb[Sequence[Outcome]]:
    # The clock is read when the statements are about to run, after any wait for a lock.
    bound = {**values, "now": to_microseconds(clock.now())}
    return (yield [Statement(script, bound) for script in scripts])


def _glob(pattern: str) -> str:
    """Return the pattern for GLOB, where `?` and `[` are special too."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
