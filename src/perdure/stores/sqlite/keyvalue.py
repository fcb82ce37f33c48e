"""Texts under keys in a database with a SQLite schema, however it is reached."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from string import Template
from typing import TypeVar, cast

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.store import AsyncCloseable
from perdure.stores.sqlite.runs import MICROSECOND, Verb, json_text
from perdure.stores.sqlite.statements import NOW, Statement, Value, check_table

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

# Rides with every write, and so a little at a time.
_PURGE = """
    DELETE FROM $table
    WHERE key IN (SELECT key FROM $table WHERE expires_at <= $now ORDER BY expires_at LIMIT 100)
"""


class KeyValueVerbs:
    """What each method says to the table of one name; see `perdure.stores.sqlite.runs`."""

    def __init__(self, table: str, now: Callable[[], int | None]) -> None:
        names = {"table": f'"{check_table(table)}"', "now": NOW}
        self._names = names
        self._now = now

    def get(self, keys: Sequence[str]) -> Verb[Sequence[str | None]]:
        """Give the text of each key, in order."""
        [found] = yield [self._on(_GET, keys=json_text(keys))]
        texts = dict(cast("Sequence[tuple[str, str]]", found.rows))
        return [texts.get(key) for key in keys]

    def set(self, key: str, value: str, ttl: int | None) -> Verb[None]:
        """Keep a text."""
        yield [self._on(_SET, key=key, value=value, ttl=ttl), self._on(_PURGE)]

    def delete(self, key: str) -> Verb[bool]:
        """Remove a key; tell whether it was there and its time not over."""
        deleted, _ = yield [self._on(_DELETE, key=key), self._on(_PURGE)]
        return deleted.changed > 0

    def replace(self, key: str, old: str | None, new: str | None) -> Verb[bool]:
        """Put `new` where `old` is."""
        if old is None and new is None:
            return (yield from self.get([key])) == [None]
        if old is None:
            statement = self._on(_ADD, key=key, new=new)
        elif new is None:
            statement = self._on(_REMOVE, key=key, old=old)
        else:
            statement = self._on(_REPLACE, key=key, old=old, new=new)
        replaced, _ = yield [statement, self._on(_PURGE)]
        return replaced.changed > 0

    def keys(self, pattern: str) -> Verb[Sequence[str]]:
        """Give the keys that match."""
        [found] = yield [self._on(_KEYS, pattern=_glob(pattern))]
        return [key for (key,) in found.rows]

    def _on(self, statement: str, **values: Value) -> Statement:
        return Statement(
            Template(statement).substitute(self._names), {**values, "now": self._now()}
        )


class SqliteSchemaKeyValue(AsyncCloseable):
    """A `KeyValueStore` with compare-and-set; what has expired is purged by later writes."""

    def __init__(self, table: str, now: Callable[[], int | None]) -> None:
        self._verbs = KeyValueVerbs(table, now)

    @abstractmethod
    async def _write(self, verb: Callable[[], Verb[T]]) -> T:
        """Give what the verb gives once it is committed."""

    @abstractmethod
    async def _read(self, verb: Callable[[], Verb[T]]) -> T:
        """Give what the verb gives of all that is committed."""

    async def get(self, key: str, /) -> str | None:
        """Give the text, or None when there is none or its time is over."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Give the text of each key, in order."""
        return await self._read(partial(self._verbs.get, keys))

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` when that is given and else until it is deleted."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "text")
        span = None if ttl is None else parse_duration(ttl, "ttl") // MICROSECOND
        await self._write(partial(self._verbs.set, key, value, span))

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Put `new` where `old` is, in one atomic act; None stands for nothing."""
        return await self._write(partial(self._verbs.replace, key, old, new))

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        return await self._write(partial(self._verbs.delete, key))

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match; `*` stands for any text, everything else for itself."""
        return [*await self._read(partial(self._verbs.keys, pattern))]


def _glob(pattern: str) -> str:
    """Give the pattern in SQLite's manner, where `?` and `[` are special as well."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
