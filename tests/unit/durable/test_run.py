"""`durable.run` at its edges: version changes, retries, concurrent calls, events, bad options."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from perdure import Err, Ok, Result, Step, durable
from perdure.clock import SystemClock
from perdure.durable.leases import LEASE_TTL
from perdure.durable.session import borrow
from perdure.errors import (
    AlreadyRunning,
    CodecError,
    InvalidArgument,
    StoreError,
    VersionMismatch,
)
from perdure.events import PersistError, PersistSuccess
from perdure.store import Grant, LeaseRequest, Store
from perdure.stores import MemoryStore, sqlite
from perdure.stores.adapters.snapshot_only import SnapshotOnlyStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    async with (
        MemoryStore() if request.param == "memory" else sqlite(tmp_path / "runs.db") as store
    ):
        yield store


async def note(name: str) -> str:
    calls.append(name)
    return name


async def version_1(step: Step) -> None:
    """Run one step, then fail."""
    await step("first", note, "first")
    raise ValueError("version 1 is broken")


async def version_2(step: Step) -> list[str]:
    return [await step("first", note, "first"), await step("second", note, "second")]


async def crashing_version_2(step: Step) -> None:
    """Stop after the first step that is new in version 2."""
    await step("second", note, "second")
    raise ConnectionError("crashed")


async def run(fn: Any, store: Store, **options: Any) -> Result[Any, Any]:
    return await durable.run({}, fn, id="run", store=store, **options)


def error_of(result: Result[Any, Any]) -> Any:
    assert isinstance(result, Err), result
    return result.error


async def test_a_completed_run_is_deleted(store: Any) -> None:
    """It is neither loaded nor listed, and the next call of the id starts from scratch."""
    assert await run(version_2, store) == Ok(["first", "second"])
    assert await store.load("run") is None
    assert await store.list() == []
    assert await run(version_2, store) == Ok(["first", "second"])
    assert len(calls) == 4


async def test_a_migration_is_stored_before_the_function_runs(store: Any) -> None:
    """After a crash the new version resumes as itself; the migration is called once."""
    await run(version_1, store, version=1)
    gaps: list[tuple[int, int]] = []

    def migrate(gap: durable.VersionGap) -> Any:
        gaps.append((gap.stored, gap.requested))
        return {**gap.snapshot, "steps": {}}

    assert not (await run(crashing_version_2, store, version=2, on_version_mismatch=migrate)).ok
    stored = await store.load("run")
    assert stored["metadata"]["version"] == 2
    assert list(stored["steps"]) == ["second"]
    assert (await run(version_2, store, version=2, on_version_mismatch=migrate)).ok
    assert gaps == [(1, 2)]


async def test_a_cleared_run_is_stored_before_the_function_runs(store: Any) -> None:
    """A crash of the new version does not bring back what was cleared."""
    await run(version_1, store, version=1)
    assert not (await run(crashing_version_2, store, version=2, on_version_mismatch="clear")).ok
    stored = await store.load("run")
    assert stored["metadata"]["version"] == 2
    assert list(stored["steps"]) == ["second"]


@pytest.mark.parametrize("answer", ["error", "later", {"formatVersion": 2}])
async def test_a_refused_version_releases_the_run(store: Any, answer: Any) -> None:
    """The stored version continues at once, without waiting for a lease to expire."""
    await run(version_1, store, version=1)
    refused = await run(version_2, store, version=2, on_version_mismatch=lambda gap: answer)
    assert not refused.ok
    assert await run(version_2, store, version=1) == Ok(["first", "second"])


async def test_a_version_mismatch_names_both_versions(store: Any) -> None:
    """The error names the stored and the requested version."""
    await run(version_1, store, version=1)
    error = error_of(await run(version_2, store, version=3))
    assert isinstance(error, VersionMismatch)
    assert "started by version 1, but this is version 3" in str(error)


async def test_steps_that_another_process_recorded_before_the_lease_are_not_repeated(
    store: Any,
) -> None:
    """The run is read together with its lease, not before."""

    class RacingStore(FaultyStore):
        async def acquire(self, requests: Sequence[LeaseRequest]) -> Sequence[Grant | None]:
            await run(version_1, store)
            grants: Sequence[Grant | None] = await store.acquire(requests)
            return grants

    assert await run(version_2, RacingStore(store)) == Ok(["first", "second"])
    assert calls == ["first", "second"]


class Order:
    """Steps "a" and "c" in one branch, step "b" in another.

    While "b" fails, it does so after "a" was recorded, and "c" is not reached. In later calls "b"
    starts after "c" was recorded.
    """

    def __init__(self) -> None:
        self.b: Literal["fails", "hangs", "works"] = "fails"
        self.b_hangs = asyncio.Event()

    async def process(self, step: Step) -> list[str]:
        recorded = asyncio.Event()

        async def first_branch() -> str:
            first = await step("a", note, "a")
            if self.b == "fails":
                recorded.set()
                await asyncio.get_running_loop().create_future()
            second = await step("c", note, "c")
            recorded.set()
            return first + second

        async def right() -> str:
            await recorded.wait()
            return await step("b", self.run_b)

        return list(await asyncio.gather(first_branch(), right()))

    async def run_b(self) -> str:
        calls.append("b")
        if self.b == "fails":
            raise ConnectionError("b failed")
        if self.b == "hangs":
            self.b_hangs.set()
            await asyncio.get_running_loop().create_future()
        return "b"


async def failed_order(store: Store, **options: Any) -> Order:
    """Return an order whose run has failed at "b"."""
    order = Order()
    assert isinstance(error_of(await run(order.process, store, **options)), ConnectionError)
    assert calls == ["a", "b"]
    return order


async def test_a_failed_step_runs_again_when_its_retry_was_cancelled(store: Any) -> None:
    """A step that the retry recorded before it was cancelled does not restore the failure."""
    order = await failed_order(store)
    order.b = "hangs"
    retry = asyncio.ensure_future(run(order.process, store))
    await order.b_hangs.wait()
    retry.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retry
    assert "c" in (await store.load("run"))["steps"]
    order.b = "works"
    assert await run(order.process, store) == Ok(["ac", "b"])
    assert calls == ["a", "b", "c", "b", "b"]


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "snapshots only"])
async def test_a_retry_survives_a_crash_at_any_store_call(how: How, has_journal: bool) -> None:
    """Recorded steps are replayed and the failed one runs again.

    This includes a crash after "c" was recorded and before "b" was.
    """
    for n in count(1):
        calls.clear()
        clock = TestClock()
        memory = MemoryStore(clock=clock)
        store: Store = memory if has_journal else SnapshotOnlyStore(memory)
        order = await failed_order(store, clock=clock)
        order.b = "works"
        crashing = FaultyStore(store, fail_at=n, how=how, error=StoreError, stays_down=True)
        await run(order.process, crashing, clock=clock)
        if not crashing.failed:
            assert n > 4
            break
        is_deleted = await store.load("run") is None
        await clock.advance(LEASE_TTL)
        assert await run(order.process, store, clock=clock) == Ok(["ac", "b"]), f"call {n}"
        assert calls.count("a") == 1 + is_deleted
        assert calls.count("b") >= 2


@pytest.fixture(params=["leases", "no leases"])
def leased_or_not(request: pytest.FixtureRequest) -> Store:
    return MemoryStore() if request.param == "leases" else SnapshotOnlyStore(MemoryStore())


async def test_a_second_call_of_a_running_id_is_refused(leased_or_not: Store) -> None:
    """Its function is not called, and the first call continues; when that ends, the id is free."""
    started, may_end = asyncio.Event(), asyncio.Event()

    async def slow(step: Step) -> str:
        async def wait() -> str:
            started.set()
            await may_end.wait()
            return "done"

        return await step("wait", wait)

    first = asyncio.ensure_future(run(slow, leased_or_not))
    await started.wait()
    for options in ({}, {"lease_ttl": 5}):
        error = error_of(await run(version_2, leased_or_not, **options))
        assert isinstance(error, AlreadyRunning)
        assert (error.run_id, error.where) == ("run", "here")
    assert calls == []
    may_end.set()
    assert await first == Ok("done")
    assert await run(version_2, leased_or_not) == Ok(["first", "second"])


async def test_only_one_of_several_concurrent_calls_runs(leased_or_not: Store) -> None:
    """The others are refused before they read or lease anything."""
    first, *others = await asyncio.gather(*(run(version_2, leased_or_not) for _ in range(3)))
    assert first == Ok(["first", "second"])
    for refused in others:
        error = error_of(refused)
        assert isinstance(error, AlreadyRunning)
        assert error.where == "here"
    assert calls == ["first", "second"]


async def test_an_id_stays_refused_when_a_concurrent_call_of_it_has_ended() -> None:
    """`allow_concurrent` lets a second call in; a third one without it is still refused."""
    store = SnapshotOnlyStore(MemoryStore())
    started, may_end = asyncio.Event(), asyncio.Event()

    async def slow(step: Step) -> str:
        started.set()
        await may_end.wait()
        return "done"

    first = asyncio.ensure_future(run(slow, store))
    await started.wait()
    assert await run(version_2, store, allow_concurrent=True) == Ok(["first", "second"])
    assert isinstance(error_of(await run(version_2, store)), AlreadyRunning)
    may_end.set()
    assert await first == Ok("done")


async def test_a_run_that_failed_does_not_count_as_running(leased_or_not: Store) -> None:
    """Neither does one whose task was cancelled."""
    assert isinstance(error_of(await run(version_1, leased_or_not)), ValueError)
    started = asyncio.Event()

    async def hang(step: Step) -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    cancelled = asyncio.ensure_future(run(hang, leased_or_not))
    await started.wait()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert await run(version_2, leased_or_not) == Ok(["first", "second"])


async def test_a_session_that_stays_open_keeps_no_ids_of_ended_runs() -> None:
    """A worker's session lives as long as the worker."""
    store = MemoryStore()
    async with borrow(store, SystemClock(), LEASE_TTL) as session:
        for n in range(3):
            await durable.run({}, version_2, id=f"run-{n}", store=store)
        assert not session.running_ids


async def test_all_events_were_handled_when_the_call_returns(store: Any) -> None:
    """This includes async listeners and the events of records becoming durable."""
    events: list[Any] = []

    async def listen(event: Any) -> None:
        await asyncio.sleep(0)
        events.append(event)

    await run(version_2, store, on_event=listen)
    assert [event.key for event in events if isinstance(event, PersistSuccess)] == [
        "first", "second",
    ]  # fmt: skip
    assert events[-1].type == "workflow_success"


async def test_a_record_that_cannot_be_written_is_an_event(store: Any) -> None:
    """The run stops with the store's error."""
    events: list[Any] = []
    faulty = FaultyStore(store, fail_at=1, verbs={"append"}, error=StoreError)
    result = await run(version_2, faulty, on_event=events.append)
    assert isinstance(error_of(result), StoreError)
    assert [event.key for event in events if isinstance(event, PersistError)] == ["first"]
    assert calls == ["first"]


async def test_a_run_whose_output_cannot_be_recorded_fails(store: Any) -> None:
    """The error names the run; without `keep` nothing is recorded, and the run completes."""

    async def deep(step: Step) -> Any:
        nested: list[Any] = []
        for _ in range(200):
            nested = [nested]
        return nested

    error = error_of(await run(deep, store, keep=True))
    assert isinstance(error, CodecError)
    assert "the output of run 'run' cannot be recorded" in str(error)
    assert [summary.status for summary in await store.list()] == ["failed"]
    assert (await durable.run({}, deep, id="deleted", store=store)).ok


async def test_an_output_is_the_same_before_and_after_it_was_recorded(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first call returns the output as it was recorded, and the log says what was lost."""

    async def lossy(step: Step) -> Any:
        return {"it": object()}

    first = await run(lossy, store, keep=True)
    assert await run(lossy, store, keep=True) == first
    assert "its output" in caplog.text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("id", ""), ("id", 5), ("id", "x" * 513), ("id", "a\0b"), ("store", 5), ("store", "sqlite"),
        ("version", "1"), ("version", -1), ("version", True), ("metadata", 5), ("on_event", 5),
        ("errors", [5]), ("lease_ttl", "soon"), ("lease_ttl", 0), ("on_version_mismatch", "retry"),
        ("idempotency_key", ""), ("idempotency_key", 5), ("clock", 5), ("keep", "yes"),
        ("replay_errors", 1), ("allow_concurrent", None),
    ],
)  # fmt: skip
async def test_an_invalid_option_is_named(option: str, value: Any) -> None:
    """The error is raised, not returned."""
    options: dict[str, Any] = {"id": "run", "store": MemoryStore(), option: value}
    with pytest.raises(InvalidArgument) as raised:
        await durable.run({}, version_2, **options)
    assert raised.value.parameter == option
