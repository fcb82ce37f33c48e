"""Real workers on real stores, killed and paused continuously: no run is lost or forked."""

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Runtime
from perdure.store import Delivery, Store
from perdure.stores import open_store
from tests.durability.chaos import LEASE, chaos, expected, work
from tests.durability.forked import forked
from tests.durability.places import Place, place_of
from tests.lengths import LONG

RUNS = 300 if LONG else 150
MORE_RUNS = 50
# Enough for two pauses, one of which begins and ends while there is work.
MIN_KILLS = 8
DEADLINE = 90.0


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

    def _pick(self) -> BaseProcess:
        """Return a worker that is not paused: a paused one must continue."""
        return random.choice([process for process in self.alive if process not in self._paused])

    def kill_one(self) -> None:
        victim = self._pick()
        self.alive.remove(victim)
        victim.kill()
        victim.join()
        self.alive.append(self._start())
        self.kills += 1

    async def pause_one(self) -> None:
        """Stop a worker for longer than its leases last, then let it continue."""
        victim = self._pick()
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
    return place_of(request)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    store = open_store(place.url, **place.options)
    yield store
    await store.close()


async def disturb(workers: Workers, done: asyncio.Event) -> None:
    """Kill a worker again and again, and pause another from time to time."""
    pauses: set[asyncio.Task[None]] = set()
    while not done.is_set():
        await asyncio.sleep(0.3)
        workers.kill_one()
        if workers.kills % 4 == 0:
            pauses.add(asyncio.ensure_future(workers.pause_one()))
    await asyncio.gather(*pauses)


async def trigger(runtime: Runtime, numbers: Iterable[int]) -> None:
    await asyncio.gather(
        *(runtime.trigger(chaos, n, run_id=f"run-{n}", wait=False) for n in numbers)
    )


async def send_events(runtime: Runtime, numbers: range) -> None:
    """Send each run its two events, in order, each of them twice."""
    for n in random.sample(numbers, len(numbers)):
        for payload in (n, n + 1000):
            first = await runtime.signal(
                f"run-{n}", "go", payload, dedup_id=f"{payload}", wait=False
            )
            again = await runtime.signal(
                f"run-{n}", "go", payload, dedup_id=f"{payload}", wait=False
            )
            # The second event completes the run, possibly before `signal` returns.
            assert first.delivery in (Delivery.DELIVERED, Delivery.OVER)
            assert again.delivery in (Delivery.DUPLICATE, Delivery.OVER)


async def work_until_killed(runtime: Runtime, workers: Workers) -> int:
    """Send the events of the triggered runs, then add runs until enough workers were killed.

    A fast machine completes the first runs before that. Until this returns, there are runs that
    wait for their events: every kill so far came while there was work. Return the number of runs.
    """
    done = asyncio.Event()
    disturbing = asyncio.ensure_future(disturb(workers, done))
    try:
        return await send_until_killed(runtime, workers)
    finally:
        done.set()
        await disturbing


async def send_until_killed(runtime: Runtime, workers: Workers) -> int:
    """Send the events of all runs, and return how many there are."""
    await send_events(runtime, range(RUNS))
    count = RUNS
    while workers.kills < MIN_KILLS:
        more = range(count, count + MORE_RUNS)
        await trigger(runtime, more)
        await send_events(runtime, more)
        count += MORE_RUNS
    return count


async def all_completed(store: Store, count: int) -> None:
    open_runs = {f"run-{n}" for n in range(count)}
    while open_runs:
        for id in sorted(open_runs):
            snapshot = await store.load(id)
            if snapshot is not None and snapshot["execution"]["status"] == "completed":
                open_runs.discard(id)
        await asyncio.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_runs_survive_killed_and_paused_workers(
    store: Store, place: Place, tmp_path: Path
) -> None:
    """All complete with the right results, each event counts once, and no epoch has two owners."""
    runtime = Runtime(store, workflows=[chaos])
    log = tmp_path / "writes.log"
    await trigger(runtime, range(RUNS))
    workers = Workers(place, log)
    try:
        count = await work_until_killed(runtime, workers)
        await asyncio.wait_for(all_completed(store, count), DEADLINE)
    finally:
        workers.stop()
    assert workers.kills >= MIN_KILLS
    assert workers.pauses > 0
    for n in range(count):
        run = await runtime.get_run(f"run-{n}")
        assert run is not None
        assert run.output == expected(n)
        assert len(run.history) == 9
    check_owners(log)


def check_owners(log: Path) -> None:
    """Assert that in each epoch of each run only one process had writes accepted."""
    owners: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in log.read_text().splitlines():
        id, epoch, _, pid = line.rsplit(" ", 3)
        owners[id, epoch].add(pid)
    assert owners
    assert {key: pids for key, pids in owners.items() if len(pids) > 1} == {}
