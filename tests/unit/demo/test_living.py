"""The sample shop while it is open."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from perdure.demo import living
from perdure.stores import sqlite


@pytest.mark.slow
async def test_killed_workers_are_replaced_and_runs_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "SECONDS_BETWEEN_KILLS", 1)
    monkeypatch.setattr(living, "SECONDS_BETWEEN_STARTS", 0.1)
    path, messages = str(tmp_path / "shop.db"), list[str]()
    async with (
        living.living_shop(f"sqlite:///{path}", say=messages.append, random=Random(1)),
        sqlite(path) as store,
    ):
        while "killed" not in "".join(messages[:-1]):
            await asyncio.sleep(0.05)
        while not (await store.stats()).by_status.get("completed"):
            await asyncio.sleep(0.05)
    assert "started" in messages[-1]
