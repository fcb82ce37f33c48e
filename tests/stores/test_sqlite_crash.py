"""SQLite under `kill -9`, and under many processes at once."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest

from perdure.stores.sqlite import sqlite

SCRIPT = Path(__file__).with_name("sqlite_writer.py")


class Writers:
    """Processes that write to one file, and what they said was acknowledged."""

    def __init__(self, folder: Path, parent: Process) -> None:
        self.path = folder / "runs.db"
        self._folder = folder
        self._parent = parent
        self._ordering = asyncio.Lock()
        self._alive: set[int] = set()

    async def start(self, task: str, run: str, turn: int = 0) -> int:
        """Start a writer and give its process id."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        order = [str(self.path), task, run, turn, str(self._log(run))]
        async with self._ordering:
            self._parent.stdin.write(json.dumps(order).encode() + b"\n")
            process = int(await self._parent.stdout.readline())
        self._alive.add(process)
        return process

    async def kill_one_after_another(self, task: str, run: str, turns: int) -> list[str]:
        """Start writers, kill each at a random moment, and give what was acknowledged."""
        random = Random(run)
        for turn in range(turns):
            process = await self.start(task, run, turn)
            await asyncio.sleep(random.uniform(0, 0.2))
            os.kill(process, signal.SIGKILL)
            await self.ended(process)
        return self.acknowledged(run)

    async def ended(self, process: int) -> None:
        """Wait for the end of a writer."""
        with suppress(ProcessLookupError):
            while True:
                os.kill(process, 0)
                await asyncio.sleep(0.002)
        self._alive.discard(process)

    def kill_all(self) -> None:
        """Leave no writer behind."""
        for process in self._alive:
            os.kill(process, signal.SIGKILL)

    def acknowledged(self, run: str) -> list[str]:
        """Give what the writers of a run were told is written."""
        log = self._log(run)
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def _log(self, run: str) -> Path:
        return self._folder / f"{run}.log"


@pytest.fixture
async def writers(tmp_path: Path) -> AsyncIterator[Writers]:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    writers = Writers(tmp_path, parent)
    yield writers
    writers.kill_all()
    _, errors = await parent.communicate(b"")
    assert not errors, errors.decode()


async def test_every_acknowledged_entry_survives_kill_9(writers: Writers) -> None:
    """A hundred kills: what was acknowledged is there, the rest is there whole or not at all."""
    runs = [f"run {number}" for number in range(4)]
    acknowledged = await asyncio.gather(
        *(writers.kill_one_after_another("append", run, 25) for run in runs)
    )
    assert sum(map(len, acknowledged)) > 100
    async with sqlite(writers.path) as store:
        for run, lines in zip(runs, acknowledged, strict=True):
            loaded = await store.load(run)
            assert loaded is not None
            steps = loaded["steps"]
            written = {key.rpartition(".")[0] for key in steps}
            assert set(lines) <= written
            assert set(steps) == {f"{key}.{part}" for key in written for part in range(3)}
            assert all(step == {"ok": True, "value": "x" * 99} for step in steps.values())


async def test_a_ledger_balances_after_kill_9(writers: Writers) -> None:
    """Fifty kills: every recorded step moved its coin exactly once, and no other coin moved."""
    with closing(sqlite3.connect(writers.path)) as bank:
        bank.execute("CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER)")
        bank.execute("INSERT INTO account VALUES ('ana', 0), ('bob', 0)")
        bank.commit()
        runs = ["left", "right"]
        acknowledged = await asyncio.gather(
            *(writers.kill_one_after_another("move", run, 25) for run in runs)
        )
        moved = 0
        async with sqlite(writers.path) as store:
            for run, lines in zip(runs, acknowledged, strict=True):
                loaded = await store.load(run)
                assert loaded is not None
                assert set(lines) <= set(loaded["steps"])
                moved += len(loaded["steps"])
        balances = dict(bank.execute("SELECT id, balance FROM account"))
    assert balances == {"ana": -moved, "bob": moved}


async def test_four_processes_share_a_file_without_an_error(writers: Writers) -> None:
    """Four processes, each with fifty runs of ten steps at once, all finish."""
    names = [f"process {number}" for number in range(4)]
    processes = [await writers.start("fifty", name) for name in names]
    await asyncio.gather(*map(writers.ended, processes))
    assert [writers.acknowledged(name) for name in names] == [["done"]] * 4
    async with sqlite(writers.path) as store:
        stats = await store.stats()
        assert stats.by_status == {"completed": 200}
        loaded = await store.load("process 3 49")
        assert loaded is not None
        assert list(loaded["steps"]) == [f"step {number}" for number in range(10)]
