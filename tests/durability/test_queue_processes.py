"""Real workers on a queue, killed and stopped: no more steps at once than the limit."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.clock import SystemClock
from perdure.limits import queue_limits
from perdure.store import Store, require_queues
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.places import PLACES, Place, place_of
from tests.durability.queue_process import LEASE, QUEUE, job, work

KEYS = ("a", "b", "c")
RUNS, KILLS = 120, 6


class Workers:
    """Three worker processes. `gone` is when each that was killed or stopped last worked."""

    def __init__(self, place: Place) -> None:
        self._context = forked()
        self._place = place
        self.gone: dict[int, int] = {}
        self.alive = [self._start() for _ in range(3)]

    def _start(self) -> BaseProcess:
        process = self._context.Process(target=work, args=self._place)
        process.start()
        return process

    def replace(self, number: int) -> None:
        """Kill a worker, or stop it for longer than its leases last; another takes its place."""
        victim = self.alive.pop(random.randrange(len(self.alive)))
        assert victim.pid is not None
        if number % 3 == 1:
            os.kill(victim.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(LEASE * 1.5, victim.kill)
        else:
            victim.kill()
            victim.join()
        self.gone[victim.pid] = time.monotonic_ns()
        self.alive.append(self._start())

    def stop(self) -> None:
        for process in self.alive:
            process.terminate()
        for process in self.alive:
            process.join()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    store = open_store(place.url, **place.options)
    yield store
    await store.close()


def most_at_once(log: Path, gone: dict[int, int], key: str = "") -> int:
    """Return how many steps were under way at once at most, of all keys or of one.

    What a process that is gone has not ended, it ended when it was killed or stopped.
    """
    changes: list[tuple[int, int]] = []
    open_steps: dict[tuple[int, str], int] = {}
    for line in log.read_text().splitlines():
        at, pid, what, name, run_id = line.split(" ", 4)
        if key not in ("", name):
            continue
        if what == "begin":
            changes.append((int(at), 1))
            open_steps[int(pid), run_id] = int(at)
        elif open_steps.pop((int(pid), run_id), None) is not None:
            changes.append((min(int(at), gone.get(int(pid), int(at))), -1))
    changes += [(gone[pid], -1) for pid, _ in open_steps]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


async def permits_in_use(store: Store) -> int:
    queues = require_queues(store)
    limits = [limit for key in KEYS for limit in queue_limits(QUEUE, f"jobs/{key}")]
    names = {limit.queue: limit.n for limit in limits}
    free = await queues.due(SystemClock().now(), 100, queues=names)
    return sum(names.values()) - len(free)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_and_stopped_workers_do_not_break_the_limit(
    store: Store, place: Place, tmp_path: Path
) -> None:
    runtime, log = Runtime(store, workflows=[job]), tmp_path / "steps.log"
    payloads = [(str(log), KEYS[number % len(KEYS)]) for number in range(RUNS)]
    await runtime.trigger_many(job, payloads)
    workers = Workers(place)
    try:
        for number in range(KILLS):
            await asyncio.sleep(0.5)
            workers.replace(number)
        for run in await store.list(limit=RUNS):
            await runtime.result(run.id, timeout=60)
        await asyncio.sleep(LEASE + 1)
        assert await permits_in_use(store) == 0
    finally:
        workers.stop()
    assert 2 <= most_at_once(log, workers.gone) <= 3
    assert max(most_at_once(log, workers.gone, key) for key in KEYS) <= 2
