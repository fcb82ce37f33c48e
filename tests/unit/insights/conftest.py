"""Stores with runs, and a clock that stands still."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.stores import MemoryStore, sqlite
from perdure.stores._shell import StoreShell
from perdure.testing import TestClock


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: TestClock
) -> AsyncIterator[StoreShell[Any]]:
    """Return an empty store: in memory, then in a file."""
    opened: StoreShell[Any] = MemoryStore(clock=clock)
    if request.param == "sqlite":
        opened = sqlite(tmp_path / "runs.db", clock=clock)
    async with opened:
        yield opened
