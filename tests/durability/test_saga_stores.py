"""Random programs with undos on real stores, in processes that crash."""

import asyncio
from pathlib import Path

import pytest

from perdure.stores import open_store
from tests.durability.places import Place, place_of
from tests.durability.sagas.explore import survive
from tests.durability.sagas.programs import draw, in_real_time

SEEDS = [8, 9, 16, 31]
CRASHES = [None, 5, 9]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/programs.db"


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


async def test_each_step_is_undone_once_or_reported(place: Place) -> None:
    """Without a crash, and with crashes in the middle; `explore` has all of them, in memory."""
    store = open_store(place.url, **place.options)
    try:
        for seed in SEEDS:
            for fail_at in CRASHES:
                print(f"seed {seed}, crash at {fail_at}")
                async with asyncio.timeout(20):
                    await survive(in_real_time(draw(seed)), store, f"{seed}-{fail_at}", fail_at)
    finally:
        await store.close()
