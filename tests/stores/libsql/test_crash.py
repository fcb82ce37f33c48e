"""Processes that write to a libSQL server and are killed."""

from pathlib import Path

import pytest

from perdure.stores.libsql import libsql
from tests.servers.sqld import query
from tests.stores.sqlite.writers import writers_on


async def test_every_acknowledged_entry_survives_kill_9(sqld_url: str, tmp_path: Path) -> None:
    """Acknowledged batches are stored, others completely or not at all."""
    async with writers_on(sqld_url, tmp_path) as writers, libsql(sqld_url) as store:
        acknowledged = await writers.kill_one_after_another("append", "run", 25, max_delay=0.5)
        loaded = await store.load("run")
        assert loaded is not None
        batches = {key.rpartition(".")[0] for key in loaded["steps"]}
        assert set(acknowledged) <= batches
        assert set(loaded["steps"]) == {f"{key}.{part}" for key in batches for part in range(3)}


@pytest.mark.slow
async def test_accounts_balance_after_kill_9(sqld_url: str, tmp_path: Path) -> None:
    """Every recorded step moved its amount exactly once, and nothing else moved.

    Slow, because the server keeps the transaction of a dead client for five seconds.
    """
    query(sqld_url, "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER)")
    query(sqld_url, "INSERT INTO account VALUES ('ana', 0), ('bob', 0)")
    async with writers_on(sqld_url, tmp_path) as writers, libsql(sqld_url) as store:
        acknowledged = await writers.kill_one_after_another("move", "run", 5, max_delay=6.0)
        loaded = await store.load("run")
        assert loaded is not None
        moved = len(loaded["steps"])
        assert set(acknowledged) <= set(loaded["steps"])
    rows = query(sqld_url, "SELECT id, balance FROM account ORDER BY id")
    assert rows == [["ana", str(-moved)], ["bob", str(moved)]]
