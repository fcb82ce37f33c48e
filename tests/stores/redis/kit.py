"""What the tests of the Redis store share."""

import os
from datetime import timedelta

from perdure.store import Entry, Grant, LeaseRequest, Store
from perdure.stores.redis import RedisStore, redis
from perdure.testing.conformance import StoreConformance
from perdure.testing.conformance.samples import as_json, snapshot

HOUR = timedelta(hours=1)

_URL, _NAMESPACE = "PERDURE_TEST_STORE_URL", "PERDURE_TEST_STORE_NAMESPACE"


def opened_here() -> RedisStore:
    """Give the store of the test whose process, or whose child, this is."""
    return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE])


class RedisConformance(StoreConformance):
    """The whole contract, also together with other processes."""

    url = f"{__name__}:{opened_here.__name__}"

    def opened(self, url: str, namespace: str) -> RedisStore:
        """Give a store, and let others find it."""
        os.environ[_URL], os.environ[_NAMESPACE] = url, namespace
        return opened_here()

    async def reopen(self, store: Store, *, prefix: str = "") -> RedisStore:
        return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE], prefix=prefix)


async def leased(store: RedisStore, *ids: str, ttl: timedelta = HOUR) -> list[Grant]:
    """Give the grants of runs, which are created when they are not there."""
    create = as_json(snapshot())
    wants = [
        LeaseRequest(id, "ana", ttl, create=create, workflow="order") for id in ids or ("run",)
    ]
    return [grant for grant in await store.acquire(wants) if grant is not None]


def step(grant: Grant, n: int) -> Entry:
    """Give the entry that records one step as the grant's n-th write."""
    return Entry(grant.lease.id, grant.lease.epoch, n, as_json(snapshot(f"{n}")))


async def steps(store: RedisStore, id: str = "run") -> list[str]:
    """Give the keys of a run's steps, in order."""
    loaded = await store.load(id)
    assert loaded is not None
    return list(loaded["steps"])
