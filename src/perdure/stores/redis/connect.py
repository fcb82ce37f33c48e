"""Links to the server of a URL, or over a client that was passed in."""

from typing import Any

from perdure.clock import Duration, parse_duration
from perdure.errors import InvalidArgument
from perdure.stores.redis.cluster import Address, ClusterLink
from perdure.stores.redis.errors import load_driver
from perdure.stores.redis.node import Link, NodeLink
from perdure.validation import check_int

_CLUSTER = "+cluster"


def open_link(
    url: str | None, client: Any, *, cluster: bool, max_connections: int, timeout: Duration
) -> Link:
    """Return the link to the server of a URL, or over a client that was passed in.

    Only the settings of a cluster client are used, to open new connections.
    """
    driver = load_driver()
    check_int(max_connections, "max_connections")
    if isinstance(client, driver.RedisCluster):
        return _cluster_client_link(client, max_connections)
    if isinstance(client, driver.Redis):
        return _client_link(client, max_connections)
    if client is not None:
        expected = "a redis.asyncio.Redis or a redis.asyncio.RedisCluster"
        raise InvalidArgument("client", client, expected)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidArgument("url", url, 'a URL such as "redis://localhost:6379/0", or a client=')
    seconds = parse_duration(timeout, "timeout").total_seconds()
    return _url_link(url, cluster=cluster, max_connections=max_connections, timeout=seconds)


def _url_link(url: str, *, cluster: bool, max_connections: int, timeout: float) -> Link:
    driver = load_driver()
    from redis.backoff import NoBackoff

    scheme, _, rest = url.partition("://")
    plain = f"{scheme.removesuffix(_CLUSTER)}://{rest}"
    location = rest.rpartition("@")[2].partition("?")[0] or url
    options = {
        # One more than commands use, to listen for notifications.
        "max_connections": max_connections + 1,
        "socket_timeout": None,
        "socket_connect_timeout": timeout,
        "retry": driver.retry.Retry(NoBackoff(), 0),
        "protocol": 2,
    }

    def make_pool() -> Any:
        return driver.ConnectionPool.from_url(plain, **options)

    if not (cluster or scheme.endswith(_CLUSTER)):
        return NodeLink(
            make_pool, location=location, limit=max_connections, is_ours=True, timeout=timeout
        )
    pool = make_pool()
    settings: dict[str, Any] = {"host": "localhost", "port": 6379, **pool.connection_kwargs}
    seed = (settings["host"], settings["port"])
    return _cluster_link(
        pool.connection_class, settings, [seed], location, max_connections, timeout
    )


def _client_link(client: Any, max_connections: int) -> NodeLink:
    pool = client.connection_pool
    limit = max(1, min(max_connections, pool.max_connections - 1))
    location = "the client that was passed in"
    return NodeLink(lambda: pool, location=location, limit=limit, is_ours=False)


def _cluster_client_link(client: Any, max_connections: int) -> ClusterLink:
    nodes = [*client.nodes_manager.startup_nodes.values()]
    seeds = [(node.host, int(node.port)) for node in nodes]
    limit = max(1, min(max_connections, nodes[0].max_connections - 1))
    location = ", ".join(f"{host}:{port}" for host, port in seeds)
    settings = nodes[0].connection_kwargs
    return _cluster_link(nodes[0].connection_class, settings, seeds, location, limit)


def _cluster_link(
    kind: Any,
    settings: dict[str, Any],
    seeds: list[Address],
    location: str,
    limit: int,
    timeout: float | None = None,
) -> ClusterLink:
    driver = load_driver()

    def make_node(address: Address) -> NodeLink:
        host, port = address
        options = {**settings, "host": host, "port": port}

        def make_pool() -> Any:
            return driver.ConnectionPool(kind, max_connections=limit + 1, **options)

        location = f"{host}:{port}"
        return NodeLink(make_pool, location=location, limit=limit, is_ours=True, timeout=timeout)

    return ClusterLink(make_node, seeds, location=location)
