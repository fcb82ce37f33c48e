"""Strings by key in Redis; the server itself deletes expired keys."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.errors import StoreCorrupted
from perdure.stores._keyvalue import DatabaseKeyValue, KeyValueBackend
from perdure.stores.redis import scripts
from perdure.stores.redis.connect import open_link
from perdure.stores.redis.server import Call, Server
from perdure.validation import check_prefix

MILLISECOND = timedelta(milliseconds=1)


class KeyValueStrings(KeyValueBackend):
    """Plain strings, each under its own key; the server finds keys by examining all of them."""

    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__(prefix)
        self._server = server

    async def set_up(self) -> None:
        """Do nothing: there is no table to create."""

    async def get(self, keys: Sequence[str]) -> Mapping[str, str]:
        replies = await self._server.send([("GET", key) for key in keys])
        return read_values(keys, replies)

    async def set(self, key: str, value: str, ttl: timedelta | None) -> None:
        if ttl is None:
            await self._server.send([("SET", key, value)])
        elif ttl < MILLISECOND:
            # The server rejects a time to live of zero, which here means that the value expires at
            # once.
            await self._server.send([("DEL", key)])
        else:
            await self._server.send([("SET", key, value, "PX", ttl // MILLISECOND)])

    async def delete(self, key: str) -> bool:
        [count] = await self._server.send([("DEL", key)])
        return bool(count)

    async def exists(self, key: str) -> bool:
        [count] = await self._server.send([("EXISTS", key)])
        return bool(count)

    async def keys(self, prefix: str) -> list[str]:
        return [key.decode() async for key in self._server.scan(_literal(prefix) + "*")]

    async def replace(self, key: str, old: str | None, new: str | None) -> bool:
        call = Call([key.encode()], [optional(old), optional(new)])
        [was_replaced] = await self._server.run(scripts.REPLACE, [call], repeatable=False)
        return bool(was_replaced)


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
        self._server = Server(link, connect_timeout=connect_timeout, clock=clock)
        super().__init__(
            "Redis",
            KeyValueStrings(self._server, check_prefix(prefix)),
            close=self._server.close,
            forget_loop=link.forget_loop,
        )


def read_values(keys: Sequence[str], replies: Sequence[bytes | None]) -> Mapping[str, str]:
    """Return the values of the keys that exist."""
    return {
        key: _text(key, reply)
        for key, reply in zip(keys, replies, strict=True)
        if reply is not None
    }


def optional(text: str | None) -> str:
    """Return a value as scripts expect it: `=` before it, or nothing for `None`."""
    return "" if text is None else "=" + text


def _text(key: str, reply: bytes) -> str:
    try:
        return reply.decode()
    except UnicodeDecodeError as error:
        raise StoreCorrupted(f"the value of {key!r} is not a UTF-8 string") from error


def _literal(text: str) -> str:
    """Escape special characters of the server's patterns."""
    for special in "\\?[]*":
        text = text.replace(special, "\\" + special)
    return text
