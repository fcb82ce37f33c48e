"""The Redis store keeps the whole contract, on one server and on a cluster of three."""

import os
from collections.abc import AsyncIterator

import pytest

from perdure.store import Store
from perdure.stores.redis import RedisStore, redis
from perdure.testing.conformance import StoreConformance

_URL, _NAMESPACE = "PERDURE_TEST_STORE_URL", "PERDURE_TEST_STORE_NAMESPACE"


def opened_by_another_process() -> RedisStore:
    """Give the store of the test that started this process."""
    return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE])


class _RedisChecks(StoreConformance):
    url = f"{__name__}:{opened_by_another_process.__name__}"

    def opened(
        self, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> RedisStore:
        monkeypatch.setenv(_URL, url)
        monkeypatch.setenv(_NAMESPACE, namespace)
        return redis(url, namespace=namespace)

    async def reopen(self, store: Store, *, prefix: str = "") -> RedisStore:
        return redis(os.environ[_URL], namespace=os.environ[_NAMESPACE], prefix=prefix)


class TestRedis(_RedisChecks):
    """On one server."""

    @pytest.fixture
    async def store(
        self, redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[RedisStore]:
        async with self.opened(redis_url, redis_prefix, monkeypatch) as store:
            yield store


class TestRedisCluster(_RedisChecks):
    """On a cluster."""

    @pytest.fixture
    async def store(
        self, redis_cluster_url: str, redis_cluster_prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[RedisStore]:
        url = redis_cluster_url.replace("redis://", "redis+cluster://")
        async with self.opened(url, redis_cluster_prefix, monkeypatch) as store:
            yield store
