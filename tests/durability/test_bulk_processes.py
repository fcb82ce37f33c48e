"""A bulk operation of thousands of runs whose process is killed twice, on a SQLite file."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perdure import codec
from perdure.clock import SystemClock, isoformat
from perdure.insights import Insights
from perdure.operations import Operations
from perdure.snapshot import Snapshot
from perdure.store import NewRun, header_of, rest_of
from perdure.stores import sqlite
from perdure.stores.sqlite.store import SqliteStore
from tests.lengths import LONG

RUNS = 10_000 if LONG else 3_000

BULK = """
import asyncio, sys
from perdure.operations import Operations

async def main(url, id):
    async with Operations(url) as operations:
        if id:
            work = operations.resume_bulk(id, by="ana")
        else:
            work = operations.bulk("status:failed", "retry", limit=None, by="ana")
        async for progress in work:
            print(progress.id, progress.done, progress.state, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def failed_run(number: int) -> NewRun:
    now = isoformat(SystemClock().now())
    error: Any = {"ok": False, "error": {"type": "ValueError", "message": "no"}, "cause": None}
    snapshot: Snapshot = {
        "formatVersion": 1,
        "workflowName": "order",
        "steps": {"first": {"ok": True, "value": number, "at": now}},
        "execution": {"status": "failed", "lastUpdated": now, "error": error, "failed": []},
        "metadata": {"createdAt": now, "version": 1},
    }
    data = codec.dumps(snapshot)
    return NewRun(f"run-{number}", "order", data, rest=rest_of(snapshot), **header_of(snapshot))


async def create(store: SqliteStore) -> None:
    for first in range(0, RUNS, 1000):
        await store.enqueue([failed_run(number) for number in range(first, first + 1000)])


async def acts(store: SqliteStore) -> Counter[int]:
    counts: Counter[int] = Counter()
    for number in range(RUNS):
        snapshot: Any = await store.load(f"run-{number}")
        counts[len(snapshot["metadata"].get("acts", ()))] += 1
    return counts


def start(url: str, id: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", BULK, url, id]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_after(process: "subprocess.Popen[str]", runs: int) -> str:
    """Kill a process when it has changed this many runs; return the id of its operation."""
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            id, done, state = line.split()
            assert state == "running", "it ended before it could be killed"
            if int(done) >= runs:
                process.kill()
                return id
    raise AssertionError("it printed nothing")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.long
async def test_each_run_is_changed_once_although_the_process_is_killed_twice(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    async with sqlite(tmp_path / "runs.db") as store:
        await create(store)
        await asyncio.sleep(0.01)
        id = await asyncio.to_thread(kill_after, start(url, ""), RUNS * 15 // 100)
        await asyncio.to_thread(kill_after, start(url, id), RUNS * 40 // 100)
        operations = Operations(store)
        progress = [each async for each in operations.resume_bulk(id, by="ben")][-1]
        assert (progress.state, progress.done, progress.refused) == ("done", RUNS, 0)
        assert await acts(store) == {1: RUNS}
        page = await Insights(store).runs("status:failed")
        assert page.runs == ()
