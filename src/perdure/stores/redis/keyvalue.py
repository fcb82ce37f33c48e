"""Strings by key in Redis; the server itself deletes what has expired."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from perdure.clock import Clock, Duration, SystemClock, parse_duration
from perdure.errors import InvalidArgument, StoreCorrupted
from perdure.keyvalue import glob_match
from perdure.store import AsyncCloseable
from perdure.stores._lifecycle import Lifecycle
from perdure.stores.redis import scripts
from perdure.stores.redis.connect import open_link
from perdure.stores.redis.node import Command
from perdure.stores.redis.server import Call, Server
from perdure.validation import check_prefix

_MILLISECOND = timedelta(milliseconds=1)


class RedisKeyValue(AsyncCloseable):
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
        self._life = Lifecycle("Redis key-value", _open, on_move=link.forget_loop)

    async def get(self, key: str, /) -> str | None:
        """Return the value, or `None` if there is none or it has expired."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str], /) -> list[str | None]:
        """Return the value of each key, in order."""
        replies = await self._send(*(("GET", self._key(key)) for key in keys))
        return [_text(key, reply) for key, reply in zip(keys, replies, strict=True)]

    async def set(self, key: str, value: str, /, *, ttl: Duration | None = None) -> None:
        """Store the value, for `ttl` or until it is deleted."""
        span = None if ttl is None else parse_duration(ttl, "ttl") // _MILLISECOND
        if not isinstance(value, str):
            raise InvalidArgument("value", value, "a string")
        name, text = self._key(key), value.encode()
        if span is None:
            await self._send(("SET", name, text))
        elif span == 0:
            # The server refuses a time to live of zero, which here means: expires at once.
            await self._send(("DEL", name))
        else:
            await self._send(("SET", name, text, "PX", span))

    async def replace(self, key: str, old: str | None, new: str | None, /) -> bool:
        """Replace `old` by `new` atomically; `None` stands for a missing value."""
        await self._life.ready()
        call = Call([self._key(key)], [_maybe(old), _maybe(new)])
        [replaced] = await self._server.run(scripts.REPLACE, [call], repeatable=False)
        return bool(replaced)

    async def delete(self, key: str, /) -> bool:
        """Delete the key; return whether it existed."""
        [deleted] = await self._send(("DEL", self._key(key)))
        return bool(deleted)

    async def exists(self, key: str, /) -> bool:
        """Return whether the key has a value that has not expired."""
        [count] = await self._send(("EXISTS", self._key(key)))
        return bool(count)

    async def keys(self, pattern: str = "*", /) -> list[str]:
        """Return the keys that match; `*` matches any string, all else only itself.

        The server examines all its keys for this, some at a time.
        """
        await self._life.ready()
        glob = _glob(self._prefix).replace("*", "\\*") + _glob(pattern)
        stored = {key.decode() async for key in self._server.scan(glob)}
        keys = sorted(key[len(self._prefix) :] for key in stored)
        return [key for key in keys if glob_match(pattern, key)]

    async def close(self) -> None:
        """Close the connections that were opened here."""
        if self._life.close():
            await self._server.close()

    async def _send(self, *commands: Command) -> list[Any]:
        await self._life.ready()
        return await self._server.send(commands)

    def _key(self, key: str) -> bytes:
        if not isinstance(key, str):
            raise InvalidArgument("key", key, "a string")
        return (self._prefix + key).encode()


async def _open() -> None:
    """Connections are opened when they are needed."""


def _text(key: str, reply: bytes | None) -> str | None:
    try:
        return None if reply is None else reply.decode()
    except UnicodeDecodeError as error:
        raise StoreCorrupted(f"the value of {key!r} is not a UTF-8 string") from error


def _maybe(text: str | None) -> str:
    return "" if text is None else "=" + text


def _glob(text: str) -> str:
    """Escape what is special in the server's patterns, except `*`."""
    for special in "\\?[]":
        text = text.replace(special, "\\" + special)
    return text
