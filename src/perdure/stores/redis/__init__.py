"""Runs in Redis, one server or a cluster: each write of a run is one atomic script."""

from typing import Any

from perdure.clock import Clock, Duration, SystemClock
from perdure.store import MAX_VALUE_SIZE
from perdure.stores._durability import Durability
from perdure.stores.redis.connect import open_link
from perdure.stores.redis.durability import DurabilityReport
from perdure.stores.redis.keys import Keys
from perdure.stores.redis.keyvalue import RedisKeyValue
from perdure.stores.redis.server import Server
from perdure.stores.redis.store import RedisStore

__all__ = ["DurabilityReport", "RedisKeyValue", "RedisStore", "redis"]


def redis(
    url: str | None = None,
    *,
    prefix: str = "",
    namespace: str = "perdure",
    client: Any = None,
    cluster: bool = False,
    durability: Durability = "full",
    max_connections: int = 10,
    connect_timeout: Duration = 10,
    timeout: Duration = 60,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> RedisStore:
    """Return the store on a Redis server, or on a cluster: `redis+cluster://…` or `cluster=True`.

    `durability="full"` refuses a server whose acknowledged writes do not survive a power failure,
    and names the settings to change; `"normal"` accepts any server. Every key starts with
    `namespace`. `client` is your own redis-py asyncio client, which the store never closes.
    `connect_timeout` is how long to retry while the server is unavailable, and `timeout` how long
    it may take to reply.

        store = redis("redis://localhost:6379/0", prefix="orders:")
    """
    link = open_link(url, client, cluster=cluster, max_connections=max_connections, timeout=timeout)
    return RedisStore(
        Server(link, connect_timeout=connect_timeout, clock=clock),
        Keys(namespace),
        prefix=prefix,
        durability=durability,
        clock=clock,
        max_value_size=max_value_size,
    )
