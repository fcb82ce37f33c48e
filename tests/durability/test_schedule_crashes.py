"""Crashes before and after every store call of a schedule and the runs it starts."""

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from perdure import Cron, Runtime, Schedule, ScheduleInfo, Step, workflow
from perdure.errors import StoreError
from perdure.store import Store
from perdure.stores.memory import MemoryStore
from perdure.testing import CrashFound, FaultyStore, TestClock, explore_crashes
from perdure.testing.faults import How
from tests.lengths import LONG

LEASE = timedelta(seconds=30)


class Crash(StoreError):
    """The process crashes here."""


class Effects:
    """Counts how often the step of each run was executed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, run_id: str) -> None:
        self.counts[run_id] += 1


@workflow("tick")
async def tick(step: Step[Effects]) -> str:
    await step("count", step.deps.count, step.run_id)
    await step.sleep("nap", "10m")
    return str(step.scheduled_for)


@workflow("long")
async def long(step: Step[Effects]) -> str:
    """Takes longer than an hour, so that runs overlap."""
    await step.sleep("nap", "65m")
    return str(step.scheduled_for)


class World:
    """A schedule of every hour, and processes that create and drive it for some hours."""

    def __init__(self, definition: Any, overlap: Any, always_replay: bool) -> None:
        self.definition, self.overlap, self.always_replay = definition, overlap, always_replay
        self.clock = TestClock()
        self.end = self.clock.now() + timedelta(hours=3, minutes=30)
        self.store = MemoryStore(clock=self.clock)
        self.effects = Effects()

    def runtime(self, store: Store) -> Runtime:
        return Runtime(
            store,
            workflows=[self.definition],
            deps=self.effects,
            clock=self.clock,
            lease_ttl=LEASE,
            suspend_after=0,
            always_replay=self.always_replay,
        )

    async def live(self, store: FaultyStore) -> None:
        """Create the schedule and sweep every ten minutes, until the process crashes."""
        runtime = self.runtime(store)
        with suppress(Crash):
            hourly = Cron("0 * * * *")
            await runtime.schedule("s", self.definition, every=hourly, overlap=self.overlap)
            while self.clock.now() < self.end and not store.failed:
                while not store.failed and await runtime.sweep():
                    pass
                if not store.failed:
                    await self.clock.advance("10m")

    async def crash(self, number: int | None, how: How) -> FaultyStore:
        """Let one process crash, and another one continue when the leases have expired."""
        first = FaultyStore(self.store, fail_at=number, how=how, error=Crash, stays_down=True)
        await self.live(first)
        if first.failed:
            await self.clock.advance(LEASE * 2)
            await self.live(FaultyStore(self.store))
        return first

    async def info(self) -> ScheduleInfo:
        [info] = await self.runtime(self.store).schedules()
        return info

    async def outputs(self) -> dict[str, Any]:
        runtime = self.runtime(self.store)
        runs = [await runtime.get_run(run.id) for run in await runtime.list_runs()]
        return {run.id: run.output for run in runs if run is not None}


@workflow("slow")
async def slow(step: Step, minutes: int) -> str:
    await step.sleep("nap", timedelta(minutes=minutes))
    return await step("count", str, step.scheduled_for)


@pytest.mark.parametrize("overlap", ["skip", "buffer_one", "buffer_all", "allow"])
@pytest.mark.parametrize("every", ["1h", Cron("30 2 * * *", tz="Europe/Berlin")])
async def test_users_explore_the_crashes_of_a_schedule_and_its_runs(
    overlap: Any, every: Any
) -> None:
    schedule = Schedule(every=every, overlap=overlap, jitter="10m")
    report = await explore_crashes(slow, 65, schedule=schedule)
    assert report.crashes > 60
    assert set(report.doubled) == {"count"}


async def test_a_crash_that_changes_the_runs_of_a_schedule_is_found() -> None:
    """Here a time is missed if no process runs for a minute."""
    schedule = Schedule(every="10s", catch_up=0)
    with pytest.raises(CrashFound, match="there are the runs"):
        await explore_crashes(slow, 0, schedule=schedule)


@pytest.mark.long
@pytest.mark.parametrize(
    ("definition", "overlap"),
    [(tick, "skip"), (tick, "allow"), (long, "buffer_all"), (long, "cancel")],
    ids=lambda value: getattr(value, "name", value),
)
async def test_each_time_starts_one_run(definition: Any, overlap: Any, always_replay: bool) -> None:
    """And each of them ends as if nothing had happened."""
    clean = World(definition, overlap, always_replay)
    calls = (await clean.crash(None, "before")).calls
    expected = await clean.outputs()
    assert len(expected) >= 3
    hows: tuple[How, ...] = ("before", "after")
    # A replay after each step makes many more calls, most of them alike.
    stride = 4 if always_replay and not LONG else 1
    for number, how in product(range(1, len(calls) + 1, stride), hows):
        world = World(definition, overlap, always_replay)
        await world.crash(number, how)
        where = f"{how} call {number}, {calls[number - 1]}"
        assert await world.outputs() == expected, where
        info, undisturbed = await world.info(), await clean.info()
        assert info == undisturbed, where
        # A step is repeated only if the crash was between its work and its record.
        assert sum((world.effects.counts - clean.effects.counts).values()) <= 1, where
