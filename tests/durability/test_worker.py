"""A worker claims what is due, renews its leases, and releases its runs in time."""

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

from perdure import Runtime, Step, Worker, codec, workflow
from perdure.errors import InvalidArgument, MissingAbility, StoreError
from perdure.runtime.definition import Definition
from perdure.snapshot import new_snapshot
from perdure.store import INBOX_PAGE, Grant, LeaseRequest, NewMessage, NewRun
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

T = TypeVar("T")
TTL = timedelta(seconds=30)


class Shaky(FaultyStore):
    """A store that can be made unavailable, and counts calls in any case."""

    unavailable = False

    def _fault(self, verb: str) -> How | None:
        return "before" if self.unavailable else super()._fault(verb)

    def count(self, verb: str) -> int:
        return sum(call.verb == verb for call in self.calls)


@pytest.fixture
def shaky(store: MemoryStore) -> Shaky:
    return Shaky(store)


@pytest.fixture
def make(shaky: Shaky, clock: TestClock) -> Callable[..., Runtime]:
    """Return a function that creates a runtime on the shaky store, with its own `Random`."""

    def make(*workflows: Definition[Any, Any], **options: Any) -> Runtime:
        defaults: dict[str, Any] = {"clock": clock, "random": Random(7), "lease_ttl": TTL}
        on = options.pop("on", shaky)
        return Runtime(on, workflows=workflows, **{**defaults, **options})

    return make


Make = Callable[..., Runtime]


@asynccontextmanager
async def working(runtime: Runtime, **options: Any) -> AsyncIterator[Worker]:
    """Start a worker, and wait until it has polled once."""
    async with Worker(runtime, **options) as worker:
        await runtime.clock.advance(0)  # type: ignore[attr-defined]
        yield worker


class Gate:
    """A step that blocks until the gate is opened, and knows how many calls are inside."""

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
    """Fifty due runs cost one claim, not fifty."""
    runtime = make(quick)
    ids = await trigger_many(runtime, quick, 50)
    async with working(runtime) as worker:
        pass
    assert await statuses(runtime, ids) == {"completed"}
    assert shaky.count("claim") <= 2
    assert (worker.counters.claimed, worker.counters.finished) == (50, 50)


async def test_no_more_runs_than_concurrency_at_once(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """Other runs stay unclaimed, for this worker later or for another one now."""
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


async def test_a_full_worker_does_not_claim(make: Make, clock: TestClock, shaky: Shaky) -> None:
    """The next claim is made when runs end."""
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


async def test_all_leases_are_renewed_in_one_call(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """A hundred runs cost one renewal every third of the lease."""
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


async def test_a_notification_wakes_the_worker(make: Make, clock: TestClock) -> None:
    """The run is executed before the next poll."""
    runtime = make(quick)
    async with working(runtime, poll="1h"):
        ids = await trigger_many(runtime, quick, 3)
        await clock.advance(0)
        assert await statuses(runtime, ids) == {"completed"}


async def test_a_worker_polls_with_jitter(make: Make, clock: TestClock, shaky: Shaky) -> None:
    """Workers do not poll in lockstep."""
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


async def test_polling_finds_due_runs_without_notifications(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """Notifications may be lost."""
    shaky.capabilities = msgspec.structs.replace(shaky.capabilities, notify=False)
    runtime = make(quick)
    async with working(runtime, poll=10):
        ids = await trigger_many(runtime, quick, 1)
        await clock.advance(13)
        assert await statuses(runtime, ids) == {"completed"}


async def test_a_worker_claims_only_runs_of_its_own_workflows(make: Make, clock: TestClock) -> None:
    gate = Gate()
    everything = make(quick, gated := gate.workflow())
    (foreign,) = await trigger_many(everything, gated, 1)
    (own,) = await trigger_many(everything, quick, 1)
    async with working(make(quick)) as worker:
        await clock.advance(10)
    assert worker.counters.claimed == 1
    assert await statuses(everything, [own]) == {"completed"}
    assert await statuses(everything, [foreign]) == {"queued"}


async def test_a_lease_is_released_if_the_rest_of_a_long_inbox_cannot_be_read(
    make: Make, clock: TestClock, store: MemoryStore, shaky: Shaky
) -> None:
    """A grant has the first page of messages; if the next one fails, the run is free again."""
    runtime = make(quick)
    (id,) = await trigger_many(runtime, quick, 1)
    await store.send([NewMessage(id, "note", b"1") for _ in range(INBOX_PAGE + 1)])
    shaky.fail_at, shaky._verbs, shaky._count = 1, {"inbox"}, 0
    async with runtime.session() as session:
        with pytest.raises(StoreError, match="planned failure"):
            await session.acquire(runtime.driver.request(id))
        (run,) = await store.summaries([id])
        assert run is not None
        assert run.owner is None
        grant = await session.acquire(runtime.driver.request(id))
    assert isinstance(grant, Grant)
    assert len(grant.inbox) == INBOX_PAGE + 1


async def test_a_run_of_a_newer_version_waits_for_a_worker_that_knows_it(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """No old worker holds up a rolling deployment: the first new worker executes it at once."""

    @workflow("deployed", version=1)
    async def old(step: Step) -> str:
        return "old"

    @workflow("deployed", version=2)
    async def new(step: Step) -> str:
        return "new"

    async with working(make(old)) as old_worker:
        deployed = make(new)
        run = await deployed.trigger(new, run_id="run", wait=False)
        await clock.advance(10)
        assert (old_worker.counters.claimed, run.status) == (0, "queued")
        async with working(deployed):
            await clock.advance(1)
            assert (await deployed._require("run")).output == "new"


async def test_a_run_that_is_bound_to_no_version_is_driven_by_the_first_worker(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """Its next rest stores the version that drove it."""

    @workflow("unbound", version=3)
    async def unbound(step: Step) -> str:
        await step.sleep("long", "1h")
        return "done"

    runtime = make(unbound)
    first = codec.dumps(new_snapshot("unbound", now=clock.now(), metadata={}))
    await store.enqueue([NewRun("run", "unbound", first)])
    async with working(runtime):
        await clock.advance(1)
        (run,) = await store.summaries(["run"])
        assert run is not None
        assert (run.version, run.status) == (3, "suspended")


async def test_the_run_of_a_dead_worker_is_taken_over_when_its_lease_expires(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """It is claimed by the next poll, and not before."""
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
    """Let several workers claim a run and die without writing anything."""
    for n in range(times):
        assert len(await store.claim(f"dead {n}", TTL, 1)) == 1
        await clock.advance(TTL)


async def test_suspects_are_executed_one_at_a_time(
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
    """It is paused with the reason; a signal does not continue it, `resume` does."""
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


async def test_a_paused_run_keeps_its_records(
    make: Make, clock: TestClock, store: MemoryStore, shaky: Shaky
) -> None:
    """When it is resumed, neither finished steps nor handled failures run again."""
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
        shaky.unavailable = True
    await clock.advance(TTL)
    await die_with(store, clock, 2)
    shaky.unavailable = False
    async with working(runtime, max_crashes=2):
        pass
    assert await statuses(runtime, ["deadly"]) == {"paused"}
    gate.open()
    assert (await runtime.resume("deadly")).output == "done"
    assert ran == ["refuse", "instead"]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


async def test_a_run_that_cannot_be_continued_harms_no_other(
    make: Make, clock: TestClock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid payload, a missing version or a failing migration delays the run; the others
    continue.
    """

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
    assert worker.counters.failed_to_continue <= 3 * 5
    for name in bad:
        assert f"run '{name}' could not be continued" in caplog.text


async def test_a_sweep_survives_a_migration_that_raises(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
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


async def test_a_value_that_the_store_never_accepts_fails_its_run(
    make: Make, clock: TestClock
) -> None:
    """The run fails, and is not retried endlessly."""
    small = MemoryStore(clock=clock, max_value_size=10_000)
    ran: list[str] = []

    async def produce() -> str:
        ran.append("x")
        return "x" * 20_000

    @workflow("large")
    async def large(step: Step) -> str:
        return await step("large", produce)

    runtime = make(large, on=small)
    async with working(runtime, poll=1):
        await runtime.trigger(large, run_id="large", wait=False)
        await clock.advance(TTL * 4)
    run = await runtime.get_run("large")
    assert run is not None
    assert run.status == "failed"
    assert "more than the 10,000 the store accepts" in str(run.error)
    assert ran == ["x"]


async def test_a_run_whose_writes_always_fail_is_delayed(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """The worker does not claim it again and again."""
    ran: list[str] = []

    class Picky(Shaky):
        async def append(self, entries: Any, /) -> Any:
            if any(entry.id == "unlucky" for entry in entries):
                raise StoreError("the row is locked")
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
    """Steps that end while the store is unavailable are recorded when it is back, and run once."""
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
        shaky.unavailable = True
        await clock.advance(8)
        shaky.unavailable = False
        await clock.advance(5)
    assert await statuses(runtime, ["busy"]) == {"completed"}
    assert (ran, worker.counters.finished) == (["work"], 1)


async def test_a_worker_continues_after_a_long_outage(
    make: Make, clock: TestClock, shaky: Shaky, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs that could not be recorded continue when the store is back, and new ones are found."""

    @workflow("busy")
    async def busy(step: Step) -> str:
        await step("work", lambda: clock.sleep(5))
        return "done"

    runtime = make(busy, quick)
    await runtime.trigger(busy, run_id="busy", wait=False)
    async with working(runtime, poll=1):
        shaky.unavailable = True
        await clock.advance(300)
        shaky.unavailable = False
        ids = await trigger_many(runtime, quick, 3)
        async with asyncio.timeout(20):
            while await statuses(runtime, [*ids, "busy"]) != {"completed"}:
                await clock.advance(1)
                await asyncio.sleep(0.01)
    assert "claiming failed" in caplog.text


async def test_a_lease_that_expired_during_an_outage_is_kept_if_it_was_not_taken_over(
    make: Make, clock: TestClock, shaky: Shaky
) -> None:
    """A long step outlives a store that is unavailable for longer than the lease."""
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
        shaky.unavailable = True
        await clock.advance(TTL * 3)
        shaky.unavailable = False
        await clock.advance(300)
    assert await statuses(runtime, ["long"]) == {"completed"}
    assert (ran, worker.counters.taken_over) == (["long"], 0)


async def test_a_blocked_worker_does_not_take_over_its_own_run() -> None:
    """A worker whose leases expired while it was blocked renews them before it claims."""
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
    """Later writes of the blocked worker are refused."""
    store = MemoryStore()
    after: list[str] = []

    async def block() -> str:
        time.sleep(0.5)
        (grant,) = at_once(store.acquire([LeaseRequest("blocking", "thief", TTL)]))
        assert isinstance(grant, Grant)
        return "late"

    @workflow("blocking")
    async def blocking(step: Step) -> None:
        await step("block", block)
        after.append("continued")

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
    """The request arrives with the next renewal, during a step."""
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
    """It does not wait for the renewal."""
    gate = Gate()
    runtime = make(gated := gate.workflow())
    (id,) = await trigger_many(runtime, gated, 1)
    async with working(runtime):
        await runtime.cancel(id, reason="enough")
        await clock.advance(0)
        assert await statuses(runtime, [id]) == {"cancelled"}


async def test_a_drain_lets_runs_finish(make: Make, clock: TestClock) -> None:
    """Leaving the block waits for running runs, and claims nothing new."""
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
    assert await statuses(runtime, ["late"]) == {"queued"}
    assert worker.counters.released == 0


async def test_runs_that_do_not_finish_in_time_are_released(
    make: Make, clock: TestClock, store: MemoryStore
) -> None:
    """The next worker continues them at once, after their last record."""
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
    """The same object can be used after a drain."""
    runtime = make(quick)
    worker = Worker(runtime)
    for n in range(2):
        async with worker:
            await runtime.trigger(quick, run_id=f"run-{n}", wait=False)
            await clock.advance(1)
    assert worker.counters.finished == 2


async def test_an_unexpected_error_ends_the_worker_and_is_raised(
    make: Make, shaky: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the worker is awaited, unless it is an error of the store."""

    async def claim(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(shaky, "claim", claim, raising=False)
    with pytest.raises(ZeroDivisionError):
        async with Worker(make(quick)) as worker:
            await worker.serve()


async def test_the_log_shows_start_drain_and_end(
    make: Make, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="perdure.worker")
    runtime = make(quick)
    await trigger_many(runtime, quick, 2)
    async with working(runtime):
        pass
    assert "executes quick" in caplog.text
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
    """It is refused at once, and not when the first run is due."""
    store = MemoryStore(clock=clock)
    store.capabilities = msgspec.structs.replace(store.capabilities, schedule=False)
    with pytest.raises(MissingAbility, match="schedule"):
        Worker(Runtime(store))
