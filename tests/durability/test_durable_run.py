"""`durable.run` records every step, returns every outcome as a result, and runs nothing twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from perdure import Err, Ok, Step, durable
from perdure.durable import VersionGap
from perdure.errors import (
    AlreadyRunning,
    Cancelled,
    DriftError,
    InvalidArgument,
    LeaseLost,
    PerdureError,
    SnapshotFormatError,
    StepError,
    StoreError,
    ValueTooLarge,
    VersionMismatch,
)
from perdure.events import PersistError, PersistSuccess
from perdure.snapshot import Snapshot
from perdure.store import LeaseRequest, Refusal
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.conformance.harness import send_one
from perdure.testing.faults import FaultyStore, How

MINUTE = timedelta(minutes=1)
OWNED = (
    b'{"formatVersion":1,"steps":{},'
    b'"execution":{"status":"running","lastUpdated":"2030-01-01T00:00:00.000Z"}}'
)


class Shop:
    """Two steps, the second of which fails while `broken`; logs what was executed."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.broken = False

    async def reserve(self) -> str:
        self.ran.append("reserve")
        return "item-7"

    async def charge(self, item: str) -> str:
        self.ran.append("charge")
        if self.broken:
            raise ConnectionError("the provider is down")
        return f"paid {item}"

    async def checkout(self, step: Step) -> str:
        item = await step("reserve", self.reserve)
        return await step("charge", self.charge, item)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def run(store: MemoryStore, clock: TestClock) -> Callable[..., Awaitable[Any]]:
    """Return `durable.run` with the test's store and clock."""

    def call(fn: Any, **options: Any) -> Awaitable[Any]:
        defaults: dict[str, Any] = {"id": "order", "store": store, "clock": clock}
        return durable.run({}, fn, **{**defaults, **options})

    return call


Run = Callable[..., Awaitable[Any]]


async def run_tasks(clock: TestClock) -> None:
    """Let tasks run as far as they currently can."""
    await clock.advance(0)


async def test_a_finished_run_is_deleted(run: Run, store: MemoryStore, shop: Shop) -> None:
    """On success the value is returned and nothing remains in the store."""
    assert await run(shop.checkout) == Ok("paid item-7")
    assert await store.load("order") is None


async def test_a_kept_run_returns_its_recorded_result(run: Run, shop: Shop) -> None:
    """With `keep=True`, a second call returns the recorded result without calling the function."""
    calls = 0

    async def counted(step: Step) -> str:
        nonlocal calls
        calls += 1
        return await shop.checkout(step)

    first = await run(counted, keep=True)
    assert await run(counted, keep=True) == first == Ok("paid item-7")
    assert (calls, shop.ran) == (1, ["reserve", "charge"])


async def test_only_the_failed_step_runs_again(run: Run, store: MemoryStore, shop: Shop) -> None:
    """A failed run is stored; in the next call, finished steps return their recorded results."""
    shop.broken = True
    failed = await run(shop.checkout)
    assert isinstance(failed.error, ConnectionError)
    stored = await store.load("order")
    assert stored is not None
    assert stored["execution"]["status"] == "failed"
    shop.broken = False
    assert await run(shop.checkout) == Ok("paid item-7")
    assert shop.ran == ["reserve", "charge", "charge"]


async def test_replay_errors_returns_the_recorded_failure(run: Run, shop: Shop) -> None:
    """Nothing is executed."""
    shop.broken = True
    await run(shop.checkout)
    shop.broken = False
    again = await run(shop.checkout, replay_errors=True, errors=[ConnectionError])
    assert isinstance(again.error, ConnectionError)
    assert shop.ran == ["reserve", "charge"]


async def test_a_failure_that_the_function_handled_stays_recorded(run: Run, shop: Shop) -> None:
    """Only the step whose failure ended the run is executed again."""
    shop.broken = True
    failing = True

    async def last() -> str:
        if failing:
            raise RuntimeError("not yet")
        return "sent"

    async def careful(step: Step) -> str:
        try:
            await step("charge", shop.charge, "x")
        except ConnectionError:
            await step("excuse", shop.reserve)
        return await step("last", last)

    await run(careful)
    failing = False
    assert await run(careful) == Ok("sent")
    assert shop.ran == ["charge", "reserve"]


async def test_metadata_is_stored_with_version_and_input(
    run: Run, store: MemoryStore, shop: Shop
) -> None:
    shop.broken = True
    await run(shop.checkout, metadata={"user": "ana"}, version=3, input={"n": 1})
    stored = await store.load("order")
    assert stored is not None
    metadata = dict(stored.get("metadata") or {})
    assert len(metadata.pop("seed")) == 16
    assert metadata == {"user": "ana", "version": 3, "input": {"n": 1}}


async def test_events_are_emitted_for_every_step_and_its_record(run: Run, shop: Shop) -> None:
    """Each step starts, is durable, and is complete, in this order."""
    events: list[Any] = []
    await run(shop.checkout, on_event=events.append)
    types = [event.type for event in events if getattr(event, "step", "charge") == "charge"]
    assert types == [
        "workflow_start", "step_start", "persist_success", "step_success", "step_complete",
        "workflow_success",
    ]  # fmt: skip
    assert all(event.run_id == "order" for event in events)


async def test_async_listeners_are_awaited_before_the_run_returns(
    run: Run, shop: Shop, clock: TestClock
) -> None:
    observations: list[str] = []

    async def listen(event: Any) -> None:
        await asyncio.sleep(0.01)
        observations.append(event.type)

    await run(shop.checkout, on_event=listen)
    assert observations[-1] == "workflow_success"


async def test_a_record_that_cannot_be_written_ends_the_run(
    store: MemoryStore, shop: Shop, clock: TestClock
) -> None:
    """The function does not continue without durability: the second step never runs."""
    events: list[Any] = []
    faulty = FaultyStore(store, fail_at=1, verbs={"append"}, error=StoreError)
    result: Any = await durable.run(
        {}, shop.checkout, id="order", store=faulty, clock=clock, on_event=events.append
    )
    assert isinstance(result.error, StoreError)
    assert shop.ran == ["reserve"]
    errors = [event for event in events if isinstance(event, PersistError)]
    assert [(event.key, type(event.error)) for event in errors] == [("reserve", StoreError)]
    assert not [event for event in events if isinstance(event, PersistSuccess)]


async def test_a_run_stopped_by_its_store_can_be_continued_at_once(
    store: MemoryStore, shop: Shop, clock: TestClock
) -> None:
    """Its lease is released and need not expire."""
    faulty = FaultyStore(store, fail_at=2, verbs={"append"}, error=StoreError)
    await durable.run({}, shop.checkout, id="order", store=faulty, clock=clock)
    assert await durable.run({}, shop.checkout, id="order", store=store, clock=clock) == Ok(
        "paid item-7"
    )
    assert shop.ran == ["reserve", "charge", "charge"]


async def test_the_lease_is_renewed_while_the_run_is_executed(
    run: Run, store: MemoryStore, clock: TestClock
) -> None:
    """A step that takes ten times as long as `lease_ttl` keeps its run."""
    running = asyncio.ensure_future(
        run(lambda_step(lambda: clock.sleep(MINUTE * 10)), lease_ttl=MINUTE)
    )
    await run_tasks(clock)
    for _ in range(9):
        await clock.advance(MINUTE)
        (answer,) = await store.acquire([LeaseRequest("order", "other", MINUTE)])
        assert isinstance(answer, Refusal)
    await clock.advance(MINUTE)
    assert await running == Ok(None)


def lambda_step(work: Callable[[], Any]) -> Callable[[Step], Awaitable[Any]]:
    """Return a function with one step."""

    async def body(step: Step) -> Any:
        return await step("work", lambda: work())  # noqa: PLW0108  # in place, and not in a thread

    return body


async def test_a_run_that_is_running_in_this_process_is_refused(run: Run, clock: TestClock) -> None:
    """The error says where the first call runs."""
    running = asyncio.ensure_future(run(lambda_step(lambda: clock.sleep(5))))
    await run_tasks(clock)
    refused = await run(lambda_step(lambda: None))
    assert isinstance(refused.error, AlreadyRunning)
    assert refused.error.where == "here"
    await clock.advance(5)
    assert (await running).ok


async def test_a_run_that_another_process_owns_is_refused(run: Run, store: MemoryStore) -> None:
    """The lease of another owner is respected until it expires, and the store is not changed."""
    await store.acquire([LeaseRequest("order", "other", MINUTE, create=OWNED)])
    refused = await run(lambda_step(lambda: None))
    assert isinstance(refused.error, AlreadyRunning)
    assert refused.error.where == "elsewhere"


async def test_a_call_waits_until_a_lease_expires(
    run: Run, store: MemoryStore, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log names the owner."""
    caplog.set_level("INFO")
    await store.acquire([LeaseRequest("order", "other", MINUTE, create=OWNED)])
    waiting = asyncio.ensure_future(run(lambda_step(lambda: "done"), wait="2m"))
    await clock.advance(MINUTE - timedelta(seconds=1))
    assert not waiting.done()
    await clock.advance("2s")
    assert await waiting == Ok("done")
    (line,) = [record.getMessage() for record in caplog.records if "waiting" in record.message]
    assert "owner 'other'" in line


async def test_a_call_waits_for_a_limited_time(
    run: Run, store: MemoryStore, clock: TestClock
) -> None:
    await store.acquire([LeaseRequest("order", "other", MINUTE, create=OWNED)])
    waiting = asyncio.ensure_future(run(lambda_step(lambda: None), wait="10s"))
    await clock.advance("9s")
    assert not waiting.done()
    await clock.advance("1s")
    assert isinstance((await waiting).error, AlreadyRunning)


async def test_one_id_on_two_stores_is_two_runs(run: Run, shop: Shop, clock: TestClock) -> None:
    """A running run is identified by store and id."""
    running = asyncio.ensure_future(run(lambda_step(lambda: clock.sleep(5))))
    await run_tasks(clock)
    assert (await run(shop.checkout, store=MemoryStore(clock=clock))).ok
    await clock.advance(5)
    assert (await running).ok


async def test_allow_concurrent_takes_the_run_over(run: Run, clock: TestClock) -> None:
    """The second call continues; the first one is told that it lost the run, and records nothing
    more.
    """
    effects: list[str] = []

    async def body(step: Step) -> None:
        await step("slow", lambda: clock.sleep(5))
        await step("last", lambda: effects.append("last"))

    first = asyncio.ensure_future(run(body, allow_concurrent=True))
    await run_tasks(clock)
    second = asyncio.ensure_future(run(body, allow_concurrent=True))
    await clock.advance(5)
    lost, done = await asyncio.gather(first, second)
    assert isinstance(lost.error, LeaseLost)
    assert done.ok
    assert effects == ["last"]


async def test_an_owner_that_lost_its_lease_stops(
    run: Run, store: MemoryStore, clock: TestClock
) -> None:
    """An owner that was blocked for too long finds out with the next renewal, during a step."""
    reached: list[str] = []

    async def body(step: Step) -> None:
        await step("long", lambda: clock.sleep(3600))
        reached.append("after")

    running = asyncio.ensure_future(run(body))
    await run_tasks(clock)
    await store.save("order", await stored_snapshot(store))
    await clock.advance(11)
    assert isinstance((await running).error, LeaseLost)
    assert reached == []


async def stored_snapshot(store: MemoryStore) -> Snapshot:
    snapshot = await store.load("order")
    assert snapshot is not None
    return snapshot


@pytest.fixture
async def old_run(run: Run, shop: Shop) -> None:
    """Store a run of version 1 with one finished step."""
    shop.broken = True
    await run(shop.checkout)
    shop.broken = False
    shop.ran.clear()


@pytest.mark.usefixtures("old_run")
async def test_another_version_is_refused(run: Run, store: MemoryStore, shop: Shop) -> None:
    """The error names both versions and what to do; nothing is executed or changed."""
    before = await store.load("order")
    refused = await run(shop.checkout, version=2)
    assert isinstance(refused.error, VersionMismatch)
    assert (refused.error.stored, refused.error.requested) == (1, 2)
    assert "durable.delete_state" in str(refused.error)
    assert (await store.load("order"), shop.ran) == (before, [])


@pytest.mark.usefixtures("old_run")
@pytest.mark.parametrize("how", ["word", "function", "async function"])
async def test_another_version_can_start_from_scratch(run: Run, shop: Shop, how: str) -> None:
    """With `"clear"`, as an option or returned by a function, every step runs again."""

    async def decide(gap: VersionGap) -> str:
        return "clear"

    choice: Any = {"word": "clear", "function": lambda gap: "clear", "async function": decide}[how]
    assert await run(shop.checkout, version=2, on_version_mismatch=choice) == Ok("paid item-7")
    assert shop.ran == ["reserve", "charge"]


@pytest.mark.usefixtures("old_run")
async def test_another_version_can_continue_from_a_migrated_snapshot(run: Run, shop: Shop) -> None:
    """The function receives both versions and the stored snapshot."""
    gaps: list[VersionGap] = []

    def migrate(gap: VersionGap) -> Any:
        gaps.append(gap)
        return renamed(gap.snapshot)

    async def checkout(step: Step) -> str:
        item = await step("book", shop.reserve)
        return await step("charge", shop.charge, item)

    result = await run(checkout, version=2, on_version_mismatch=migrate)
    assert result == Ok("paid item-7")
    assert shop.ran == ["charge"]
    assert {(gap.id, gap.stored, gap.requested) for gap in gaps} == {("order", 1, 2)}


def renamed(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot for version 2, in which `reserve` is called `book`."""
    steps = {"book": snapshot["steps"]["reserve"]}
    return {**snapshot, "steps": steps}


@pytest.mark.usefixtures("old_run")
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("choice", ["clear", "migrate"])
async def test_a_crash_after_a_version_change_does_not_bring_the_old_version_back(
    store: MemoryStore, shop: Shop, clock: TestClock, choice: str, how: How
) -> None:
    """The run continues from what the new version has recorded, wherever the crash occurred."""
    old = await stored_snapshot(store)

    async def checkout(step: Step) -> str:
        item = await step("book", shop.reserve)
        await step("wrap", shop.reserve)
        return await step("charge", shop.charge, item)

    def mend(gap: VersionGap) -> Any:
        assert gap.snapshot == old
        return "clear" if choice == "clear" else renamed(gap.snapshot)

    options: Any = {"id": "order", "clock": clock, "version": 2, "on_version_mismatch": mend}
    for call in range(1, 100):
        await store.save("order", old)
        shop.ran.clear()
        dying = FaultyStore(store, fail_at=call, how=how, error=StoreError, stays_down=True)
        crashed = await durable.run({}, checkout, store=dying, **options)
        if crashed.ok and not dying.failed:
            break
        recorded = (await store.load("order") or old)["steps"]
        shop.ran.clear()
        await clock.advance(MINUTE)
        if not crashed.ok:
            assert await durable.run({}, checkout, store=store, **options) == Ok("paid item-7")
            expected = [] if "wrap" in recorded else ["reserve"]
            assert shop.ran.count("reserve") <= 1 + ("book" not in recorded) + len(expected)
    assert call > 5


async def patient(work: Awaitable[Any], clock: TestClock) -> Any:
    """Advance the clock until the work is done, since it is retried for a while."""
    task = asyncio.ensure_future(work)
    for _ in range(100):
        await clock.advance(1)
        if task.done():
            break
    return await task


async def test_a_migration_that_returns_no_snapshot_is_an_error(run: Run, shop: Shop) -> None:
    """The error says what is wrong with the returned value."""
    shop.broken = True
    await run(shop.checkout)
    result = await run(shop.checkout, version=2, on_version_mismatch=lambda gap: {"steps": {}})
    assert isinstance(result.error, SnapshotFormatError)
    again = await run(shop.checkout)
    assert not isinstance(again.error, AlreadyRunning)


async def test_a_store_that_cannot_be_read_is_a_store_error(shop: Shop, clock: TestClock) -> None:
    """Whatever a third-party store raises is the cause of a `StoreError`."""

    class Broken(MemoryStore):
        async def load(self, id: str, /) -> Snapshot | None:
            raise OSError("disk on fire")

    store = Broken(clock=clock)
    result: Any = await durable.run({}, shop.checkout, id="order", store=store, keep=True)
    assert isinstance(result.error, StoreError)
    assert isinstance(result.error.__cause__, OSError)


@pytest.mark.parametrize("verb", ["append", "acquire"])
async def test_any_exception_of_a_store_is_a_store_error(
    shop: Shop, clock: TestClock, verb: str
) -> None:
    """A third-party store may raise anything."""
    store = FaultyStore(MemoryStore(clock=clock), fail_at=1, verbs={verb}, error=KeyError)
    result: Any = await durable.run({}, shop.checkout, id="order", store=store, clock=clock)
    assert isinstance(result.error, StoreError)


async def test_changed_code_is_refused(run: Run, shop: Shop) -> None:
    """A record of another call is not returned: the error names the step."""
    shop.broken = True
    await run(shop.checkout)

    async def changed(step: Step) -> None:
        await step.sleep("reserve", 1)

    result = await run(changed)
    assert isinstance(result.error, DriftError)
    assert result.error.step == "reserve"
    assert shop.ran == ["reserve", "charge"]


async def test_a_value_that_is_too_large_is_an_error(run: Run, clock: TestClock) -> None:
    """The error names the step and says what to do, and the run can be called again."""
    store = MemoryStore(clock=clock, max_value_size=1000)
    size = 2000
    body = lambda_step(lambda: "x" * size)
    refused = await run(body, store=store)
    assert isinstance(refused.error, ValueTooLarge)
    assert "the record of step 'work' of run 'order'" in str(refused.error)
    size = 5
    assert await run(body, store=store) == Ok("xxxxx")


@pytest.mark.parametrize("keep", [False, True])
async def test_a_lost_reply_to_the_last_write_is_not_a_failure(
    store: MemoryStore, shop: Shop, clock: TestClock, keep: bool
) -> None:
    """When the write is sent again, it is recognized as done, even if it deleted the run."""
    faulty = FaultyStore(store, fail_at=3, verbs={"append"}, how="after")
    options: Any = {"id": "order", "store": faulty, "clock": clock, "keep": keep}
    assert await patient(durable.run({}, shop.checkout, **options), clock) == Ok("paid item-7")
    assert (await store.load("order") is not None) is keep


async def test_cancelling_the_task_keeps_the_state_and_releases_the_lease(
    run: Run, store: MemoryStore, shop: Shop, clock: TestClock
) -> None:
    """Another call continues at once where the cancelled one stopped."""

    async def body(step: Step) -> str:
        item = await step("reserve", shop.reserve)
        await step("slow", lambda: clock.sleep(60))
        return await step("charge", shop.charge, item)

    running = asyncio.ensure_future(run(body))
    await run_tasks(clock)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert list((await stored_snapshot(store))["steps"]) == ["reserve"]
    again = asyncio.ensure_future(run(body))
    await clock.advance(60)
    assert await again == Ok("paid item-7")
    assert shop.ran == ["reserve", "charge"]


async def test_a_function_that_swallows_its_cancellation_starts_no_further_step(
    run: Run, shop: Shop, clock: TestClock
) -> None:
    """Cancelling ends the run in this process, whatever the function catches."""

    async def stubborn(step: Step) -> str:
        with suppress(BaseException):
            await step("slow", lambda: clock.sleep(60))
        return await step("charge", shop.charge, "x")

    running = asyncio.ensure_future(run(stubborn))
    await run_tasks(clock)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert shop.ran == []


async def test_a_function_that_cancels_itself_is_cancelled(run: Run) -> None:
    """A `CancelledError` that was not requested is an outcome too."""

    async def weary(step: Step) -> None:
        raise asyncio.CancelledError

    assert isinstance((await run(weary)).error, Cancelled)


async def test_a_returned_err_is_the_outcome(run: Run) -> None:
    """An `Err` returned by a step ends the run as that `Err`."""

    async def find(step: Step) -> Any:
        async def look() -> Err[str]:
            return Err("NOT_FOUND")

        return await step("find", look)

    assert (await run(find)).error == "NOT_FOUND"


async def test_an_error_of_an_unknown_class_keeps_its_name(run: Run, shop: Shop) -> None:
    """If its class is not in scope, the failure is a `StepError` with name and message."""

    async def decline() -> None:
        raise type("Declined", (Exception,), {})("no money")

    async def body(step: Step) -> None:
        await step("pay", decline)

    await run(body)
    replayed = await run(body, replay_errors=True)
    assert isinstance(replayed.error, StepError)
    assert (replayed.error.name, replayed.error.message) == ("Declined", "no money")


async def test_a_sleep_keeps_its_deadline_across_a_crash(
    store: MemoryStore, shop: Shop, clock: TestClock
) -> None:
    """`durable.run` waits in memory; the time before the crash counts."""

    async def body(step: Step) -> str:
        await step.sleep("nap", "1h")
        return "rested"

    options: Any = {"id": "order", "store": store, "clock": clock}
    running = asyncio.ensure_future(durable.run({}, body, **options))
    await run_tasks(clock)
    await clock.advance("50m")
    running.cancel()
    await asyncio.wait([running])
    again = asyncio.ensure_future(durable.run({}, body, **options))
    await clock.advance("10m")
    assert await again == Ok("rested")


async def test_an_event_wakes_a_waiting_run(run: Run, store: MemoryStore, clock: TestClock) -> None:
    """A message in the store's inbox reaches the function soon."""

    async def body(step: Step) -> Any:
        return await step.wait_for_event("approval", "approved", timeout="3d")

    running = asyncio.ensure_future(run(body))
    await run_tasks(clock)
    await send_one(store, "order", "approved", b'{"by":"ana"}')
    await clock.advance(2)
    assert await running == Ok({"by": "ana"})


async def test_a_wait_that_times_out_returns_none(run: Run, clock: TestClock) -> None:
    async def body(step: Step) -> Any:
        return await step.wait_for_event("approval", "approved", timeout="3m")

    running = asyncio.ensure_future(run(body))
    await clock.advance("3m")
    assert await running == Ok(None)


async def test_a_run_succeeds_even_if_deleting_it_fails(
    store: MemoryStore, shop: Shop, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is returned, the leftover is logged, and its lease is no longer renewed."""
    faulty = FaultyStore(store, fail_at=3, verbs={"append"}, error=StoreError)
    beside = asyncio.ensure_future(
        durable.run(
            {}, lambda_step(lambda: clock.sleep(3600)), id="beside", store=faulty, clock=clock
        )
    )
    await run_tasks(clock)
    done = await durable.run({}, shop.checkout, id="order", store=faulty, clock=clock)
    assert done == Ok("paid item-7")
    assert "could not be deleted" in caplog.text
    await clock.advance(MINUTE * 2)
    again = await durable.run({}, shop.checkout, id="order", store=store, clock=clock)
    assert again == Ok("paid item-7")
    await clock.advance(3600)
    await beside
    assert shop.ran == ["reserve", "charge"]


async def test_a_failure_that_cannot_be_stored_releases_the_run(
    store: MemoryStore, shop: Shop, clock: TestClock
) -> None:
    """A store error at the end leaves no lease that would still be renewed."""
    shop.broken = True
    faulty = FaultyStore(store, fail_at=3, verbs={"append"}, error=StoreError)
    beside = asyncio.ensure_future(
        durable.run(
            {}, lambda_step(lambda: clock.sleep(3600)), id="beside", store=faulty, clock=clock
        )
    )
    await run_tasks(clock)
    result: Any = await durable.run({}, shop.checkout, id="order", store=faulty, clock=clock)
    assert isinstance(result.error, StoreError)
    again: Any = await durable.run({}, shop.checkout, id="order", store=store, clock=clock)
    assert isinstance(again.error, ConnectionError)
    await clock.advance(3600)
    await beside


class Overtaken(MemoryStore):
    """A store that calls a function between the load of a run and the request for its lease."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def load(self, id: str, /) -> Snapshot | None:
        loaded = await super().load(id)
        if self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            await happens()
        return loaded


@pytest.mark.parametrize("broken", [False, True], ids=["completed", "failed"])
async def test_records_written_just_before_the_lease_are_used(
    store: MemoryStore, shop: Shop, clock: TestClock, broken: bool
) -> None:
    """A call that loaded nothing and then acquires a run with records uses them."""
    shop.broken = broken
    calls = 0

    async def counted(step: Step) -> str:
        nonlocal calls
        calls += 1
        return await shop.checkout(step)

    options: Any = {"id": "order", "clock": clock, "keep": True}
    overtaken = Overtaken(clock=clock, shares=store)
    overtaken.meanwhile = lambda: durable.run({}, counted, store=store, **options)
    result = await durable.run({}, counted, store=overtaken, **options)
    assert (calls, result.ok) == ((2, False) if broken else (1, True))
    assert shop.ran == ["reserve", "charge"] + ["charge"] * broken


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"keep": True}], ids=["deleted", "kept"])
async def test_a_run_survives_a_crash_at_any_store_call(
    clock: TestClock, options: dict[str, Any], how: How
) -> None:
    """The same call returns the same result, and only a step without a record runs again."""
    for call in range(1, 100):
        shop, store = Shop(), MemoryStore(clock=clock)
        dying = FaultyStore(store, fail_at=call, how=how, error=StoreError, stays_down=True)
        arguments: Any = {"id": "order", "clock": clock, **options}
        crashed = await durable.run({}, shop.checkout, store=dying, **arguments)
        if not dying.failed:
            break
        if not crashed.ok:
            await clock.advance(MINUTE)
            again = await durable.run({}, shop.checkout, store=store, **arguments)
            assert again == Ok("paid item-7")
        assert len(shop.ran) <= 3
    assert call > 4


async def test_the_default_store_is_memory_shared_by_the_process(shop: Shop) -> None:
    shop.broken = True
    await durable.run({}, shop.checkout, id="default-store-order")
    shop.broken = False
    assert await durable.run({}, shop.checkout, id="default-store-order") == Ok("paid item-7")
    assert shop.ran == ["reserve", "charge", "charge"]


def test_run_sync_needs_no_event_loop(shop: Shop) -> None:
    """It can be called repeatedly on one store."""
    store = MemoryStore()
    shop.broken = True
    assert not durable.run_sync({}, shop.checkout, id="order", store=store).ok
    shop.broken = False
    assert durable.run_sync({}, shop.checkout, id="order", store=store) == Ok("paid item-7")


async def test_run_sync_in_an_event_loop_is_refused(shop: Shop) -> None:
    """The error says what to write instead."""
    with pytest.raises(PerdureError, match=r"await durable\.run"):
        durable.run_sync({}, shop.checkout, id="order")


async def test_deps_reach_the_function(store: MemoryStore) -> None:
    """The items of a mapping are attributes, as in `Workflow`."""

    async def fetch(id: str) -> str:
        return f"user {id}"

    async def body(step: Step, deps: Any) -> str:
        return await step("fetch", deps.fetch, "7")

    result = await durable.run({"fetch": fetch}, body, id="order", store=store)
    assert result == Ok("user 7")


@pytest.mark.parametrize(
    "options",
    [
        {"id": ""}, {"id": "x", "version": True}, {"id": "x", "lease_ttl": "soon"},
        {"id": "x", "lease_ttl": 0}, {"id": "x", "metadata": 7}, {"id": "x", "on_event": 7},
        {"id": "x", "errors": [7]}, {"id": "x", "on_version_mismatch": "perhaps"},
        {"id": "x", "idempotency_key": ""},
    ],
    ids=lambda options: list(options)[-1],
)  # fmt: skip
async def test_a_wrong_option_is_refused_before_anything_happens(
    store: MemoryStore, shop: Shop, options: Any
) -> None:
    """A mistake in the program raises an error that names the parameter; it is not an outcome of
    the run.
    """
    with pytest.raises(InvalidArgument, match=list(options)[-1]):
        await durable.run({}, shop.checkout, store=store, **options)
    assert (shop.ran, list(await store.list())) == ([], [])
