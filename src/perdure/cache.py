"""The step cache contract: records of steps with an explicit key, kept across runs.

A cache is what the user has at hand: a dict, a `MemoryCache`, a `FileCache`, or any object with
`get`, `set` and `delete`, whose methods answer at once or are awaited. `as_cache` gives the engine
one face for all of them. What lies in a cache under a step's key is the step's *record*, a dict of
plain JSON that says whether the step succeeded and with what; removing it makes the step run again.
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
        """Give the step's record, or None when there is none or its time is over."""
        ...

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        """Keep the record; `ttl` goes before the cache's own time to live."""
        ...

    async def has(self, key: str, /) -> bool:
        """Tell whether `get` would give a record."""
        ...

    async def delete(self, key: str, /) -> bool:
        """Forget the record, so that the step runs again; tell whether there was one."""
        ...

    async def clear(self) -> None:
        """Forget every record."""
        ...


class CacheObject(Protocol):
    """An object that serves as a cache; each method may answer at once or give an awaitable.

    `has` and `clear` are used where they are there. `set` is given `ttl=` when it takes one.
    """

    @property
    def get(self) -> Callable[..., Any]:
        """`get(key)` gives the record or None."""
        ...

    @property
    def set(self) -> Callable[..., Any]:
        """`set(key, record)`, or `set(key, record, ttl=timedelta)`."""
        ...

    @property
    def delete(self) -> Callable[..., Any]:
        """`delete(key)` tells whether there was a record."""
        ...


CacheLike: TypeAlias = MutableMapping[str, Any] | CacheObject


def as_cache(cache: CacheLike, *, clock: Clock = SystemClock()) -> StepCache:
    """Give the engine's face of a dict or of an object with `get`, `set` and `delete`."""
    if isinstance(cache, _ObjectCache | _MappingCache):
        return cache
    if isinstance(cache, MutableMapping):
        return _MappingCache(cache, clock)
    methods = [getattr(cache, verb, None) for verb in ("get", "set", "delete")]
    if all(map(callable, methods)) and not isinstance(cache, type):
        return _ObjectCache(cache, clock)
    raise InvalidArgument("cache", cache, "a dict, or an object with get, set and delete")


class _MappingCache:
    """A dict, or anything like one, as a cache."""

    def __init__(self, mapping: MutableMapping[str, Any], clock: Clock) -> None:
        self._mapping = mapping
        self._clock = clock

    async def get(self, key: str, /) -> StepRecord | None:
        return _fresh_record(key, self._mapping.get(key), self._clock)

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
        return _fresh_record(key, await _settled(self._cache.get(key)), self._clock)

    async def set(self, key: str, record: StepRecord, /, *, ttl: timedelta | None = None) -> None:
        copied = _copy(record)
        if ttl is not None and self._takes_ttl:
            await _settled(self._cache.set(key, copied, ttl=ttl))
        else:
            await _settled(self._cache.set(key, _with_expiry(copied, ttl, self._clock)))

    async def has(self, key: str, /) -> bool:
        return await self.get(key) is not None

    async def delete(self, key: str, /) -> bool:
        return bool(await _settled(self._cache.delete(key)))

    async def clear(self) -> None:
        clear = getattr(self._cache, "clear", None)
        if not callable(clear):
            raise InvalidArgument("cache", self._cache, "a cache with a method clear")
        await _settled(clear())


async def _settled(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _takes_ttl(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "ttl" or p.kind is p.VAR_KEYWORD for p in parameters)


def _copy(record: Mapping[str, Any]) -> dict[str, Any]:
    # The function that got a step's value may change it, and must not change what was recorded.
    return cast("dict[str, Any]", codec.loads(codec.dumps(record)))


def _with_expiry(record: dict[str, Any], ttl: timedelta | None, clock: Clock) -> dict[str, Any]:
    if ttl is not None:
        record[_EXPIRES] = isoformat(clock.now() + ttl)
    return record


def _fresh_record(key: str, found: Any, clock: Clock) -> StepRecord | None:
    if found is None:
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("ok"), bool):
        hint = "A cache holds what the engine put there; keep other values in a place of their own"
        raise InvalidArgument("cache", found, f"the record of a step under key {key!r}", hint)
    record = _copy(found)
    expires = record.pop(_EXPIRES, None)
    if expires is not None and clock.now() >= parse_iso(expires, _EXPIRES):
        return None
    return cast("StepRecord", record)
