"""The Redis store satisfies the contract on one server."""

from collections.abc import AsyncIterator

import pytest

from perdure.stores.redis import RedisStore
from tests.stores.redis.kit import RedisConformance


class TestRedis(RedisConformance):
    """On one server that fsyncs every write."""

    examples = 10

    @pytest.fixture
    async def store(self, redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
        async with self.opened(redis_url, redis_prefix) as store:
            yield store
