"""MemoryStore keeps the whole contract."""

from collections.abc import AsyncIterator

import pytest

from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    """On a clock that the checks move."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        self.clock = TestClock()
        async with MemoryStore(clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> MemoryStore:
        assert isinstance(store, MemoryStore)
        assert self.clock is not None
        return MemoryStore(prefix=prefix, clock=self.clock, shares=store)
