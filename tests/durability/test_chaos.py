"""Real workers on real stores are killed and paused all the time: nothing is lost or forked."""

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from perdure import Runtime
from perdure.store import Delivery, Store
from perdure.stores import open_store
from tests.durability.chaos import LEASE, chaos, expected, work
from tests.durability.forked import forked

RUNS = 300
DEADLINE = 90.0


class Place(NamedTuple):
    """How to open a store."""

    url: str
    options: dict[str, str]


class Workers:
    """Three worker processes; one that is killed is replaced."""

    def __init__(self, place: Place, log: Path) -> None:
        self._processes = forked()
        self._arguments = (*place, str(log))
        self.kills = self.pauses = 0
        self.alive = [self._start() for _ in range(3)]
        self._paused: set[BaseProcess] = set()

    def _start(self) -> BaseProcess:
        process = self._processes.Process(target=work, args=self._arguments)
        process.start()
        return process

    def _one(self) -> BaseProcess:
        """Return a worker, and continue it if it was paused."""
        return random.choice([process for process in self.alive if process not in self._paused])

    def kill_one(self) -> None:
        victim = self._one()
        self.alive.remove(victim)
        victim.kill()
        victim.join()
        self.alive.append(self._start())
        self.kills += 1

    async def pause_one(self) -> None:
        """Stop a worker for longer than its lease, then continue it."""
        victim = self._one()
        pid = victim.pid
        assert pid is not None
        self._paused.add(victim)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(LEASE * 1.5)
        os.kill(pid, signal.SIGCONT)
        self._paused.remove(victim)
        self.pauses += 1

    def stop(self) -> None:
        for process in self.alive:
            process.kill()
            process.join()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/chaos.db"


@pytest.fixture(params=["sqlite", "postgres", "mysql", "mongo", "redis"])
def place(request: pytest.FixtureRequest) -> Place:
    url = str(request.getfixturevalue(f"{request.param}_url"))
    if request.param == "redis":
        return Place(url, {"namespace": str(request.getfixturevalue("redis_prefix"))})
    return Place(url, {})


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    store = open_store(place.url, **place.options)
    yield store
    await store.close()


async def trouble(workers: Workers, done: asyncio.Event) -> None:
    pauses: set[asyncio.Task[None]] = set()
    while not done.is_set():
        await asyncio.sleep(0.3)
        workers.kill_one()
        if workers.kills % 4 == 0:
            pauses.add(asyncio.ensure_future(workers.pause_one()))
    await asyncio.gather(*pauses)


async def send_events(runtime: Runtime) -> None:
    """Send each run its two events in order, each of them twice."""
    for n in random.sample(range(RUNS), RUNS):
        for payload in (n, n + 1000):
            first = await runtime.signal(
                f"run-{n}", "go", payload, dedup_id=f"{payload}", wait=False
            )
            again = await runtime.signal(
                f"run-{n}", "go", payload, dedup_id=f"{payload}", wait=False
            )
            # The last event ends the run, which may be over before the reply arrives.
            assert first.delivery in (Delivery.DELIVERED, Delivery.OVER)
            assert again.delivery in (Delivery.DUPLICATE, Delivery.OVER)


async def all_over(store: Store) -> None:
    left = {f"run-{n}" for n in range(RUNS)}
    while left:
        for id in sorted(left):
            snapshot = await store.load(id)
            if snapshot is not None and snapshot["execution"]["status"] == "completed":
                left.discard(id)
        await asyncio.sleep(0.2)


@pytest.mark.timeout(180)
async def test_runs_survive_killed_and_paused_workers(
    store: Store, place: Place, tmp_path: Path
) -> None:
    """All runs complete correctly, each event counts once, and no epoch has two owners."""
    runtime = Runtime(store, workflows=[chaos])
    log = tmp_path / "writes.log"
    await asyncio.gather(
        *(runtime.trigger(chaos, n, run_id=f"run-{n}", wait=False) for n in range(RUNS))
    )
    workers, done = Workers(place, log), asyncio.Event()
    troubling = asyncio.ensure_future(trouble(workers, done))
    try:
        await send_events(runtime)
        await asyncio.wait_for(all_over(store), DEADLINE)
    finally:
        done.set()
        await troubling
        workers.stop()
    assert workers.kills > 5
    assert workers.pauses > 0
    for n in range(RUNS):
        run = await runtime.get_run(f"run-{n}")
        assert run is not None
        assert run.output == expected(n)
        assert len(run.history) == 9
    check_owners(log)


def check_owners(log: Path) -> None:
    """Check that no two processes wrote in one epoch of a run, and no entry was accepted twice."""
    owners: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in log.read_text().splitlines():
        id, epoch, _, pid = line.rsplit(" ", 3)
        owners[id, epoch].add(pid)
    assert owners
    assert {key: pids for key, pids in owners.items() if len(pids) > 1} == {}
