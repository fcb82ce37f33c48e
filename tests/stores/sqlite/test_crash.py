"""SQLite with writers that are killed, and with many processes at once."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from perdure.stores.sqlite import sqlite
from tests.stores.sqlite.writers import Writers, writers_on


@pytest.fixture
async def writers(tmp_path: Path) -> AsyncIterator[Writers]:
    async with writers_on(str(tmp_path / "runs.db"), tmp_path) as writers:
        yield writers


async def test_every_acknowledged_entry_survives_kill_9(writers: Writers) -> None:
    """A hundred kills: acknowledged batches are stored, others completely or not at all."""
    runs = [f"run {number}" for number in range(4)]
    acknowledged = await asyncio.gather(
        *(writers.kill_one_after_another("append", run, 25) for run in runs)
    )
    assert all(len(entries) >= 12 for entries in acknowledged)
    async with sqlite(writers.place) as store:
        for run, lines in zip(runs, acknowledged, strict=True):
            loaded = await store.load(run)
            assert loaded is not None
            steps = loaded["steps"]
            batches = {key.rpartition(".")[0] for key in steps}
            assert set(lines) <= batches
            assert set(steps) == {f"{key}.{part}" for key in batches for part in range(3)}
            assert all(step == {"ok": True, "value": "x" * 99} for step in steps.values())


async def test_accounts_balance_after_kill_9(writers: Writers) -> None:
    """Fifty kills: every recorded step moved its amount exactly once, and nothing else moved."""
    with closing(sqlite3.connect(writers.place)) as bank:
        bank.execute("CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER)")
        bank.execute("INSERT INTO account VALUES ('ana', 0), ('bob', 0)")
        bank.commit()
        runs = ["left", "right"]
        acknowledged = await asyncio.gather(
            *(writers.kill_one_after_another("move", run, 25) for run in runs)
        )
        moved = 0
        async with sqlite(writers.place) as store:
            for run, lines in zip(runs, acknowledged, strict=True):
                loaded = await store.load(run)
                assert loaded is not None
                assert set(lines) <= set(loaded["steps"])
                moved += len(loaded["steps"])
        balances = dict(bank.execute("SELECT id, balance FROM account"))
    assert balances == {"ana": -moved, "bob": moved}


async def test_four_processes_share_a_file_without_an_error(writers: Writers) -> None:
    """Four processes, each with fifty concurrent runs of ten steps, all finish."""
    names = [f"process {number}" for number in range(4)]
    processes = [await writers.start("fifty", name) for name in names]
    await asyncio.gather(*map(writers.ended, processes))
    assert [writers.acknowledged(name) for name in names] == [["done"]] * 4
    async with sqlite(writers.place) as store:
        stats = await store.stats()
        assert stats.by_status == {"completed": 200}
        loaded = await store.load("process 3 49")
        assert loaded is not None
        assert list(loaded["steps"]) == [f"step {number}" for number in range(10)]
