"""FileStore keeps the whole contract, and what it acknowledged survives the end of its process."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance import StoreConformance


class TestFileStore(StoreConformance):
    """On a clock that the checks move."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[FileStore]:
        self.clock = TestClock()
        self.directory = tmp_path / "runs"
        async with FileStore(self.directory, clock=self.clock) as store:
            yield store

    async def reopen(self, store: Store, *, prefix: str = "") -> FileStore:
        assert self.clock is not None
        return FileStore(self.directory, prefix=prefix, clock=self.clock)
