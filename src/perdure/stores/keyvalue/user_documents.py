"""The documents that users keep beside the runs in a key-value store."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from perdure.keyvalue import KeyValueStore
from perdure.stores._keyvalue import KeyValueBackend, keys_with_prefix
from perdure.stores.keyvalue.documents import Documents, translate_errors


class UserDocuments(KeyValueBackend):
    """Documents in the key-value store of the runs, which also implements their expiry.

    Without compare-and-set, `replace` is atomic only between the tasks of one process.
    """

    def __init__(self, kv: KeyValueStore, documents: Documents, scope: str) -> None:
        super().__init__(f"perdure:document:{scope}")
        self._kv = kv
        self._documents = documents

    async def set_up(self) -> None:
        """Do nothing: there is no table to create."""

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        values = await self._documents.read_many(keys)
        pairs = zip(keys, values, strict=True)
        return {key: value for key, value in pairs if value is not None}

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        async with self._lock(key):
            await translate_errors(self._kv.set(key, value, ttl=ttl))

    async def delete(self, key: str) -> bool:
        async with self._lock(key):
            # Drivers of py-key-value-aio may still list expired keys, and report them as deleted.
            existed = await self._documents.read(key) is not None
            return await translate_errors(self._kv.delete(key)) and existed

    async def keys(self, prefix: str) -> Iterable[str]:
        keys = [*await translate_errors(keys_with_prefix(self._kv.keys, prefix))]
        return await self.get(keys)

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        return await self._documents.swap(key, old, new)

    @asynccontextmanager
    async def _lock(self, key: str) -> AsyncGenerator[None]:
        """Exclude a concurrent `replace` in this process, which reads before it writes."""
        if self._documents.is_atomic:
            yield
        else:
            async with self._documents.lock_swap(key):
                yield
