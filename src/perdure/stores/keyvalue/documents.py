"""JSON documents in a key-value store, changed so that no change is lost.

Where the store compares and sets, that holds between processes. Elsewhere it holds between the
tasks of one process, which share a lock for each key.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError, StoreError, StoreUnavailable
from perdure.keyvalue import CompareAndSet, DriverKeyValue, GetMany, KeyValueStore

T = TypeVar("T")

_AT_ONCE = 50


@dataclass(slots=True)
class _Held:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


# Stores of one process on the same key-value store guard their keys together.
_guards: WeakKeyDictionary[Any, dict[str, _Held]] = WeakKeyDictionary()


class Documents:
    """Texts by key, read and changed through one key-value store."""

    def __init__(self, kv: KeyValueStore) -> None:
        self._kv = kv
        self._swaps = kv if isinstance(kv, CompareAndSet) else None
        self._held = _guards_of(kv.driver if isinstance(kv, DriverKeyValue) else kv)

    @property
    def is_atomic(self) -> bool:
        """Whether a change is safe against other processes too."""
        return self._swaps is not None

    @asynccontextmanager
    async def guard(self, key: str) -> AsyncGenerator[None, None]:
        """Hold a key against the other tasks of this process."""
        held = self._held.setdefault(key, _Held())
        held.users += 1
        try:
            async with held.lock:
                yield
        finally:
            held.users -= 1
            if not held.users:
                del self._held[key]

    async def read(self, key: str) -> str | None:
        """Give a text, or None."""
        return await _translated(self._kv.get(key))

    async def read_many(self, keys: Sequence[str]) -> list[str | None]:
        """Give the text of each key, in as few round trips as the store allows."""
        if not keys:
            return []
        if isinstance(self._kv, GetMany):
            return list(await _translated(self._kv.get_many(keys)))
        return await at_once(self.read, keys)

    async def write(self, key: str, text: str) -> None:
        """Put a text that no other writes."""
        await _translated(self._kv.set(key, text))

    async def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        await _translated(self._kv.delete(key))

    async def swap(self, key: str, old: str | None, new: str | None) -> bool:
        """Put `new` where `old` is (None: nothing); False when `old` is not there any more."""
        if self._swaps is not None:
            return await _translated(self._swaps.replace(key, old, new))
        async with self.guard(f"swap {key}"):
            if await self.read(key) != old:
                return False
            if new is None:
                await self.remove(key)
            else:
                await self.write(key, new)
            return True

    async def change(self, key: str, edit: Callable[[str | None], str | None]) -> None:
        """Change a text by a function of what it was; None removes it."""
        while True:
            old = await self.read(key)
            new = edit(old)
            if new == old or await self.swap(key, old, new):
                return


async def at_once(do: Callable[[str], Awaitable[T]], keys: Sequence[str]) -> list[T]:
    """Do something for many keys, some of them at a time."""
    done: list[T] = []
    for start in range(0, len(keys), _AT_ONCE):
        done += await asyncio.gather(*map(do, keys[start : start + _AT_ONCE]))
    return done


def _guards_of(kv: object) -> dict[str, _Held]:
    try:
        return _guards.setdefault(kv, {})
    except TypeError:
        # Without weak references or a hash, its stores cannot be told to be on the same one.
        return {}


async def _translated(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except PerdureError:
        raise
    except (OSError, TimeoutError) as error:
        raise StoreUnavailable(f"the key-value store cannot be reached: {error}") from error
    except Exception as error:  # the user's own store
        raise StoreError(f"the key-value store failed: {error!r}") from error
