"""Real workers on real stores, killed and stopped: no child run is lost, started twice or reported
twice.

`PERDURE_TEST_FAMILIES=300` runs it with 300 parents of ten children each.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from perdure import Runtime
from perdure.store import Query, Store, require_search
from perdure.stores import open_store
from tests.durability.family_process import CHILDREN, LEASE, child, parent, work
from tests.durability.forked import forked
from tests.durability.places import PLACES, Place, place_of
from tests.durability.test_chaos import check_owners

FAMILIES = int(os.environ.get("PERDURE_TEST_FAMILIES", "10"))
MORE_FAMILIES = 2
MIN_KILLS = max(5, FAMILIES // 2)
DEADLINE = 30 + FAMILIES


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/families.db"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    store = open_store(place.url, **place.options)
    yield store
    await store.close()


class Workers:
    """Three worker processes; one that is killed is replaced, one that is stopped continues."""

    def __init__(self, place: Place, log: Path) -> None:
        self._arguments = (*place, str(log))
        self.kills = 0
        self.alive = [self._start() for _ in range(3)]

    def _start(self) -> BaseProcess:
        process = forked().Process(target=work, args=self._arguments)
        process.start()
        return process

    async def disturb(self) -> None:
        """Kill one worker after the other, and stop another for longer than its leases last."""
        while True:
            await asyncio.sleep(0.4)
            victim = self.alive.pop(random.randrange(len(self.alive)))
            victim.kill()
            victim.join()
            self.alive.append(self._start())
            self.kills += 1
            if self.kills % 4 == 0:
                await self._stop_one_for_a_while()

    async def _stop_one_for_a_while(self) -> None:
        pid = self.alive[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(LEASE * 1.5)
        os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        for process in self.alive:
            process.kill()
            process.join()


async def start(runtime: Runtime, numbers: range) -> None:
    await asyncio.gather(*(runtime.trigger(parent, run_id=f"p{n}", wait=False) for n in numbers))


async def start_families(runtime: Runtime, workers: Workers) -> int:
    """Start parents while workers are killed; return how many.

    The runs that are left complete undisturbed. On a slow store, workers would otherwise be killed
    almost as soon as they have started, for half a minute.
    """
    disturbing = asyncio.ensure_future(workers.disturb())
    try:
        return await start_until_killed(runtime, workers)
    finally:
        disturbing.cancel()


async def start_until_killed(runtime: Runtime, workers: Workers) -> int:
    """Start more parents until enough workers were killed, and return how many."""
    await start(runtime, range(FAMILIES))
    count = FAMILIES
    while workers.kills < MIN_KILLS:
        await asyncio.sleep(0.5)
        await start(runtime, range(count, count + MORE_FAMILIES))
        count += MORE_FAMILIES
    return count


async def all_over(store: Store) -> None:
    """Wait until no run is left that is not over."""
    query = Query(statuses=("queued", "running", "suspended", "waiting", "paused"))
    while (await require_search(store, "the test").search(query, 1)).runs:
        await asyncio.sleep(0.2)


async def stored_runs(store: Store) -> dict[str, Any]:
    """Return the snapshots of all runs by id."""
    ids: list[str] = []
    page = await require_search(store, "the test").search(Query(), 1000)
    while True:
        ids += (run.id for run in page.runs)
        if page.cursor is None:
            return {id: await store.load(id) for id in ids}
        page = await require_search(store, "the test").search(Query(), 1000, after=page.cursor)


def check_family(runs: dict[str, Any], parent_id: str) -> None:
    """Each child ran once, and the parent got what that child returned."""
    mine = [runs[id] for id in runs if id.startswith(f"{parent_id}/")]
    assert len(mine) == CHILDREN
    outputs = {run["metadata"]["input"]: run["execution"].get("output") for run in mine}
    output = runs[parent_id]["execution"]["output"]
    assert output == [outputs[n] for n in range(CHILDREN)]
    for run in mine:
        tokens = [run["steps"][key]["value"] for key in ("work", "work#2")]
        assert run["execution"]["output"] == f"{run['metadata']['input']} {' '.join(tokens)}"


@pytest.mark.slow
@pytest.mark.timeout(60 + DEADLINE)
async def test_child_runs_survive_killed_and_stopped_workers(
    store: Store, place: Place, tmp_path: Path
) -> None:
    runtime = Runtime(store, workflows=[parent, child])
    await runtime.trigger(parent, run_id="p0", wait=False)
    workers = Workers(place, log := tmp_path / "writes.log")
    try:
        count = await start_families(runtime, workers)
        await asyncio.wait_for(all_over(store), DEADLINE)
    finally:
        workers.stop()
    runs = await stored_runs(store)
    assert len(runs) == count * (1 + CHILDREN)
    for n in range(count):
        check_family(runs, f"p{n}")
    check_owners(log)
