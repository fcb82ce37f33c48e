"""The key-value contract: five methods that take a few lines on top of any client.

`StatePersistence`, `KeyValueCache` and the store `keyvalue()` use it. They also accept a driver of
`py-key-value-aio`, which `as_keyvalue` turns into a `KeyValueStore`.
"""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import (
    InvalidArgument,
    MissingAbility,
    MissingDependency,
    StoreCorrupted,
    StoreError,
    StoreUnavailable,
)


@runtime_checkable
class KeyValueStore(Protocol):
    """Strings under keys."""

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if there is none or it has expired."""
        ...

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value, until it is deleted or `ttl` has passed."""
        ...

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        ...

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        ...

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the matching keys; `*` matches any string, all other characters are literal."""
        ...


@runtime_checkable
class CompareAndSet(Protocol):
    """An optional ability: no process overwrites the changes of another."""

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace `old` with `new` atomically; return `False` if the value is not `old`.

        `None` stands for no value: the key must not exist (`old`), or is deleted (`new`).
        """
        ...


@runtime_checkable
class GetMany(Protocol):
    """An optional ability: read many keys in one round trip."""

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Return the value of each key, in order."""
        ...


@runtime_checkable
class Documents(KeyValueStore, CompareAndSet, GetMany, Protocol):
    """A key-value store with all abilities, such as `store.documents`."""


class AsyncKeyValue(Protocol):
    """The part of a `py-key-value-aio` driver that is used here."""

    async def get(self, key: str, *, collection: str | None = None) -> dict[str, Any] | None: ...

    async def get_many(
        self, keys: Sequence[str], *, collection: str | None = None
    ) -> Sequence[dict[str, Any] | None]: ...

    async def put(
        self,
        key: str,
        value: Mapping[str, Any],
        *,
        collection: str | None = None,
        ttl: SupportsFloat | None = None,
    ) -> None: ...

    async def delete(self, key: str, *, collection: str | None = None) -> bool: ...


@runtime_checkable
class _EnumeratesKeys(Protocol):
    async def keys(
        self, collection: str | None = None, *, limit: int | None = None
    ) -> list[str]: ...


def glob_match(pattern: str, key: str) -> bool:
    """Return whether the key matches; `*` matches any string, all other characters are literal."""
    return _compile(pattern).fullmatch(key) is not None


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


class MemoryKeyValue:
    """A `KeyValueStore` in this process's memory, with compare-and-set.

    kv = MemoryKeyValue()
    persistence = StatePersistence(kv)
    """

    def __init__(self, *, clock: Clock = SystemClock()) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[str, float | None]] = {}

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if there is none or it has expired."""
        return self._unexpired(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Return the value of each key, in order."""
        return [self._unexpired(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value; without `ttl`, an earlier time to live no longer applies."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "a string")
        self._entries[key] = (value, self._end(ttl))

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace `old` with `new` (`None`: no value); return whether the value was `old`."""
        if self._unexpired(key) != old:
            return False
        if new is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = (new, None)
        return True

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        existed = self._unexpired(key) is not None
        self._entries.pop(key, None)
        return existed

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        return self._unexpired(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the matching keys, in the order they were first set."""
        matches = _compile(pattern).fullmatch
        return [
            key for key in list(self._entries) if matches(key) and self._unexpired(key) is not None
        ]

    def _unexpired(self, key: str) -> str | None:
        value, end = self._entries.get(key, (None, None))
        if end is not None and self._clock.monotonic() >= end:
            del self._entries[key]
            return None
        return value

    def _end(self, ttl: Duration | None) -> float | None:
        if ttl is None:
            return None
        return self._clock.monotonic() + parse_duration(ttl, "ttl").total_seconds()


class DriverKeyValue:
    """A `KeyValueStore` on a driver of `py-key-value-aio`, which it does not close.

    Values are stored in one collection, each as `{"value": value}`. `keys` requires a driver that
    can enumerate keys.
    """

    def __init__(self, driver: AsyncKeyValue, *, collection: str = "perdure") -> None:
        try:
            # Imported lazily: the package is optional.
            from key_value.aio.errors import BaseKeyValueError, KeyValueStoreError
        except ImportError:
            raise MissingDependency("py-key-value-aio", "keyvalue") from None
        self.driver = driver
        self._collection = collection
        self._errors = BaseKeyValueError
        self._unavailable = KeyValueStoreError

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if there is none or it has expired."""
        async with self._translate_errors():
            return _value(key, await self.driver.get(key, collection=self._collection))

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Return the value of each key, in order."""
        async with self._translate_errors():
            entries = await self.driver.get_many(list(keys), collection=self._collection)
            return [_value(key, entry) for key, entry in zip(keys, entries, strict=True)]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value, until it is deleted or `ttl` has passed."""
        duration = None if ttl is None else parse_duration(ttl, "ttl")
        if duration == timedelta(0):
            # Drivers reject a `ttl` of zero, which means that the value expires at once.
            await self.delete(key)
            return
        seconds = None if duration is None else duration.total_seconds()
        async with self._translate_errors():
            entry = {"value": value}
            await self.driver.put(key, entry, collection=self._collection, ttl=seconds)

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        async with self._translate_errors():
            return await self.driver.delete(key, collection=self._collection)

    async def exists(self, key: str, /) -> bool:
        """Return whether the key exists and has not expired."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the matching keys; raise `MissingAbility` if the driver cannot enumerate them."""
        if not isinstance(self.driver, _EnumeratesKeys):
            raise MissingAbility(self.driver, "keys", "listing or clearing")
        async with self._translate_errors():
            keys = await self.driver.keys(self._collection)
        matches = _compile(pattern).fullmatch
        return [key for key in keys if matches(key)]

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except (self._unavailable, ConnectionError, TimeoutError) as error:
            name = type(self.driver).__name__
            raise StoreUnavailable(f"{name} is unavailable: {error}") from error
        except self._errors as error:
            name = type(self.driver).__name__
            raise StoreError(f"{name} failed: {error}") from error


def _value(key: str, entry: Mapping[str, Any] | None) -> str | None:
    if entry is None:
        return None
    value = entry.get("value")
    if not isinstance(value, str):
        raise StoreCorrupted(
            f"the value under {key!r} is not a string; it was written by another program"
        )
    return value


def as_keyvalue(store: KeyValueStore | AsyncKeyValue, parameter: str = "store") -> KeyValueStore:
    """Return the `KeyValueStore` itself, or one on a `py-key-value-aio` driver."""
    if isinstance(store, KeyValueStore) and not isinstance(store, type):
        return store
    if not isinstance(store, type) and all(
        callable(getattr(store, verb, None)) for verb in ("get", "put", "delete", "get_many")
    ):
        return DriverKeyValue(store)
    expected = "an object with get, set, delete, exists and keys, or a py-key-value-aio driver"
    hint = (
        "A store of runs is not a key-value store; perdure.stores.sqlite.SqliteKeyValue(path), "
        "for example, is one"
    )
    raise InvalidArgument(parameter, store, expected, hint)
