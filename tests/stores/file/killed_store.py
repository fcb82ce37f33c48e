"""Kills processes that append to a file store, and checks the store after each.

Run as a script with a directory, a count and a seed. It forks from one process that has imported
everything, so that a hundred kills take seconds, and prints the counts as a line of JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure.snapshot import Snapshot
from perdure.store import Entry, Grant, LeaseRequest
from perdure.stores.file import FileStore

RUNS = ("one", "two", "three")
EMPTY = {"formatVersion": 1, "steps": {}, "execution": {"status": "running", "lastUpdated": ""}}


def delta(n: int) -> bytes:
    step = {"ok": True, "value": [n] * (n % 50)}
    return json.dumps({**EMPTY, "steps": {str(n): step}}).encode()


async def append_until_killed(directory: Path, acknowledged: int) -> None:
    """Append batches to all runs, and report the numbers of acknowledged steps after each."""
    async with FileStore(directory) as store:
        first = json.dumps(EMPTY).encode()
        requests = [LeaseRequest(id, "owner", timedelta(hours=1), create=first) for id in RUNS]
        grants = [grant for grant in await store.acquire(requests) if isinstance(grant, Grant)]
        next_step = [len(grant.snapshot["steps"]) for grant in grants]
        os.write(acknowledged, b"ready\n")
        n = 0
        while True:
            n += 1
            entries = [
                Entry(grant.lease.id, grant.lease.epoch, n, delta(start + n - 1))
                for grant, start in zip(grants, next_step, strict=True)
            ]
            assert all(verdict.name == "ACCEPTED" for verdict in await store.append(entries))
            totals = [start + n for start in next_step]
            os.write(acknowledged, json.dumps(totals).encode() + b"\n")


def kill_once(directory: Path, rng: random.Random) -> list[int]:
    """Kill a writer; return how many steps of each run had been acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        asyncio.run(append_until_killed(directory, writing))
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.readline() == "ready\n"
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # The kill may have torn the last line.
        complete = [line for line in lines if line.endswith("\n")]
    return json.loads(complete[-1]) if complete else [0] * len(RUNS)


def check(snapshot: Snapshot, acknowledged: int) -> int:
    steps: dict[str, Any] = snapshot["steps"]
    assert len(steps) >= acknowledged, (
        f"{acknowledged} steps were acknowledged, {len(steps)} are stored"
    )
    for n, (key, record) in enumerate(steps.items()):
        assert key == str(n)
        assert record == {"ok": True, "value": [n] * (n % 50)}
    return len(steps)


async def load_runs(directory: Path) -> list[Snapshot]:
    async with FileStore(directory) as store:
        snapshots = [await store.load(id) for id in RUNS]
    return [snapshot for snapshot in snapshots if snapshot is not None]


def main() -> None:
    directory, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    counts = {"acknowledged": 0, "stored": 0}
    for _ in range(count):
        acknowledged = kill_once(directory, rng)
        # Checked in another process: the one that forks must not have threads.
        checker = os.fork()
        if checker == 0:
            snapshots = asyncio.run(load_runs(directory))
            stored = [check(run, n) for run, n in zip(snapshots, acknowledged, strict=True)]
            (directory / "stored").write_text(str(sum(stored)))
            os._exit(0)
        assert os.waitpid(checker, 0)[1] == 0, "the check failed; its error is above"
        counts["acknowledged"] = sum(acknowledged) or counts["acknowledged"]
        counts["stored"] = int((directory / "stored").read_text())
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
