"""The MySQL store fulfills the contract on a real server."""

from collections.abc import AsyncIterator

import pytest

from perdure.store import Store
from perdure.stores import mysql
from perdure.testing.conformance import StoreConformance
from tests.stores.mysql.kit import MysqlHarness


class TestMysqlStore(MysqlHarness, StoreConformance):
    """Opened by URL."""

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        async with mysql(empty_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return mysql(self.direct_url, prefix=prefix)
