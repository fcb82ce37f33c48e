"""An old database of each kind, and the store that opens it."""

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores.old_databases import Run
from tests.stores.old_databases.checks import URLS
from tests.stores.old_databases.places import Place

FEW = 12


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty database."""
    kind: str = request.param
    if kind not in URLS:
        return Place(kind, str(tmp_path / ("runs" if kind == "file" else "runs.db")))
    namespace = request.getfixturevalue("redis_prefix") if kind == "redis" else ""
    return Place(kind, request.getfixturevalue(URLS[kind]), namespace)


@pytest.fixture
async def runs(place: Place) -> AsyncIterator[dict[str, Run]]:
    """The runs of the old database, as they were read before."""
    yield await place.fill(FEW)
    if place.kind == "mongo":
        gc.collect()


@pytest.fixture
async def store(place: Place, runs: dict[str, Run]) -> AsyncIterator[Any]:
    async with place.open() as store:
        yield store
