"""Shared by the tests of the Redis store."""

import os
from datetime import timedelta
from typing import Any

from redis import Redis

from perdure.store import Entry, Grant, LeaseRequest, Store
from perdure.stores.redis import RedisStore, redis
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)

_URL, _NAMESPACE = "PERDURE_TEST_STORE_URL", "PERDURE_TEST_STORE_NAMESPACE"


def opened_here() -> RedisStore:
    """Return the store of the current test, in its process or in a child of it."""
    return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE])


class RedisConformance(StoreConformance):
    """The whole contract, also with other processes."""

    url = f"{__name__}:{opened_here.__name__}"

    def opened(self, url: str, namespace: str) -> RedisStore:
        """Return a store, and let child processes find it."""
        os.environ[_URL], os.environ[_NAMESPACE] = url, namespace
        return opened_here()

    async def reopen(self, store: Store, *, prefix: str = "") -> RedisStore:
        return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE], prefix=prefix)


async def leased(store: RedisStore, *ids: str) -> list[Grant]:
    """Return the grants of runs, which are created if they do not exist."""
    create = as_json(snapshot())
    requests = [
        LeaseRequest(id, "ana", HOUR, create=create, workflow="order") for id in ids or ("run",)
    ]
    return [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]


def step(grant: Grant, n: int) -> Entry:
    """Return the entry that records a step as the grant's n-th write."""
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


async def steps(store: Store, id: str = "run") -> list[str]:
    """Return the keys of a run's steps, in order."""
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])


def execute(client: Redis, *command: str | int) -> Any:
    """Execute a command for which the driver has no method."""
    return client.execute_command(*command)  # type: ignore[no-untyped-call]  # it has no types
