"""What a worker promises: it claims what is due, keeps what it has, and lets go in time."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest

from perdure import Runtime, Step, Worker, workflow
from perdure.errors import InvalidArgument, MissingAbility, StoreError
from perdure.runtime.definition import Definition
from perdure.store import LeaseRequest, NewRun
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

T = TypeVar("T")
TTL = timedelta(seconds=30)


class Shaky(FaultyStore):
    """A store that is there or is not; it counts all the same."""

    away = False

    def _fault(self, verb: str) -> How | None:
        return "before" if self.away else super()._fault(verb)

    def count(self, verb: str) -> int:
        return sum(call.verb == verb for call in self.calls)


@pytest.fixture
def shaky(store: MemoryStore) -> Shaky:
    return Shaky(store)


@pytest.fixture
def make(shaky: Shaky, clock: TestClock) -> Callable[..., Runtime]:
    """Make a runtime on the shaky store, with a random of its own."""

    def make(*workflows: Definition[Any, Any], **options: Any) -> Runtime:
        defaults: dict[str, Any] = {"clock": clock, "random": Random(7), "lease_ttl": TTL}
        on = options.pop("on", shaky)
        return Runtime(on, workflows=workflows, **{**defaults, **options})

    return make


Make = Callable[..., Runtime]


@asynccontextmanager
async def working(runtime: Runtime, **options: Any) -> AsyncIterator[Worker]:
    """A worker that has looked for work once."""
    async with Worker(runtime, **options) as worker:
        await runtime.clock.advance(0)  # type: ignore[attr-defined]
        yield worker


class Gate:
    """A step that stays until it is let go; knows how many are inside."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self._open.wait()
        self.inside -= 1

    def open(self) -> None:
        self._open.set()

    def workflow(self) -> Definition[Any, Any]:
        @workflow("gated")
        async def gated(step: Step) -> str:
            await step("gate", self.pass_through)
            return "through"

        return gated


@dataclass
class Point:
    x: int


@workflow("quick")
async def quick(step: Step) -> str:
    return await step("one", lambda: "done")


async def trigger_many(runtime: Runtime, definition: Definition[Any, Any], count: int) -> list[str]:
    ids = [f"{definition.name}-{n}" for n in range(count)]
    for id in ids:
        await runtime.trigger(definition, run_id=id, wait=False)
    return ids


async def statuses(runtime: Runtime, ids: list[str]) -> set[str]:
    runs = [await runtime.get_run(id) for id in ids]
    return {"missing" if run is None else run.status for run in runs}


async def test_runs_are_claimed_in_batches(make: Make, shaky: Shaky) -> None:
    """Fifty runs that are due cost one claim, not fifty."""
    runtime = make(quick)
    ids = await trigger_many(runtime, quick, 50)
    async with working(runtime) as worker:
        pass
    assert await statuses(runtime, ids) == {"completed"}
    assert shaky.count("claim") <= 2
    assert (worker.counters.claimed, worker.counters.finished) == (50, 50)


async def test_never_more_than_concurrency_at_once(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """What does not fit stays unclaimed, for this worker later or for another now."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    ids = await trigger_many(runtime, gated, 10)
    async with working(runtime, concurrency=4) as worker:
        await clock.advance(5)
        assert (gate.inside, worker.running) == (4, 4)
        assert len(await shaky.due(clock.now(), 100)) == 6
        gate.open()
        await clock.advance(5)
    assert gate.most == 4
    assert await statuses(runtime, ids) == {"completed"}


async def test_a_full_worker_does_not_ask_for_more(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """Without room there is nothing to claim; the next claim comes when runs end."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    await trigger_many(runtime, gated, 5)
    async with working(runtime, concurrency=4):
        claims = shaky.count("claim")
        await clock.advance(60)
        assert shaky.count("claim") == claims == 1
        gate.open()
        await clock.advance(0)
        assert shaky.count("claim") > claims


async def test_all_leases_are_renewed_in_one_statement(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """A hundred runs, one renewal every third of the lease, for as long as it takes."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    ids = await trigger_many(runtime, gated, 100)
    async with working(runtime, concurrency=100) as worker:
        for _ in range(10):
            await clock.advance(TTL)
        renewals = [call.ids for call in shaky.calls if call.verb == "renew"]
        assert len(renewals) == 30
        assert all(set(renewed) == set(ids) for renewed in renewals)
        gate.open()
        await clock.advance(0)
    assert worker.counters.finished == 100


async def test_a_hint_wakes_the_worker(make: Make, clock: TestClock) -> None:
    """Where the store tells, nobody waits for the poll."""
    runtime = make(quick)
    async with working(runtime, poll="1h"):
        ids = await trigger_many(runtime, quick, 3)
        await clock.advance(0)
        assert await statuses(runtime, ids) == {"completed"}


async def test_without_hints_it_polls_with_jitter(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """A little more or less than `poll`, and never in step with another worker."""
    shaky.capabilities = msgspec.structs.replace(shaky.capabilities, notify=False)
    times: list[float] = []
    runtime = make(quick)
    async with working(runtime, poll=10):
        while len(times) < 20:
            before = shaky.count("claim")
            await clock.advance(0.25)
            if shaky.count("claim") > before:
                times.append(clock.monotonic())
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert all(7 <= pause <= 13 for pause in pauses)
    assert len(set(pauses)) > 5


async def test_polling_alone_finds_what_is_due(make: Make, clock: TestClock, shaky: Shaky) -> None:
    """Hints may be lost: a run that nobody told of is driven by the next poll."""
    shaky.capabilities = msgspec.structs.replace(shaky.capabilities, notify=False)
    runtime = make(quick)
    async with working(runtime, poll=10):
        ids = await trigger_many(runtime, quick, 1)
        await clock.advance(13)
        assert await statuses(runtime, ids) == {"completed"}


async def test_it_keeps_to_the_workflows_it_knows(make: Make, clock: TestClock) -> None:
    """Runs of other workflows are left for workers that know them."""
    gate = Gate()
    everything = make(quick, gated := gate.workflow())
    (foreign,) = await trigger_many(everything, gated, 1)
    (own,) = await trigger_many(everything, quick, 1)
    async with working(make(quick)) as worker:
        await clock.advance(10)
    assert worker.counters.claimed == 1
    assert await statuses(everything, [own]) == {"completed"}
    assert await statuses(everything, [foreign]) == {"running"}


async def test_the_run_of_a_dead_worker_is_taken_over_when_its_lease_ends(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """Not before, and then by the next poll."""
    runtime = make(quick)
    (id,) = await trigger_many(runtime, quick, 1)
    await store.claim("dead worker", TTL, 1)
    async with working(runtime, poll=1) as worker:
        await clock.advance(TTL - timedelta(seconds=1))
        assert await statuses(runtime, [id]) == {"running"}
        await clock.advance(3)
        assert await statuses(runtime, [id]) == {"completed"}
    assert worker.counters.taken_over == 1


async def die_with(store: MemoryStore, clock: TestClock, times: int) -> None:
    """Be so many workers that claim what is due and are never heard of again."""
    for n in range(times):
        assert len(await store.claim(f"dead {n}", TTL, 1)) == 1
        await clock.advance(TTL)


async def test_suspects_are_driven_one_at_a_time(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """A second one waits until the first has progressed; other runs do not wait for them."""
    gate = Gate()

    @workflow("gated")
    async def gated(step: Step) -> None:
        await step("gate", gate.pass_through)

    runtime = make(gated, quick)
    suspects = await trigger_many(runtime, gated, 2)
    for _ in range(3):
        assert len(await store.claim("dead", TTL, 2)) == 2
        await clock.advance(TTL)
    await runtime.trigger(quick, run_id="good", wait=False)
    async with working(runtime) as worker:
        await clock.advance(TTL)
        assert await statuses(runtime, ["good"]) == {"completed"}
        assert (gate.inside, gate.most) == (1, 1)
        gate.open()
        await clock.advance(TTL)
        assert await statuses(runtime, suspects) == {"completed"}
    assert worker.counters.delayed >= 1


async def test_a_run_that_keeps_killing_workers_is_paused(
    make: Make, clock: TestClock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """After the limit it is left alone and says why; a signal does not wake it, `resume` does."""
    runtime = make(quick)
    (bad,) = await trigger_many(runtime, quick, 1)
    await die_with(store, clock, 4)
    async with working(runtime, max_crashes=3) as worker:
        await clock.advance(TTL)
    run = await runtime.get_run(bad)
    assert run is not None
    assert run.status == "paused"
    assert "crashes without progress" in run.reason
    assert (worker.counters.paused, worker.counters.finished) == (1, 0)
    assert "run 'quick-0' is paused" in caplog.text
    signalled = await runtime.signal(bad, "wake up")
    assert signalled.run is not None
    assert signalled.run.status == "paused"
    assert (await runtime.resume(bad)).output == "done"


async def test_a_paused_run_keeps_what_it_had_done(
    make: Make, clock: TestClock, store: MemoryStore, shaky: Shaky
) -> None:
    """Resumed, it runs neither finished steps again, nor failures that the function handled."""
    ran: list[str] = []
    gate = Gate()

    async def refuse() -> None:
        ran.append("refuse")
        raise ValueError("no")

    @workflow("deadly")
    async def deadly(step: Step) -> str:
        try:
            await step("refused", refuse)
        except ValueError:
            await step("instead", lambda: ran.append("instead"))
        await step("gate", gate.pass_through)
        return "done"

    runtime = make(deadly)
    await runtime.trigger(deadly, run_id="deadly", wait=False)
    async with working(runtime, grace=0):
        shaky.away = True
    await clock.advance(TTL)
    await die_with(store, clock, 2)
    shaky.away = False
    async with working(runtime, max_crashes=2):
        pass
    assert await statuses(runtime, ["deadly"]) == {"paused"}
    gate.open()
    assert (await runtime.resume("deadly")).output == "done"
    assert ran == ["refuse", "instead"]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Give what a coroutine returns that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


async def test_a_run_that_cannot_be_driven_harms_no_other(
    make: Make, clock: TestClock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A payload that does not fit, a version that is gone, a migration that raises: each is put
    off, and the rest goes on."""

    @workflow("typed")
    async def typed(step: Step, payload: Point) -> int:
        return payload.x

    @workflow("gone", version=2)
    async def delete(step: Step) -> None: ...

    def migrate(snapshot: Any, version: int) -> Any:
        raise KeyError("no such step")

    @workflow("migrated", version=2, migrate=migrate)
    async def migrated(step: Step) -> None: ...

    runtime = make(typed, delete, migrated, quick)
    snapshot = (b'{"formatVersion":1,"steps":{},"metadata":{"version":1,"input":{"y":1}},'
                b'"workflowName":"%b","execution":{"status":"running",'
                b'"lastUpdated":"2030-01-01T00:00:00.000Z"}}')  # fmt: skip
    bad = ["typed", "gone", "migrated"]
    await store.enqueue([NewRun(name, name, snapshot % name.encode()) for name in bad])
    good = await trigger_many(runtime, quick, 20)
    async with working(runtime, poll=1) as worker:
        assert await statuses(runtime, good) == {"completed"}
        await clock.advance(TTL * 4)
    assert await statuses(runtime, bad) == {"running"}
    assert worker.counters.failed_to_drive <= 3 * 5
    for name in bad:
        assert f"run '{name}' could not be driven" in caplog.text


async def test_a_sweep_survives_a_migration_that_raises(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """The same for those who sweep."""

    def migrate(snapshot: Any, version: int) -> Any:
        raise KeyError("no such step")

    @workflow("migrated", version=2, migrate=migrate)
    async def migrated(step: Step) -> None: ...

    @workflow("migrated", version=1)
    async def old(step: Step) -> None: ...

    await make(old).trigger(old, run_id="bad", wait=False)
    runtime = make(migrated, quick)
    await trigger_many(runtime, quick, 1)
    assert [run.status for run in await runtime.sweep()] == ["completed"]


async def test_a_value_that_no_store_takes_fails_its_run(make: Make, clock: TestClock) -> None:
    """It would never be recorded: the run is not tried again and again, it is failed."""
    small = MemoryStore(clock=clock, max_value_size=10_000)
    ran: list[str] = []

    @workflow("large")
    async def large(step: Step) -> str:
        return await step("large", lambda: ran.append("x") or "x" * 20_000)

    runtime = make(large, on=small)
    async with working(runtime, poll=1):
        await runtime.trigger(large, run_id="large", wait=False)
        await clock.advance(TTL * 4)
    run = await runtime.get_run("large")
    assert run is not None
    assert run.status == "failed"
    assert "more than the 10,000 the store accepts" in str(run.error)
    assert ran == ["x"]


async def test_a_run_whose_writes_always_fail_is_put_off(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """A store that refuses one run's records is not asked for it all day long."""
    ran: list[str] = []

    class Picky(Shaky):
        async def append(self, entries: Any, /) -> Any:
            if any(entry.id == "unlucky" for entry in entries):
                raise StoreError("the row is locked for ever")
            return await self._pass("append", entries)

    @workflow("noted")
    async def noted(step: Step) -> None:
        await step("one", lambda: ran.append(step.run_id))

    runtime = make(noted, on=Picky(store))
    async with working(runtime, poll=1) as worker:
        await runtime.trigger(noted, run_id="unlucky", wait=False)
        await runtime.trigger(noted, run_id="lucky", wait=False)
        await clock.advance(TTL * 4)
    assert ran.count("lucky") == 1
    assert 1 <= ran.count("unlucky") <= 6
    assert worker.counters.finished == 1


async def test_a_short_outage_is_waited_out(make: Make, clock: TestClock, shaky: Shaky) -> None:
    """What ended while the store was away is recorded when it is back, and runs but once."""
    ran: list[str] = []

    async def work() -> None:
        await clock.sleep(5)
        ran.append("work")

    @workflow("busy")
    async def busy(step: Step) -> str:
        await step("work", work)
        return "done"

    runtime = make(busy)
    await runtime.trigger(busy, run_id="busy", wait=False)
    async with working(runtime, poll=1) as worker:
        shaky.away = True
        await clock.advance(8)
        shaky.away = False
        await clock.advance(5)
    assert await statuses(runtime, ["busy"]) == {"completed"}
    assert (ran, worker.counters.finished) == (["work"], 1)


async def test_it_works_on_after_a_long_outage(
    make: Make, clock: TestClock, shaky: Shaky, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs that could not be recorded go on when the store is back, and new ones are found."""

    @workflow("busy")
    async def busy(step: Step) -> str:
        await step("work", lambda: clock.sleep(5))
        return "done"

    runtime = make(busy, quick)
    await runtime.trigger(busy, run_id="busy", wait=False)
    async with working(runtime, poll=1):
        shaky.away = True
        await clock.advance(300)
        shaky.away = False
        ids = await trigger_many(runtime, quick, 3)
        async with asyncio.timeout(20):
            while await statuses(runtime, [*ids, "busy"]) != {"completed"}:
                await clock.advance(1)
                await asyncio.sleep(0.01)
    assert "the store cannot be asked for work" in caplog.text


async def test_a_lease_that_ended_during_an_outage_is_kept_when_nobody_took_it(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """A long step outlives a store that is away for longer than the lease."""
    ran: list[str] = []

    async def long() -> None:
        ran.append("long")
        await clock.sleep(300)

    @workflow("long")
    async def long_one(step: Step) -> str:
        await step("long", long)
        return "done"

    runtime = make(long_one)
    await runtime.trigger(long_one, run_id="long", wait=False)
    async with working(runtime, poll=1) as worker:
        await clock.advance(1)
        shaky.away = True
        await clock.advance(TTL * 3)
        shaky.away = False
        await clock.advance(300)
    assert await statuses(runtime, ["long"]) == {"completed"}
    assert (ran, worker.counters.taken_over) == (["long"], 0)


async def test_a_blocked_event_loop_does_not_fork_its_own_run() -> None:
    """A worker that slept through its leases renews them before it looks for orphans: it does
    not take its own run from itself."""
    ran: list[str] = []

    async def block() -> None:
        ran.append("block")
        time.sleep(0.8)
        await asyncio.sleep(0.1)

    class SlowToRenew(MemoryStore):
        async def renew(self, *arguments: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().renew(*arguments)

    @workflow("blocking")
    async def blocking(step: Step) -> str:
        await step("block", block)
        return "done"

    live = Runtime(SlowToRenew(), workflows=[blocking], lease_ttl=0.3)
    async with Worker(live, poll=0.05) as worker:
        await live.trigger(blocking, run_id="blocking", wait=False)
        await ended(live, "blocking")
    assert ran == ["block"]
    assert worker.counters.taken_over == 0


async def ended(runtime: Runtime, id: str) -> None:
    async with asyncio.timeout(10):
        while (run := await runtime.get_run(id)) is None or not run.over:
            await asyncio.sleep(0.01)


async def test_a_run_taken_from_a_blocked_worker_is_fenced() -> None:
    """What the blocked worker does afterwards is refused: the new owner's word counts."""
    store = MemoryStore()
    after: list[str] = []

    async def block() -> str:
        time.sleep(0.5)
        (grant,) = at_once(store.acquire([LeaseRequest("blocking", "thief", TTL)]))
        assert grant is not None
        return "late"

    @workflow("blocking")
    async def blocking(step: Step) -> None:
        await step("block", block)
        after.append("went on")

    live = Runtime(store, workflows=[blocking], lease_ttl=0.3)
    async with Worker(live, poll=0.05):
        await live.trigger(blocking, run_id="blocking", wait=False)
        await asyncio.sleep(1)
    run = await live.get_run("blocking")
    assert run is not None
    assert (after, run.status, run.history) == ([], "running", ())


async def test_cancel_reaches_a_run_in_another_process(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """With the next renewal, in the middle of a step."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    elsewhere = make(gated, on=MemoryStore(clock=clock, shares=store))
    (id,) = await trigger_many(runtime, gated, 1)
    async with working(runtime) as worker:
        assert (await elsewhere.cancel(id, reason="enough")).status == "running"
        await clock.advance(TTL / 3)
        assert await statuses(runtime, [id]) == {"cancelled"}
        assert worker.running == 0


async def test_cancel_reaches_a_run_of_this_process_at_once(make: Make, clock: TestClock) -> None:
    """Nobody waits for the renewal."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    (id,) = await trigger_many(runtime, gated, 1)
    async with working(runtime):
        await runtime.cancel(id, reason="enough")
        await clock.advance(0)
        assert await statuses(runtime, [id]) == {"cancelled"}


async def test_a_drain_lets_runs_finish(make: Make, clock: TestClock) -> None:
    """Leaving the block waits for what runs, and claims nothing new."""
    gate = Gate()
    runtime = make(gated := gate.workflow(), quick)
    (id,) = await trigger_many(runtime, gated, 1)
    worker = Worker(runtime, grace=60)
    async with worker:
        await clock.advance(0)
        draining = asyncio.ensure_future(worker.drain())
        await clock.advance(1)
        await runtime.trigger(quick, run_id="late", wait=False)
        gate.open()
        await draining
    assert await statuses(runtime, [id]) == {"completed"}
    assert await statuses(runtime, ["late"]) == {"running"}
    assert worker.counters.released == 0


async def test_what_does_not_finish_in_time_is_handed_back(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """Its lease is released: the next worker goes on at once, where the record ends."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    (id,) = await trigger_many(runtime, gated, 1)
    worker = Worker(runtime, grace=10)
    async with worker:
        await clock.advance(0)
        draining = asyncio.ensure_future(worker.drain())
        await clock.advance(10)
        await draining
    assert worker.counters.released == 1
    assert [due.id for due in await store.due(clock.now(), 10)] == [id]
    gate.open()
    async with working(runtime) as second:
        assert await statuses(runtime, [id]) == {"completed"}
    assert second.counters.taken_over == 0


async def test_a_worker_can_be_started_again(make: Make, clock: TestClock) -> None:
    """The same object, after a drain."""
    runtime = make(quick)
    worker = Worker(runtime)
    for n in range(2):
        async with worker:
            await runtime.trigger(quick, run_id=f"run-{n}", wait=False)
            await clock.advance(1)
    assert worker.counters.finished == 2


async def test_a_worker_that_cannot_go_on_says_so(make: Make, shaky: Shaky) -> None:
    """What is no trouble of the store ends it, and is told where the worker is awaited."""

    async def claim(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    shaky.claim = claim
    with pytest.raises(ZeroDivisionError):
        async with Worker(make(quick)) as worker:
            await worker.serve()


async def test_logs_tell_what_happens(
    make: Make, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Beginning, draining and the end, with what was done."""
    caplog.set_level(logging.INFO, logger="perdure.worker")
    runtime = make(quick)
    await trigger_many(runtime, quick, 2)
    async with working(runtime):
        pass
    assert "worker-" in caplog.text
    assert "claimed=2" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"concurrency": True}, {"max_crashes": 0}, {"poll": -1}, {"poll": 0},
     {"grace": "x"}],
    ids=str,
)  # fmt: skip
async def test_a_wrong_option_is_refused(make: Make, options: Any) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Worker(make(quick), **options)


async def test_a_store_without_a_schedule_is_refused(clock: TestClock) -> None:
    """At once, and not when the first run is due."""
    store = MemoryStore(clock=clock)
    store.capabilities = msgspec.structs.replace(store.capabilities, schedule=False)
    with pytest.raises(MissingAbility, match="schedule"):
        Worker(Runtime(store))
