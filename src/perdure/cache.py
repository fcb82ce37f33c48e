"""The step cache contract: records of steps with an explicit key, kept across runs.

A cache is a dict, a `MemoryCache`, a `FileCache`, or any object with the methods `get`, `set` and
`delete`, sync or async. `as_cache` turns any of them into a `StepCache`, which is what the engine
uses. A cache maps a step's key to the step's *record*: a JSON object with the step's result or
error. Deleting the record makes the step run again.
"""

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, cast

from perdure import codec
from perdure.clock import Clock, SystemClock, isoformat, parse_iso
from perdure.errors import InvalidArgument
from perdure.snapshot import StepRecord

_EXPIRES = "expiresAt"


class StepCache(Protocol):
    """A cache as the engine sees it."""

    async def get(self, key: str, /) -> StepRecord | None:
        """Return the step's record, or `None` if there is none or it has expired."""
        ...

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Store the record; `ttl` takes precedence over the cache's own."""
        ...

    async def has(self, key: str, /) -> bool:
        """Return whether there is a record that has not expired."""
        ...

    async def delete(self, key: str, /) -> bool:
        """Delete the record, so that the step runs again; return whether it existed."""
        ...

    async def clear(self) -> None:
        """Delete all records."""
        ...


class CacheObject(Protocol):
    """An object that can be used as a cache; each method may be sync or async.

    A method `clear` is optional. `set` is called with `ttl=` if it has such a parameter.
    """

    @property
    def get(self) -> Callable[..., Any]:
        """`get(key)` returns the record, or `None`."""
        ...

    @property
    def set(self) -> Callable[..., Any]:
        """`set(key, record)`, or `set(key, record, ttl=timedelta)`."""
        ...

    @property
    def delete(self) -> Callable[..., Any]:
        """`delete(key)` returns whether there was a record."""
        ...


CacheLike: TypeAlias = MutableMapping[str, Any] | CacheObject


def as_cache(cache: CacheLike, *, clock: Clock = SystemClock()) -> StepCache:
    """Return a `StepCache` on a dict or on an object with `get`, `set` and `delete`."""
    if isinstance(cache, _ObjectCache | _MappingCache):
        return cache
    if isinstance(cache, MutableMapping):
        return _MappingCache(cache, clock)
    methods = [getattr(cache, verb, None) for verb in ("get", "set", "delete")]
    if all(map(callable, methods)) and not isinstance(cache, type):
        return _ObjectCache(cache, clock)
    raise InvalidArgument("cache", cache, "a dict, or an object with get, set and delete")


class _MappingCache:
    """A mapping as a cache."""

    def __init__(self, mapping: MutableMapping[str, Any], clock: Clock) -> None:
        self._mapping = mapping
        self._clock = clock

    async def get(self, key: str, /) -> StepRecord | None:
        return _unexpired(key, self._mapping.get(key), self._clock)

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        self._mapping[key] = _with_expiry(_copy(record), ttl, self._clock)

    async def has(self, key: str, /) -> bool:
        return await self.get(key) is not None

    async def delete(self, key: str, /) -> bool:
        return self._mapping.pop(key, None) is not None

    async def clear(self) -> None:
        self._mapping.clear()


class _ObjectCache:
    """An object with methods, sync or async, as a cache."""

    def __init__(self, cache: CacheObject, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._takes_ttl = _takes_ttl(cache.set)

    async def get(self, key: str, /) -> StepRecord | None:
        return _unexpired(key, await _await_if_needed(self._cache.get(key)), self._clock)

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        copy = _copy(record)
        if ttl is not None and self._takes_ttl:
            await _await_if_needed(self._cache.set(key, copy, ttl=ttl))
        else:
            await _await_if_needed(self._cache.set(key, _with_expiry(copy, ttl, self._clock)))

    async def has(self, key: str, /) -> bool:
        return await self.get(key) is not None

    async def delete(self, key: str, /) -> bool:
        return bool(await _await_if_needed(self._cache.delete(key)))

    async def clear(self) -> None:
        clear = getattr(self._cache, "clear", None)
        if not callable(clear):
            raise InvalidArgument("cache", self._cache, "a cache with a method `clear`")
        await _await_if_needed(clear())


async def _await_if_needed(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _takes_ttl(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "ttl" or p.kind is p.VAR_KEYWORD for p in parameters)


def _copy(record: Mapping[str, Any]) -> dict[str, Any]:
    # Copied, because a function may modify the value that a step returned, but not the record.
    return cast("dict[str, Any]", codec.loads(codec.dumps(record)))


def _with_expiry(record: dict[str, Any], ttl: timedelta | None, clock: Clock) -> dict[str, Any]:
    if ttl is not None:
        record[_EXPIRES] = isoformat(clock.now() + ttl)
    return record


def _unexpired(key: str, entry: Any, clock: Clock) -> StepRecord | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("ok"), bool):
        hint = "A cache contains only records written by the engine; keep other values elsewhere"
        raise InvalidArgument("cache", entry, f"the record of a step under key {key!r}", hint)
    record = _copy(entry)
    expires = record.pop(_EXPIRES, None)
    if expires is not None and clock.now() >= parse_iso(expires, _EXPIRES):
        return None
    return cast("StepRecord", record)
