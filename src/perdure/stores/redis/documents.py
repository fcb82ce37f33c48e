"""The documents of the Redis store: strings, and an index of their names in each shard."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from perdure.stores._keyvalue import KeyValueBackend
from perdure.stores._prefix import end_of_prefix
from perdure.stores.redis import scripts
from perdure.stores.redis.keys import SHARDS, Keys
from perdure.stores.redis.keyvalue import MILLISECOND, optional, read_values
from perdure.stores.redis.server import Call, Server

_ANY = "*"


class RedisDocuments(KeyValueBackend):
    """Documents in one namespace; `lua/document.lua` describes their keys."""

    def __init__(self, server: Server, keys: Keys, prefix: str) -> None:
        super().__init__(prefix)
        self._server = server
        self._keys = keys

    async def set_up(self) -> None:
        """Do nothing: there is no table to create."""

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        replies = await self._server.send([("GET", self._keys.document(key)) for key in keys])
        return read_values(keys, replies)

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        if ttl is not None and ttl < MILLISECOND:
            # The server rejects a time to live of zero, which here means that the value expires at
            # once.
            await self.delete(key)
        else:
            milliseconds = "" if ttl is None else ttl // MILLISECOND
            await self._write(key, _ANY, optional(value), milliseconds)

    async def delete(self, key: str) -> bool:
        return await self._write(key, _ANY, "")

    async def exists(self, key: str) -> bool:
        [count] = await self._server.send([("EXISTS", self._keys.document(key))])
        return bool(count)

    async def keys(self, prefix: str) -> list[str]:
        # `end_of_prefix` is never `None` here, because the prefix begins with a digit.
        bounds = [prefix, end_of_prefix(prefix) or ""]
        calls = [Call([self._keys.documents(shard)], bounds) for shard in range(SHARDS)]
        replies = await self._server.run(scripts.DOCUMENTS, calls)
        return [name.decode() for names in replies for name in names]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        # Not repeatable: sent again after a lost reply, it would return False for its own success.
        return await self._write(key, optional(old), optional(new), repeatable=False)

    async def _write(
        self, key: str, old: str, new: str, ttl: int | str = "", *, repeatable: bool = True
    ) -> bool:
        call = Call([self._keys.document(key)], [old, new, ttl])
        [had_old] = await self._server.run(scripts.DOCUMENT, [call], repeatable=repeatable)
        return bool(had_old)
