"""Strings under keys in a database with the SQLite schema, for any transport."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from string import Template
from typing import TypeVar, cast

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores.sqlite.runs import MICROSECOND, Verb, json_text
from perdure.stores.sqlite.statements import NOW, Statement, Value, check_name

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

_REPLACE = """
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


class KeyValueVerbs:
    """The statements of each method on one table; see `perdure.stores.sqlite.runs`."""

    def __init__(self, table: str, now: Callable[[], int | None]) -> None:
        self._names = {"table": f'"{check_name(table)}"', "now": NOW}
        self._now = now

    def get(self, keys: Sequence[str]) -> Verb[Sequence[str | None]]:
        """Return the value of each key, in order."""
        [rows] = yield [self._statement(_GET, keys=json_text(keys))]
        values = dict(cast("Sequence[tuple[str, str]]", rows.rows))
        return [values.get(key) for key in keys]

    def set(self, key: str, value: str, ttl: int | None) -> Verb[None]:
        """Store a value."""
        yield [self._statement(_SET, key=key, value=value, ttl=ttl), self._statement(_PURGE)]

    def delete(self, key: str) -> Verb[bool]:
        """Delete a key; return whether it existed and had not expired."""
        deleted, _ = yield [self._statement(_DELETE, key=key), self._statement(_PURGE)]
        return deleted.changed > 0

    def replace(self, key: str, old: str | None, new: str | None) -> Verb[bool]:
        """Replace `old` by `new`; return whether `old` was the value."""
        if old is None and new is None:
            return (yield from self.get([key])) == [None]
        if old is None:
            statement = self._statement(_ADD, key=key, new=new)
        elif new is None:
            statement = self._statement(_REMOVE, key=key, old=old)
        else:
            statement = self._statement(_REPLACE, key=key, old=old, new=new)
        replaced, _ = yield [statement, self._statement(_PURGE)]
        return replaced.changed > 0

    def keys(self, pattern: str) -> Verb[Sequence[str]]:
        """Return the keys that match."""
        [matching] = yield [self._statement(_KEYS, pattern=_glob(pattern))]
        return [key for (key,) in matching.rows]

    def _statement(self, template: str, **values: Value) -> Statement:
        return Statement(Template(template).substitute(self._names), {**values, "now": self._now()})


class SqliteSchemaKeyValue(AsyncCloseable):
    """A `KeyValueStore` with compare-and-set; later writes delete expired keys."""

    def __init__(self, table: str, now: Callable[[], int | None]) -> None:
        self._verbs = KeyValueVerbs(table, now)

    @abstractmethod
    async def _write(self, verb: Callable[[], Verb[T]]) -> T:
        """Run a verb and return its result once it is committed."""

    @abstractmethod
    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        """Run a verb that only reads, and return its result."""

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if the key does not exist or has expired."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Return the value of each key, in order."""
        return await self._read(partial(self._verbs.get, keys))

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store a string; with `ttl` it expires, otherwise it stays until it is deleted."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "a string")
        micros = None if ttl is None else parse_duration(ttl, "ttl") // MICROSECOND
        await self._write(partial(self._verbs.set, key, value, micros))

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Atomically replace `old` by `new`, where `None` means no value; return whether it was."""
        return await self._write(partial(self._verbs.replace, key, old, new))

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        return await self._write(partial(self._verbs.delete, key))

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the keys that match; `*` matches any string, all else is literal."""
        return [*await self._read(partial(self._verbs.keys, pattern))]


def _glob(pattern: str) -> str:
    """Return the pattern for GLOB, where `?` and `[` are special too."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
