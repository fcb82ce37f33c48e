"""Each test shows that perdure avoids one known weakness of other workflow runtimes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from perdure import Cron, Retry, Runtime, Step, workflow
from perdure.codec import dumps
from perdure.errors import (
    Cancelled,
    DriftError,
    InvalidArgument,
    InvalidCron,
    StepTimeout,
    StoreError,
    VersionMismatch,
)
from perdure.keyvalue import MemoryKeyValue
from perdure.snapshot import Snapshot, new_snapshot
from perdure.store import Delivery, Grant, LeaseRequest, NewRun
from perdure.stores import FileStore, keyvalue, sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore

MINUTE = timedelta(minutes=1)
TTL = timedelta(seconds=30)


async def double(n: int) -> int:
    return n * 2


@pytest.fixture
def effects() -> list[str]:
    return []


Note = Callable[[str], Awaitable[str]]


@pytest.fixture
def note(effects: list[str]) -> Note:
    async def note(text: str) -> str:
        effects.append(text)
        return text

    return note


def sleeping_run(clock: TestClock, status: str = "suspended") -> Snapshot:
    """Return the snapshot of a run that sleeps for an hour."""
    snapshot: Any = new_snapshot("nap", now=clock.now())
    wake_at = (clock.now() + timedelta(hours=1)).isoformat()
    snapshot["execution"] |= {
        "state": status,
        "pending": [{"id": "z", "kind": "sleep", "wakeAt": wake_at}],
    }
    return snapshot  # type: ignore[no-any-return]


@pytest.fixture(params=["memory", "file", "sqlite", "keyvalue"])
async def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: TestClock
) -> AsyncIterator[Any]:
    """Return a store of each kind that needs no server, with the test's clock."""
    make: dict[str, Callable[[], Any]] = {
        "memory": lambda: MemoryStore(clock=clock),
        "file": lambda: FileStore(tmp_path / "runs", clock=clock),
        "sqlite": lambda: sqlite(tmp_path / "runs.db", clock=clock),
        "keyvalue": lambda: keyvalue(MemoryKeyValue(), clock=clock),
    }
    store = make[request.param]()
    yield store
    await store.close()


async def test_a_crash_in_the_first_steps_loses_nothing(
    store: MemoryStore, clock: TestClock, effects: list[str], note: Note
) -> None:
    """The run is durable before its first line, and each step when it ends."""

    @workflow("two")
    async def two(step: Step) -> str:
        await step("one", note, "one")
        return await step("two", note, "two")

    dying: Any = FaultyStore(store, fail_at=3, error=StoreError, stays_down=True)
    with pytest.raises(StoreError):
        await Runtime(dying, workflows=[two], clock=clock).trigger(two, run_id="run")
    await clock.advance(MINUTE)
    (run,) = await Runtime(store, workflows=[two], clock=clock).sweep()
    assert (run.id, run.output) == ("run", "two")
    assert effects == ["one", "two", "two"]


async def test_a_step_beside_a_sleeping_branch_is_recorded(
    store: MemoryStore, clock: TestClock, effects: list[str]
) -> None:
    """It does not run again when the run is resumed."""

    async def slow() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        effects.append("slow")

    @workflow("beside")
    async def beside(step: Step) -> None:
        await asyncio.gather(step.sleep("nap", "1h"), step("slow", slow))

    runtime = Runtime(store, workflows=[beside], clock=clock)
    assert (await runtime.trigger(beside)).status == "suspended"
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert (run.status, effects) == ("completed", ["slow"])


async def test_except_base_exception_does_not_swallow_a_suspension(
    store: MemoryStore, clock: TestClock
) -> None:
    @workflow("greedy")
    async def greedy(step: Step) -> str:
        try:
            await step.sleep("nap", "1h")
        except BaseException:  # noqa: BLE001
            return "swallowed"
        return "slept"

    runtime = Runtime(store, workflows=[greedy], clock=clock)
    assert (await runtime.trigger(greedy)).status == "suspended"
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert run.output == "slept"


async def test_signals_are_stored_until_the_run_waits_for_them(
    store: MemoryStore, clock: TestClock
) -> None:
    """Signals are not lost if they are early, out of order, or sent while another process owns the
    run.
    """

    @workflow("patient")
    async def patient(step: Step) -> list[Any]:
        await step.sleep("nap", "1h")
        return [await step.wait_for_event(name, name) for name in ("second", "first")]

    runtime = Runtime(store, workflows=[patient], clock=clock)
    await runtime.trigger(patient, run_id="run")
    assert (await runtime.signal("run", "first", 1)).delivery is Delivery.DELIVERED
    await store.acquire([LeaseRequest("run", "another", MINUTE)])
    assert (await runtime.signal("run", "second", 2)).delivery is Delivery.DELIVERED
    await clock.advance("1h")
    (run,) = await runtime.sweep()
    assert run.output == [2, 1]


async def test_a_long_step_keeps_its_lease_and_an_owner_that_lost_it_cannot_write(
    store: MemoryStore, clock: TestClock, effects: list[str], note: Note
) -> None:
    """The lease is renewed in the background."""

    @workflow("long")
    async def long(step: Step) -> None:
        await step("long", lambda: clock.sleep(TTL * 4))
        await step("after", note, "after")

    runtime = Runtime(store, workflows=[long], clock=clock, lease_ttl=TTL)
    driving = asyncio.ensure_future(runtime.trigger(long, run_id="run"))
    await clock.advance(TTL * 3)
    assert await store.claim("another", TTL, 1) == []
    run = store._backend.runs.get("run")
    assert run is not None
    run.owner = None
    (stolen,) = await store.acquire([LeaseRequest("run", "thief", TTL * 10)])
    assert isinstance(stolen, Grant)
    await clock.advance(TTL * 2)
    assert (await driving).status == "running"
    assert effects == []


async def test_triggers_with_the_same_id_start_one_run(
    store: MemoryStore, clock: TestClock, effects: list[str], note: Note
) -> None:
    """The run is leased while it is executed."""

    @workflow("once")
    async def once(step: Step) -> None:
        await step("work", note, "work")
        await step("slow", lambda: clock.sleep(5))

    runtimes = [
        Runtime(MemoryStore(clock=clock, shares=store), workflows=[once], clock=clock)
        for _ in range(3)
    ]
    triggers = [
        asyncio.ensure_future(runtime.trigger(once, run_id="order-7")) for runtime in runtimes
    ]
    await clock.advance(5)
    assert {run.id for run in await asyncio.gather(*triggers)} == {"order-7"}
    assert effects == ["work"]


async def test_steps_have_retries_and_timeouts_and_runs_can_be_retried_and_cancelled(
    store: MemoryStore, clock: TestClock
) -> None:
    tries: list[int] = []

    async def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return "up"

    @workflow("policies")
    async def policies(step: Step) -> str:
        value = await step("flaky", flaky, retry=Retry(attempts=3, delay=0))
        if len(tries) == 3:
            tries.append(1)
            await step("hangs", lambda: asyncio.Event().wait(), timeout=5)
        return value

    runtime = Runtime(store, workflows=[policies], clock=clock)
    triggered = asyncio.ensure_future(runtime.trigger(policies, run_id="run"))
    await clock.advance(5)
    failed = await triggered
    assert isinstance(failed.error, StepTimeout)
    assert (await runtime.retry("run")).output == "up"
    (await runtime.trigger(policies, run_id="other", wait=False))
    cancelled = await runtime.cancel("other")
    assert isinstance(cancelled.error, Cancelled)


async def test_a_failed_set_up_is_retried(tmp_path: Path) -> None:
    """A store whose first call failed works when its directory exists."""
    async with sqlite(tmp_path / "later" / "runs.db") as store:
        with pytest.raises(StoreError):
            await store.load("run")
        (tmp_path / "later").mkdir()
        assert await store.load("run") is None


async def test_a_signal_to_an_unknown_run_returns_unknown(any_store: Any, clock: TestClock) -> None:
    runtime = Runtime(any_store, clock=clock)
    assert (await runtime.signal("unknown", "go")).delivery is Delivery.UNKNOWN


async def test_a_deleted_run_is_never_due(any_store: Any, clock: TestClock) -> None:
    await any_store.save("run", sleeping_run(clock))
    await any_store.delete("run")
    await clock.advance("2h")
    assert list(await any_store.due(clock.now(), 10)) == []
    assert list(await any_store.claim("worker", MINUTE, 10)) == []


async def test_runs_that_cannot_be_continued_do_not_block_the_others(
    store: MemoryStore, clock: TestClock
) -> None:
    """Runs of a version that is not known here take no place in a limited sweep."""

    @workflow("job", version=2)
    async def job(step: Step) -> str:
        return "done"

    old = new_snapshot("job", now=clock.now(), metadata={"version": 1})
    for n in range(10):
        await store.save(f"bad-{n}", old)
        await store.acquire([LeaseRequest(f"bad-{n}", "x", timedelta(0))])
    runtime = Runtime(store, workflows=[job], clock=clock)
    await clock.advance(1)
    await runtime.trigger(job, run_id="good", wait=False)
    assert [run.id for run in await runtime.sweep(limit=10)] == ["good"]


async def test_concurrent_sweeps_execute_each_run_once(
    any_store: Any, clock: TestClock, effects: list[str], note: Note
) -> None:
    @workflow("job")
    async def job(step: Step) -> None:
        await step("work", note, step.run_id)

    runtimes = [Runtime(any_store, workflows=[job], clock=clock) for _ in range(2)]
    for n in range(20):
        await runtimes[0].trigger(job, run_id=f"run-{n}", wait=False)
    await asyncio.gather(*(runtime.sweep() for runtime in runtimes))
    assert sorted(effects) == sorted(f"run-{n}" for n in range(20))


async def test_no_wake_time_is_lost_when_many_runs_are_saved_at_once(
    any_store: Any, clock: TestClock
) -> None:
    """Concurrent writers do not overwrite each other's entries in the index of wake times."""
    await asyncio.gather(*(any_store.save(f"run-{n}", sleeping_run(clock)) for n in range(50)))
    await clock.advance("1h")
    assert len(await any_store.due(clock.now(), 100)) == 50


async def test_a_step_is_a_small_write_and_old_runs_can_be_pruned(
    store: MemoryStore, clock: TestClock
) -> None:
    written: list[int] = []

    class Measured(MemoryStore):
        async def append(self, entries: Any, /) -> Any:
            written.extend(len(entry.data) for entry in entries if entry.rest is None)
            return await super().append(entries)

    @workflow("long")
    async def long(step: Step) -> None:
        for n in range(50):
            await step(f"step {n:03}", double, n)

    measured = Measured(clock=clock, shares=store)
    await Runtime(measured, workflows=[long], clock=clock).trigger(long, run_id="run")
    assert max(written) < 1.1 * min(written)
    await clock.advance("30d")
    assert await store.prune(timedelta(days=7)) == 1


async def test_changed_code_does_not_misread_the_history(
    store: MemoryStore, clock: TestClock
) -> None:
    """Another version is refused, and so is a call with other arguments than its record."""

    @workflow("v", version=1)
    async def old(step: Step) -> None:
        await step("one", double, 1)
        await step.sleep("nap", "1h")

    @workflow("v", version=2)
    async def new(step: Step) -> None: ...

    @workflow("v", version=1)
    async def changed(step: Step) -> None:
        await step("one", double, 2)

    await Runtime(store, workflows=[old], clock=clock).trigger(old, run_id="run")
    await clock.advance("1h")
    with pytest.raises(VersionMismatch):
        await Runtime(store, workflows=[new], clock=clock).resume("run")
    await clock.advance(MINUTE)
    run = await Runtime(store, workflows=[changed], clock=clock).resume("run")
    assert run.status == "failed"
    assert isinstance(run.error, DriftError) or "other arguments" in str(run.error)


@dataclass
class Order:
    when: datetime
    price: Decimal


async def test_payload_events_and_output_are_the_same_in_every_store(
    any_store: Any, clock: TestClock
) -> None:
    """The function and its caller see values as they are restored from their records."""
    observations: list[Any] = []
    when = datetime(2030, 1, 1, tzinfo=UTC)

    @workflow("typed")
    async def typed(step: Step, order: Order) -> Order:
        observations.extend([order, await step.wait_for_event("go", "go")])
        return Order(order.when, order.price * 2**70)

    runtime = Runtime(any_store, workflows=[typed], clock=clock)
    await runtime.trigger(typed, Order(when, Decimal("1.5")), run_id="run")
    signalled = await runtime.signal("run", "go", {"at": when, "tags": {1}})
    assert observations[-2:] == [Order(when, Decimal("1.5")), {"at": when, "tags": {1}}]
    assert signalled.run is not None
    assert signalled.run.output == Order(when, Decimal("1.5") * 2**70)
    assert (await runtime.get_run("run")) == signalled.run


class Declined(Exception):
    """An error with a field."""

    def __init__(self, code: int) -> None:
        super().__init__(f"declined with {code}")
        self.code = code


async def test_errors_keep_their_cause_and_their_fields(any_store: Any, clock: TestClock) -> None:
    async def pay() -> None:
        try:
            raise ConnectionError("reset")
        except ConnectionError as error:
            raise Declined(51) from error

    @workflow("pay", errors=[Declined])
    async def paying(step: Step) -> None:
        await step("pay", pay)

    runtime = Runtime(any_store, workflows=[paying], clock=clock)
    await runtime.trigger(paying, run_id="run")
    run = await Runtime(any_store, workflows=[paying], clock=clock).get_run("run")
    assert run is not None
    assert isinstance(run.error, Declined)
    assert run.error.code == 51
    assert isinstance(run.error.__cause__, ConnectionError)
    stored = await any_store.load("run")
    assert stored["formatVersion"] == 1


async def test_time_is_injected_and_runs_can_be_listed(
    store: MemoryStore, clock: TestClock
) -> None:
    types: list[str] = []

    @workflow("monthly")
    async def monthly(step: Step) -> str:
        await step.sleep("first", Cron("0 0 1 * *"))
        return "paid"

    def listen(event: Any) -> None:
        types.append(event.type)

    runtime = Runtime(store, workflows=[monthly], clock=clock, on_event=listen)
    await runtime.trigger(monthly, run_id="run")
    await clock.advance("31d")
    await runtime.sweep()
    (line,) = await runtime.list_runs(workflow="monthly", status="completed")
    assert line.id == "run"
    assert types[0] == "workflow_start"
    assert types[-1] == "workflow_success"
    with pytest.raises(InvalidCron):
        Cron("every day")
    with pytest.raises(InvalidArgument, match="limit"):
        await runtime.sweep(limit=0)


async def test_a_deleted_run_leaves_no_lease(any_store: Any, clock: TestClock) -> None:
    """The id can be used again at once, and the previous owner cannot write."""
    await any_store.save("run", sleeping_run(clock))
    (old,) = await any_store.acquire([LeaseRequest("run", "one", MINUTE)])
    await any_store.delete("run")
    data = dumps(new_snapshot("nap", now=clock.now()))
    assert await any_store.enqueue([NewRun("run", "nap", data)]) == [True]
    (new,) = await any_store.acquire([LeaseRequest("run", "two", MINUTE)])
    assert new.lease.epoch > old.lease.epoch
    assert await any_store.renew([old.lease], MINUTE) == [None]


@pytest.mark.parametrize("module", ["perdure", "perdure.stores", "perdure.caches"])
def test_every_public_name_can_be_imported(module: str) -> None:
    names = import_module(module)
    assert [name for name in names.__all__ if not hasattr(names, name)] == []
