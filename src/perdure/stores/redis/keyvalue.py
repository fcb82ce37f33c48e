"""Strings by key in Redis; the server itself deletes what has expired."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.errors import StoreCorrupted
from perdure.keyvalue import glob_match
from perdure.stores._keyvalue import DatabaseKeyValue
from perdure.stores.redis import scripts
from perdure.stores.redis.connect import open_link
from perdure.stores.redis.server import Call, Server
from perdure.validation import check_prefix

_MILLISECOND = timedelta(milliseconds=1)


class RedisKeyValue(DatabaseKeyValue):
    """A `KeyValueStore` with compare-and-set; each value is a plain Redis string.

    The options are those of `redis`; every key starts with `prefix`.

        kv = RedisKeyValue("redis://localhost:6379/0", prefix="state:")
        persistence = StatePersistence(kv)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "",
        client: Any = None,
        cluster: bool = False,
        max_connections: int = 10,
        connect_timeout: Duration = 10,
        timeout: Duration = 60,
        clock: Clock = SystemClock(),
    ) -> None:
        link = open_link(
            url, client, cluster=cluster, max_connections=max_connections, timeout=timeout
        )
        self._prefix = check_prefix(prefix)
        self._server = Server(link, connect_timeout=connect_timeout, clock=clock)
        super().__init__("Redis", close=self._server.close, forget_loop=link.forget_loop)

    async def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        replies = await self._server.send([("GET", self._key(key)) for key in keys])
        return {
            key: _text(key, reply)
            for key, reply in zip(keys, replies, strict=True)
            if reply is not None
        }

    async def _set(self, key: str, value: str, ttl: timedelta | None) -> None:
        name, text = self._key(key), value.encode()
        if ttl is None:
            await self._server.send([("SET", name, text)])
        elif ttl < _MILLISECOND:
            # The server refuses a time to live of zero, which here means: expires at once.
            await self._server.send([("DEL", name)])
        else:
            await self._server.send([("SET", name, text, "PX", ttl // _MILLISECOND)])

    async def _delete(self, key: str) -> bool:
        [deleted] = await self._server.send([("DEL", self._key(key))])
        return bool(deleted)

    async def _exists(self, key: str) -> bool:
        [count] = await self._server.send([("EXISTS", self._key(key))])
        return bool(count)

    async def _keys(self, pattern: str) -> list[str]:
        # The server examines all its keys for this, some at a time.
        glob = _glob(self._prefix).replace("*", "\\*") + _glob(pattern)
        stored = {key.decode() async for key in self._server.scan(glob)}
        keys = sorted(key[len(self._prefix) :] for key in stored)
        return [key for key in keys if glob_match(pattern, key)]

    async def _replace(self, key: str, old: str | None, new: str | None) -> bool:
        call = Call([self._key(key)], [_maybe(old), _maybe(new)])
        [replaced] = await self._server.run(scripts.REPLACE, [call], repeatable=False)
        return bool(replaced)

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()


def _text(key: str, reply: bytes) -> str:
    try:
        return reply.decode()
    except UnicodeDecodeError as error:
        raise StoreCorrupted(f"the value of {key!r} is not a UTF-8 string") from error


def _maybe(text: str | None) -> str:
    return "" if text is None else "=" + text


def _glob(text: str) -> str:
    """Escape what is special in the server's patterns, except `*`."""
    for special in "\\?[]":
        text = text.replace(special, "\\" + special)
    return text
