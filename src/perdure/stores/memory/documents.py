"""The documents of a memory store."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from perdure.keyvalue import MemoryKeyValue
from perdure.stores._keyvalue import KeyValueBackend, keys_with_prefix


class MemoryDocuments(KeyValueBackend):
    """Documents in a `MemoryKeyValue`, which stores may share."""

    def __init__(self, kv: MemoryKeyValue, prefix: str) -> None:
        super().__init__(prefix)
        self._kv = kv

    async def set_up(self) -> None:
        """Do nothing: there is no table to create."""

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        values = await self._kv.get_many(keys)
        pairs = zip(keys, values, strict=True)
        return {key: value for key, value in pairs if value is not None}

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        await self._kv.set(key, value, ttl=ttl)

    async def delete(self, key: str) -> bool:
        return await self._kv.delete(key)

    async def keys(self, prefix: str) -> Iterable[str]:
        return await keys_with_prefix(self._kv.keys, prefix)

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        return await self._kv.replace(key, old, new)
