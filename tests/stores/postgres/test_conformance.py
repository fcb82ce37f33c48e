"""The PostgreSQL store fulfills the contract on a real server."""

from collections.abc import AsyncIterator

import pytest

from perdure.store import Store
from perdure.stores import postgres
from perdure.testing.conformance import StoreConformance
from tests.stores.postgres.kit import PostgresHarness


class TestPostgresStore(PostgresHarness, StoreConformance):
    """Opened by URL."""

    @pytest.fixture
    async def store(self, empty_url: str) -> AsyncIterator[Store]:
        self.url = self.direct_url = empty_url
        async with postgres(empty_url) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> Store:
        return postgres(self.direct_url, prefix=prefix)
