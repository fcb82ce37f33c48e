"""Schedules with real workers that are killed and stopped: no time is missed or doubled."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perdure import Runtime, ScheduleInfo
from perdure.clock import parse_iso
from perdure.stores import open_store
from tests.durability.forked import forked
from tests.durability.scheduled import beat, work

SCHEDULES = 20
SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.slow


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def runtime(url: str) -> AsyncIterator[Runtime]:
    store = open_store(url)
    yield Runtime(store, workflows=[beat])
    await store.close()


class Workers:
    """Worker processes; one that is killed is replaced."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self.alive = [self._start() for _ in range(count)]

    def _start(self) -> BaseProcess:
        process = forked().Process(target=work, args=(self._url,))
        process.start()
        return process

    def kill_one(self) -> None:
        victim = self.alive.pop(random.randrange(len(self.alive)))
        victim.kill()
        victim.join()
        self.alive.append(self._start())

    def send(self, number: signal.Signals) -> None:
        for process in self.alive:
            os.kill(process.pid or 0, number)

    def stop(self) -> None:
        for process in self.alive:
            process.kill()
            process.join()


@pytest.fixture
def workers(url: str, runtime: Runtime) -> Iterator[Workers]:
    workers = Workers(url, 2)
    yield workers
    workers.stop()


async def info_of(runtime: Runtime, name: str) -> ScheduleInfo:
    info = await (await runtime.get_schedule(name)).get()
    assert info is not None
    return info


async def ids_of(runtime: Runtime, name: str) -> list[str]:
    runs = await runtime.list_runs(prefix=f"{name}@", limit=1000)
    return sorted(run.id for run in runs if run.status == "completed")


def times_in(ids: list[str]) -> list[datetime]:
    """Return the nominal times that the ids of runs contain."""
    return [parse_iso(id.rpartition("@")[2]) for id in ids]


async def test_each_second_starts_one_run_although_workers_are_killed(
    runtime: Runtime, workers: Workers, tmp_path: Path
) -> None:
    names = [f"beat-{n}" for n in range(SCHEDULES)]
    for name in names:
        await runtime.schedule(name, beat, str(tmp_path / name), every=SECOND, overlap="allow")
    for _ in range(16):
        await asyncio.sleep(0.5)
        workers.kill_one()
    await asyncio.sleep(4)
    for name in names:
        await (await runtime.get_schedule(name)).pause()
    await asyncio.sleep(2)
    for name in names:
        info, ids = await info_of(runtime, name), await ids_of(runtime, name)
        assert info.last_at is not None
        assert (info.missed, info.skipped) == (0, 0)
        # The ids are different, so each of these times has one run.
        assert len(ids) == info.started >= 8
        gaps = {later - time for time, later in pairwise(times_in(ids))}
        assert gaps == {SECOND}
        log = (tmp_path / name).read_text().splitlines()
        assert {line.split()[0] for line in log} == set(ids)


async def test_after_a_stop_of_ten_periods_one_run_starts(
    runtime: Runtime, workers: Workers, tmp_path: Path
) -> None:
    """Without `catch_up`, as a laptop that was closed should do it."""
    log = tmp_path / "log"
    await runtime.schedule("beat", beat, str(log), every=SECOND, overlap="allow", catch_up=0)
    await asyncio.sleep(2.5)
    workers.send(signal.SIGSTOP)
    before = await info_of(runtime, "beat")
    await asyncio.sleep(10)
    workers.send(signal.SIGCONT)
    await asyncio.sleep(0.9)
    after = await info_of(runtime, "beat")
    assert before.last_at is not None
    assert after.last_at is not None
    # One of the times of the stop, and perhaps the first one after it.
    assert after.started - before.started in (1, 2)
    assert after.missed - before.missed >= 8
    periods = (after.last_at - before.last_at) // SECOND
    assert after.started - before.started + after.missed - before.missed == periods
