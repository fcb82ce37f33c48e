"""Redis: a server process that calls fsync after every write, and a cluster of three."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis

from tests.servers.process import (
    LocalServer,
    NotReady,
    Server,
    eventually,
    free_port,
    program,
    unique_name,
)

SLOTS = 16384


class RedisServer(LocalServer):
    name = "Redis"
    not_ready = (redis.RedisError,)
    extra_flags: Sequence[str] = ()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str]:
        return [
            program("redis-server", package="redis-server"),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
            *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            *self.extra_flags,
        ]

    def probe(self) -> str:
        # INFO responds while the data is still being loaded; PING does not.
        with _client(self.url) as client:
            client.ping()
        return redis_version(self.url)


class ClusterNode(RedisServer):
    name = "Redis-node"

    def __init__(self) -> None:
        super().__init__()
        bus = ("--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
        self.bus_port = int(bus[1])
        self.extra_flags = ("--cluster-enabled", "yes", *bus)


class RedisCluster:
    """Three masters on loopback that share the hash slots; `url` names the first."""

    name = "Redis Cluster"
    ours = True

    def __init__(self) -> None:
        self.nodes = [ClusterNode() for _ in range(3)]
        self.version = ""

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> "RedisCluster":
        for node in self.nodes:
            node.ensure()
        if not self.version:
            self._join()
        eventually(self._check, retry_on=(NotReady, redis.RedisError))
        self.version = f"{self.nodes[0].version} in cluster mode"
        return self

    def ensure(self) -> None:
        if not all(node.running for node in self.nodes):
            self.start()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _join(self) -> None:
        first = self.nodes[0]
        bounds = [SLOTS * n // len(self.nodes) for n in range(len(self.nodes) + 1)]
        for n, node in enumerate(self.nodes):
            with _client(node.url) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[n], bounds[n + 1] - 1)
                if node is not first:
                    client.execute_command(
                        "CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port
                    )

    def _check(self) -> None:
        for node in self.nodes:
            with _client(node.url) as client:
                info = client.execute_command("CLUSTER INFO")
            ok = info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"
            if not ok:
                raise NotReady(f"{node.url} says the cluster is not complete: {info}")


def redis_version(url: str) -> str:
    """Return name and version of the server at `url`."""
    with _client(url) as client:
        return f"Redis {client.info('server')['redis_version']}"


@contextmanager
def fresh_prefix(server: Server) -> Iterator[str]:
    """Yield a unique prefix. Then its keys are removed, and no other key may be left."""
    prefix = f"{unique_name()}:"
    server.ensure()
    before = _keys(server)
    try:
        yield prefix
    finally:
        server.ensure()
        _await_no_clients(server)
        strays = _clear(server, prefix) - before
        if server.ours and strays:
            raise AssertionError(f"the test left keys outside its prefix {prefix!r}: {strays}")


def _urls(server: Server) -> list[str]:
    return [node.url for node in server.nodes] if isinstance(server, RedisCluster) else [server.url]


def _keys(server: Server) -> set[bytes]:
    other_keys: set[bytes] = set()
    for url in _urls(server):
        with _client(url) as client:
            other_keys.update(client.scan_iter(count=1000))
    return other_keys


def _clear(server: Server, prefix: str) -> set[bytes]:
    """Remove the keys that contain `prefix` (possibly after a hash tag); return the others."""
    others: set[bytes] = set()
    for url in _urls(server):
        with _client(url) as client:
            # One fsync for all of them.
            pipeline = client.pipeline(transaction=False)
            for key in client.scan_iter(count=1000):
                if prefix.encode() in key:
                    pipeline.unlink(key)
                else:
                    others.add(key)
            pipeline.execute()
    return others


def _await_no_clients(server: Server) -> None:
    """Wait for the server to notice closed connections; fail if some were left open."""

    def attempt() -> None:
        for url in _urls(server):
            with _client(url) as client:
                open_clients = [c for c in client.client_list() if c["cmd"] != "client|list"]
            if open_clients:
                raise NotReady(f"the test left connections to {url} open: {open_clients}")

    if server.ours:
        eventually(attempt, retry_on=(NotReady,), connect_timeout=10)


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_connect_timeout=5)
