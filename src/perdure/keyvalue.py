"""The key-value contract: five methods, which a few lines over any client give.

`StatePersistence`, `KeyValueCache` and the store `keyvalue()` stand on it. A driver of
`py-key-value-aio` is taken as well: `as_keyvalue` turns either into a `KeyValueStore`.
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
    """A place that keeps texts under keys."""

    async def get(self, key: str, /) -> str | None:
        """Give the text, or None when there is none or its time is over."""
        ...

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` when that is given and else until it is deleted."""
        ...

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        ...

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        ...

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match; `*` stands for any text, everything else for itself."""
        ...


@runtime_checkable
class CompareAndSet(Protocol):
    """What a key-value store can add so that two processes never overwrite each other."""

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Put `new` where `old` is, in one atomic act; False when `old` is not there.

        None stands for nothing: as `old` it means a key that is not there, as `new` to remove it.
        """
        ...


@runtime_checkable
class GetMany(Protocol):
    """What a key-value store can add so that many keys cost one round trip."""

    async def get_many(self, keys: Sequence[str], /) -> Sequence[str | None]:
        """Give the text of each key, in order."""
        ...


class AsyncKeyValue(Protocol):
    """As much of a `py-key-value-aio` driver as is used here."""

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
class _Enumerates(Protocol):
    async def keys(
        self, collection: str | None = None, *, limit: int | None = None
    ) -> list[str]: ...


def glob_match(pattern: str, key: str) -> bool:
    """Tell whether the whole key matches; `*` stands for any text, everything else for itself."""
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
        """Give the text, or None when there is none or its time is over."""
        return self._live(key)

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Give the text of each key, in order."""
        return [self._live(key) for key in keys]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text; without `ttl` an earlier one is forgotten."""
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "text")
        self._entries[key] = (value, self._end(ttl))

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Put `new` where `old` is (None: nothing); False when `old` is not there."""
        if self._live(key) != old:
            return False
        if new is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = (new, None)
        return True

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        there = self._live(key) is not None
        self._entries.pop(key, None)
        return there

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        return self._live(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match, in the order they were first set."""
        matches = _compile(pattern).fullmatch
        return [key for key in list(self._entries) if matches(key) and self._live(key) is not None]

    def _live(self, key: str) -> str | None:
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
    """A `KeyValueStore` over a driver of `py-key-value-aio`; the driver is never closed here.

    Texts lie in one collection, each as `{"value": text}`. `keys` needs a driver that enumerates.
    """

    def __init__(self, driver: AsyncKeyValue, *, collection: str = "perdure") -> None:
        try:
            # Lazy: the driver's own errors exist only where its package does.
            from key_value.aio.errors import BaseKeyValueError, KeyValueStoreError
        except ImportError:
            raise MissingDependency("py-key-value-aio", "keyvalue") from None
        self.driver = driver
        self._collection = collection
        self._errors = BaseKeyValueError
        self._unavailable = KeyValueStoreError

    async def get(self, key: str, /) -> str | None:
        """Give the text, or None when there is none or its time is over."""
        async with self._translated():
            return _text(key, await self.driver.get(key, collection=self._collection))

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Give the text of each key, in order."""
        async with self._translated():
            found = await self.driver.get_many(list(keys), collection=self._collection)
            return [_text(key, entry) for key, entry in zip(keys, found, strict=True)]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` when that is given and else until it is deleted."""
        span = None if ttl is None else parse_duration(ttl, "ttl")
        if span == timedelta(0):
            # The drivers refuse a time to live of zero, which means: gone at once.
            await self.delete(key)
            return
        seconds = None if span is None else span.total_seconds()
        async with self._translated():
            entry = {"value": value}
            await self.driver.put(key, entry, collection=self._collection, ttl=seconds)

    async def delete(self, key: str, /) -> bool:
        """Remove the key; tell whether it was there."""
        async with self._translated():
            return await self.driver.delete(key, collection=self._collection)

    async def exists(self, key: str, /) -> bool:
        """Tell whether the key is there and its time is not over."""
        return await self.get(key) is not None

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Give the keys that match, or raise `MissingAbility` when the driver cannot enumerate."""
        if not isinstance(self.driver, _Enumerates):
            raise MissingAbility(self.driver, "keys", "listing or clearing")
        async with self._translated():
            found = await self.driver.keys(self._collection)
        matches = _compile(pattern).fullmatch
        return [key for key in found if matches(key)]

    @asynccontextmanager
    async def _translated(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except (self._unavailable, ConnectionError, TimeoutError) as error:
            name = type(self.driver).__name__
            raise StoreUnavailable(f"{name} cannot be reached: {error}") from error
        except self._errors as error:
            name = type(self.driver).__name__
            raise StoreError(f"{name} did not do what it was asked: {error}") from error


def _text(key: str, entry: Mapping[str, Any] | None) -> str | None:
    if entry is None:
        return None
    value = entry.get("value")
    if not isinstance(value, str):
        raise StoreCorrupted(f"the entry under {key!r} holds no text; something else wrote it")
    return value


def as_keyvalue(store: KeyValueStore | AsyncKeyValue, parameter: str = "store") -> KeyValueStore:
    """Give a `KeyValueStore`: the object itself, or a `py-key-value-aio` driver made into one."""
    if isinstance(store, KeyValueStore) and not isinstance(store, type):
        return store
    if not isinstance(store, type) and all(
        callable(getattr(store, verb, None)) for verb in ("get", "put", "delete", "get_many")
    ):
        return DriverKeyValue(store)
    expected = "an object with get, set, delete, exists and keys, or a py-key-value-aio driver"
    raise InvalidArgument(parameter, store, expected)
