"""Runs in MongoDB: on a standalone server, a replica set or a sharded cluster."""

from collections.abc import Mapping
from typing import Any

# First, because it raises a helpful error when PyMongo is missing.
from perdure.stores.mongo.driver import AsyncMongoClient

# isort: split
from perdure.clock import Clock, Duration, SystemClock
from perdure.store import MAX_VALUE_SIZE, Capabilities
from perdure.stores._durability import Durability, survives
from perdure.stores.mongo.connection import (
    Connection,
    Target,
    check_collection,
    parse_target,
)
from perdure.stores.mongo.keyvalue import MongoKeyValue
from perdure.stores.mongo.layout import prepare
from perdure.stores.mongo.schema import collections_of
from perdure.stores.mongo.store import MongoReplicaSetStore, MongoStore
from perdure.stores.mongo.transaction import MongoTransaction
from perdure.validation import check_prefix

__all__ = [
    "MongoKeyValue",
    "MongoReplicaSetStore",
    "MongoStore",
    "MongoTransaction",
    "mongo",
]


def mongo(
    url: str,
    *,
    database: str | None = None,
    collection: str = "perdure_runs",
    prefix: str = "",
    client: AsyncMongoClient[Any] | None = None,
    client_options: Mapping[str, Any] | None = None,
    replica_set: bool | None = None,
    durability: Durability = "full",
    connect_timeout: Duration = 30,
    clock: Clock = SystemClock(),
    max_value_size: int = MAX_VALUE_SIZE,
) -> MongoStore:
    """Return the store in a MongoDB database: `database`, or the URL's, or `perdure`.

    On a replica set or a sharded cluster, the store also has transactions and notifications.
    Whether it is one is derived from the URL (`replicaSet=`, several hosts, `mongodb+srv://`)
    unless `replica_set` is passed. With `durability="full"` a reply means that a majority of the
    servers has the write in its journal; with `"normal"`, that the primary received it. A `client`
    that is passed in is never closed; `client_options` are for the store's own client.
    `connect_timeout` is how long to retry while the server is unavailable;
    `serverSelectionTimeoutMS` in the URL or the options overrides it. `clock` only measures
    durations: leases expire by the server's clock.

        store = mongo("mongodb://localhost:27017/mydb", prefix="orders:")
    """
    target = parse_target(url, database, replica_set)
    kind = MongoReplicaSetStore if target.replica_set else MongoStore
    name = check_collection(collection)
    connection = Connection(
        url,
        target=target,
        client=client,
        client_options=client_options,
        connect_timeout=connect_timeout,
        durability=durability,
        clock=clock,
        bind=lambda opened: collections_of(opened, name),
        prepare=prepare,
    )
    capabilities = _capabilities(target, durability, max_value_size)
    return kind(connection, check_prefix(prefix), capabilities)


def _capabilities(target: Target, durability: Durability, max_value_size: int) -> Capabilities:
    return Capabilities(
        journal=True,
        lease="atomic",
        schedule=True,
        queues=True,
        inbox=True,
        transaction=target.replica_set,
        handoff=True,
        notify=target.replica_set,
        maintenance=True,
        search=True,
        shared="network",
        survives=survives(durability),
        max_value_size=max_value_size,
    )
