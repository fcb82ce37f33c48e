"""JSON documents in a key-value store, changed without lost updates.

If the key-value store has compare-and-set, this holds across processes. Otherwise it holds only
between the tasks of one process, which share a lock for each key.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError, StoreError, StoreUnavailable
from perdure.keyvalue import CompareAndSet, DriverKeyValue, GetMany, KeyValueStore

T = TypeVar("T")
R = TypeVar("R")

Edit: TypeAlias = Callable[[str | None], str | None]

_MAX_CONCURRENT = 50


@dataclass(slots=True)
class _KeyLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


# Stores of one process on the same key-value store share the locks of its keys.
_locks: WeakKeyDictionary[Any, dict[str, _KeyLock]] = WeakKeyDictionary()


class Documents:
    """Documents by key, read and changed through one key-value store."""

    def __init__(self, kv: KeyValueStore) -> None:
        self._kv = kv
        self._compare_and_set = kv if isinstance(kv, CompareAndSet) else None
        self._locks = _locks_of(kv.driver if isinstance(kv, DriverKeyValue) else kv)
        self._random = Random()

    @property
    def is_atomic(self) -> bool:
        """Whether changes are atomic across processes."""
        return self._compare_and_set is not None

    def unique_name(self) -> str:
        """Return a name that no other writer uses."""
        # With the process id, because a forked process draws the same random numbers.
        return f"{os.getpid():x}.{self._random.getrandbits(64):016x}"

    @asynccontextmanager
    async def lock(self, key: str) -> AsyncGenerator[None, None]:
        """Lock a key against the other tasks of this process."""
        key_lock = self._locks.setdefault(key, _KeyLock())
        key_lock.users += 1
        try:
            async with key_lock.lock:
                yield
        finally:
            key_lock.users -= 1
            if not key_lock.users:
                del self._locks[key]

    def lock_swap(self, key: str) -> AbstractAsyncContextManager[None]:
        """Lock a key against a `swap` that is not atomic by itself."""
        return self.lock(f"swap {key}")

    async def read(self, key: str) -> str | None:
        """Return a document, or `None`."""
        return await translate_errors(self._kv.get(key))

    async def read_many(self, keys: Sequence[str]) -> list[str | None]:
        """Return the documents, in as few round trips as the key-value store allows."""
        if not keys:
            return []
        if isinstance(self._kv, GetMany):
            return list(await translate_errors(self._kv.get_many(keys)))
        return await concurrently(self.read, keys)

    async def write(self, key: str, text: str) -> None:
        """Write a document that no other process writes."""
        await translate_errors(self._kv.set(key, text))

    async def remove(self, key: str) -> None:
        """Remove a document, if it exists."""
        await translate_errors(self._kv.delete(key))

    async def swap(self, key: str, old: str | None, new: str | None) -> bool:
        """Replace `old` with `new` (`None`: no document); return whether `old` was there."""
        if self._compare_and_set is not None:
            return await translate_errors(self._compare_and_set.replace(key, old, new))
        async with self.lock_swap(key):
            if await self.read(key) != old:
                return False
            if new is None:
                await self.remove(key)
            else:
                await self.write(key, new)
            return True

    async def change(self, key: str, edit: Edit) -> None:
        """Apply a function to a document's text; `None` stands for a missing document."""
        while True:
            old = await self.read(key)
            new = edit(old)
            if new == old or await self.swap(key, old, new):
                return


async def concurrently(work: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """Process many items, a limited number at a time."""
    if len(items) == 1:
        return [await work(items[0])]
    results: list[R] = []
    for start in range(0, len(items), _MAX_CONCURRENT):
        results += await asyncio.gather(*map(work, items[start : start + _MAX_CONCURRENT]))
    return results


def _locks_of(kv: object) -> dict[str, _KeyLock]:
    try:
        return _locks.setdefault(kv, {})
    except TypeError:
        # Not hashable, or without weak references: stores on it cannot share locks.
        return {}


async def translate_errors(answer: Awaitable[T]) -> T:
    """Await a call of the key-value store, and translate its errors."""
    try:
        return await answer
    except PerdureError:
        raise
    except (OSError, TimeoutError) as error:
        raise StoreUnavailable(f"the key-value store is unavailable: {error}") from error
    except Exception as error:  # the user's own store may raise anything
        raise StoreError(f"the key-value store failed: {error!r}") from error
