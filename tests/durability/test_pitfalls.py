"""Each test shows that perdure avoids one known weakness of other persistence APIs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from perdure import (
    Err,
    Ok,
    Runtime,
    Step,
    Worker,
    Workflow,
    durable,
    merge_snapshots,
    validate_snapshot,
    workflow,
)
from perdure.caches import FileCache, MemoryCache
from perdure.errors import InvalidArgument, SnapshotMismatch, StepFailed, StoreError
from perdure.keyvalue import MemoryKeyValue
from perdure.runtime.options import Plan
from perdure.snapshot import Snapshot, looks_like_workflow_snapshot, new_snapshot
from perdure.store import Capabilities, Entry, Grant, Lease, LeaseRequest, NewRun, Verdict
from perdure.stores import keyvalue, libsql, sqlite
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


async def double(n: int) -> int:
    return n * 2


def snapshot(**steps: Any) -> Snapshot:
    first = new_snapshot("w", now=NOW)
    first["steps"] = {key: {"ok": True, "value": value} for key, value in steps.items()}
    return first


@pytest.fixture(params=["memory", "sqlite", "libsql", "keyvalue"])
async def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """Return a store of each kind that needs no server, with the system clock."""
    make: dict[str, Callable[[], Any]] = {
        "memory": MemoryStore,
        "sqlite": lambda: sqlite(tmp_path / "runs.db"),
        "libsql": lambda: libsql(f"file:{tmp_path}/runs.db"),
        "keyvalue": lambda: keyvalue(MemoryKeyValue()),
    }
    store = make[request.param]()
    yield store
    await store.close()


async def test_a_short_lease_expires_on_time(any_store: Any) -> None:
    """A lease of ten milliseconds has expired after fifty."""
    await any_store.save("run", snapshot())
    short = timedelta(milliseconds=10)
    (first,) = await any_store.acquire([LeaseRequest("run", "one", short)])
    await asyncio.sleep(0.05)
    (second,) = await any_store.acquire([LeaseRequest("run", "two", MINUTE)])
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert second.lease.epoch > first.lease.epoch


async def test_parallel_steps_do_not_lose_updates() -> None:
    """An early save that is slow does not overwrite a later one that is fast."""

    class SlowAtFirst(MemoryStore):
        saves = 0

        async def save(self, id: str, snapshot: Snapshot, /) -> None:
            self.saves += 1
            await asyncio.sleep(0.02 / self.saves)
            await super().save(id, snapshot)

    store = SlowAtFirst()
    store.capabilities = Capabilities()

    async def body(step: Step) -> list[int]:
        return await asyncio.gather(*(step(f"n{n}", double, n) for n in range(10)))

    await durable.run({}, body, id="run", store=store, keep=True)
    stored = await store.load("run")
    assert stored is not None
    assert set(stored["steps"]) == {f"n{n}" for n in range(10)}


async def test_the_cost_of_a_step_does_not_depend_on_the_length_of_the_run() -> None:
    """The hundredth entry is as small as the third."""
    sizes: list[int] = []

    class Measured(MemoryStore):
        async def append(self, entries: Any, /) -> Any:
            sizes.extend(len(entry.data) for entry in entries if entry.rest is None)
            return await super().append(entries)

    async def body(step: Step) -> None:
        for n in range(100):
            await step(f"step {n:03}", double, n)

    await durable.run({}, body, id="run", store=Measured())
    assert sizes[99] - sizes[2] < 10


async def test_a_key_used_twice_means_the_same_before_and_after_a_crash() -> None:
    """One key is one step. One id called twice is two steps, each with its own record."""
    store = MemoryStore()
    ran: list[int] = []
    broken = True

    async def note(n: int) -> int:
        ran.append(n)
        return n

    async def body(step: Step) -> list[int]:
        values = [
            await step("a", lambda: note(1), key="k"),
            await step("a", lambda: note(2), key="k"),
        ]
        values += [await step("twice", note, 3), await step("twice", note, 4)]
        if broken:
            raise RuntimeError("crash")
        return values

    await durable.run({}, body, id="run", store=store)
    broken = False
    assert await durable.run({}, body, id="run", store=store) == Ok([1, 1, 3, 4])
    assert ran == [1, 3, 4]


async def test_a_failure_does_not_block_its_idempotency_key() -> None:
    """The next call with the key runs."""
    store = MemoryStore()

    async def failing(step: Step) -> None:
        raise RuntimeError("no")

    async def fine(step: Step) -> str:
        return "yes"

    options: Any = {"id": "run", "store": store, "idempotency_key": "k"}
    assert not (await durable.run({}, failing, **options)).ok
    assert await durable.run({}, fine, **options) == Ok("yes")


async def test_no_call_waits_forever_for_an_idempotency_key() -> None:
    """When the first caller is refused, those that waited for it continue."""
    store = MemoryStore()
    await store.save("taken", snapshot())
    await store.acquire([LeaseRequest("taken", "another process", MINUTE)])

    async def fine(step: Step) -> str:
        return "yes"

    options: Any = {"store": store, "idempotency_key": "k"}
    async with asyncio.timeout(5):
        refused, served = await asyncio.gather(
            durable.run({}, fine, id="taken", **options), durable.run({}, fine, id="b", **options)
        )
    assert (refused.ok, served) == (False, Ok("yes"))


async def test_a_failed_step_runs_again_on_resume() -> None:
    """After an outage, nothing has to be deleted by hand."""
    store = MemoryStore()
    down = True

    async def fetch() -> str:
        if down:
            raise ConnectionError
        return "fetched"

    async def body(step: Step) -> str:
        return await step("fetch", fetch)

    assert not (await durable.run({}, body, id="run", store=store)).ok
    down = False
    assert await durable.run({}, body, id="run", store=store) == Ok("fetched")


async def test_a_collected_state_does_not_shrink_on_resume() -> None:
    """Replayed steps are in the new state too, however often the run is resumed."""

    async def body(step: Step) -> int:
        one = await step("one", double, 1, key="one")
        return await step("two", double, one, key="two")

    _, state = await Workflow("w", {}).run_with_state(body)
    for _ in range(3):
        result, state = await Workflow("w", {}, resume_state=state).run_with_state(body)
        assert result == Ok(4)
        assert list(state.steps) == ["one", "two"]


async def test_parallel_steps_may_finish_in_any_order() -> None:
    """Neither a replay in another order nor a step that depends on data is drift."""
    store = MemoryStore()
    waits = [0.02, 0.0]
    broken = True

    async def slow(n: int) -> int:
        await asyncio.sleep(waits[n])
        return n

    async def body(step: Step) -> list[int]:
        values = list(await asyncio.gather(step("a", slow, 0), step("b", slow, 1)))
        if values[1]:
            values.append(await step("if b", double, 1))
        if broken:
            raise RuntimeError("crash")
        return values

    await durable.run({}, body, id="run", store=store)
    broken, waits[:] = False, [0.0, 0.02]
    assert await durable.run({}, body, id="run", store=store) == Ok([0, 1, 2])


async def test_a_record_that_cannot_be_written_stops_the_run() -> None:
    """The function does not continue without durability, whatever it catches."""
    reached: list[str] = []
    store = FaultyStore(MemoryStore(), fail_at=1, verbs={"append"}, error=StoreError)

    async def body(step: Step) -> None:
        try:
            await step("one", double, 1)
        except StoreError:
            await step("two", lambda: reached.append("two"))

    result: Any = await durable.run({}, body, id="run", store=store)
    assert isinstance(result.error, StoreError)
    assert reached == []


async def test_a_previous_owner_cannot_write(any_store: Any) -> None:
    """Entries of an older epoch are refused, and its release has no effect."""
    await any_store.save("run", snapshot(a=1))
    (old,) = await any_store.acquire([LeaseRequest("run", "old", timedelta(milliseconds=1))])
    await asyncio.sleep(0.02)
    (new,) = await any_store.acquire([LeaseRequest("run", "new", MINUTE)])
    entry = Entry("run", old.lease.epoch, 1, b'{"formatVersion":1,"steps":{"b":{"ok":true}}}')
    assert await any_store.append([entry]) == [Verdict.FENCED]
    await any_store.release([old.lease])
    assert await any_store.renew([new.lease], MINUTE) != [None]
    assert list((await any_store.load("run"))["steps"]) == ["a"]


async def test_leases_and_sleeps_use_the_clock_of_the_store() -> None:
    """A machine whose clock is a day ahead neither steals a lease nor sleeps too long."""
    clock = TestClock()
    store = MemoryStore(clock=clock)
    ahead = TestClock(clock.now() + timedelta(days=1))

    @workflow("nap")
    async def nap(step: Step) -> str:
        await step.sleep("hour", "1h")
        return "rested"

    run = await Runtime(store, workflows=[nap], clock=ahead).trigger(nap)
    assert run.pending[0].wake_at == clock.now() + timedelta(hours=1)
    await clock.advance("59m")
    assert await store.claim("worker", MINUTE, 1) == []
    await clock.advance("1m")
    assert len(await store.claim("worker", MINUTE, 1)) == 1


async def test_a_renewal_fails_only_if_the_lease_was_lost(any_store: Any) -> None:
    """Two renewals at the same time both succeed; a lease that was taken over stays lost."""
    await any_store.save("run", snapshot())
    (grant,) = await any_store.acquire([LeaseRequest("run", "one", timedelta(milliseconds=20))])
    twice = [await any_store.renew([grant.lease], timedelta(milliseconds=20)) for _ in range(2)]
    assert all(isinstance(lease, Lease) for (lease,) in twice)
    await asyncio.sleep(0.05)
    await any_store.acquire([LeaseRequest("run", "two", MINUTE)])
    assert await any_store.renew([grant.lease], MINUTE) == [None]


async def test_stores_with_different_prefixes_do_not_block_each_other(tmp_path: Path) -> None:
    """One id under two prefixes has two leases. A table name cannot inject SQL."""
    async with (
        sqlite(tmp_path / "x.db", prefix="a:") as a,
        sqlite(tmp_path / "x.db", prefix="b:") as b,
    ):
        for store in (a, b):
            await store.save("run", snapshot())
            (answer,) = await store.acquire([LeaseRequest("run", "me", MINUTE)])
            assert isinstance(answer, Grant)
    with pytest.raises(InvalidArgument, match="table"):
        sqlite(tmp_path / "x.db", table='runs"; DROP TABLE x; --')


async def test_values_are_restored_or_a_warning_names_the_step(any_store: Any) -> None:
    """In every store, types that JSON lacks are restored, and a lost value is a warning."""
    value = {"when": NOW, "price": Decimal("1.10"), "tags": {1, 2}, "raw": b"\0\xff", "big": 2**80}

    async def body(step: Step) -> Any:
        seen = await step("typed", lambda: dict(value))
        lossy = await step("lossy", lambda: {"f": double})
        raise RuntimeError(str((seen == value, lossy)))

    first: Any = await durable.run({}, body, id="run", store=any_store)
    again: Any = await durable.run({}, body, id="run", store=any_store)
    assert str(first.error) == str(again.error)
    assert str(first.error).startswith("(True")
    warnings = (await any_store.load("run"))["warnings"]
    assert [(w["type"], w["stepId"]) for w in warnings] == [("lossy_value", "lossy")]


async def test_a_failure_without_a_cause_has_none_after_a_crash() -> None:
    """A missing cause is not restored as the string "undefined"."""
    store = MemoryStore()
    causes: list[Any] = []

    async def fail() -> Err[str]:
        return Err("NOT_FOUND")

    async def body(step: Step) -> None:
        try:
            await step("fail", fail)
        except StepFailed as failed:
            causes.append(failed.cause)
        raise RuntimeError("crash")

    for _ in range(2):
        await durable.run({}, body, id="run", store=store)
    assert causes == [None, None]


async def test_a_kept_run_has_its_status_output_and_history() -> None:
    store = MemoryStore()

    async def body(step: Step) -> int:
        return await step("double", double, 2)

    await durable.run({}, body, id="run", store=store, keep=True)
    stored: Any = await store.load("run")
    assert (stored["execution"]["status"], stored["execution"]["output"]) == ("completed", 4)
    assert list(stored["steps"]) == ["double"]


async def test_any_process_can_continue_a_run() -> None:
    """The name and the input are stored, so the process that resumes needs to know neither."""
    store = MemoryStore()

    @workflow("greet")
    async def greet(step: Step, name: str) -> str:
        return await step("greet", lambda: f"hello {name}")

    await Runtime(store).trigger(greet, "ana", run_id="run", wait=False)
    (run,) = await Runtime(store, workflows=[greet]).sweep()
    assert (run.id, run.output) == ("run", "hello ana")


async def test_list_matches_prefixes_exactly_and_pages_miss_no_run(any_store: Any) -> None:
    """There are no wildcards, case matters, and a limit of zero returns nothing."""
    for id in ("a%1", "a_1", "A_1", "ax1", *(f"p{n}" for n in range(12))):
        await any_store.save(id, snapshot())
    assert [line.id for line in await any_store.list(prefix="a_")] == ["a_1"]
    assert [line.id for line in await any_store.list(prefix="a%")] == ["a%1"]
    assert list(await any_store.list(limit=0)) == []
    newest = [line.id for line in await any_store.list(limit=2)]
    assert newest == ["p11", "p10"]
    page, observations = await any_store.list(prefix="p", limit=5), []
    while page:
        observations += [line.id for line in page]
        page = await any_store.list(prefix="p", limit=5, after=page[-1].cursor)
    assert observations == [f"p{n}" for n in reversed(range(12))]


async def test_times_are_in_utc(any_store: Any) -> None:
    """Whatever the time zone of the server."""
    await any_store.save("run", snapshot())
    (line,) = await any_store.list()
    assert line.updated_at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - line.updated_at) < timedelta(minutes=5)


async def test_steps_keep_their_order_and_keys_may_contain_any_character(any_store: Any) -> None:
    """Keys that look like numbers are not sorted, and NUL is allowed."""
    keys = ["b", "10", "9", "a\0b", "é", "a"]
    await any_store.save("run", {**snapshot(), "steps": {key: {"ok": True} for key in keys}})
    assert list((await any_store.load("run"))["steps"]) == keys


async def test_a_run_succeeds_even_if_deleting_it_fails() -> None:
    """The result is returned, and the leftover is logged."""
    store = FaultyStore(MemoryStore(), fail_at=2, verbs={"append"}, error=StoreError)

    async def body(step: Step) -> int:
        return await step("double", double, 2)

    assert await durable.run({}, body, id="run", store=store) == Ok(4)


async def test_one_id_on_two_stores_is_two_runs() -> None:
    """A running run is identified by store and id."""
    gate = asyncio.Event()

    async def body(step: Step) -> None:
        await step("gate", gate.wait)

    running = asyncio.ensure_future(durable.run({}, body, id="run", store=MemoryStore()))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(durable.run({}, body, id="run", store=MemoryStore()))
    await asyncio.sleep(0.01)
    gate.set()
    assert [(await task).ok for task in (running, other)] == [True, True]


async def test_a_queue_is_processed_in_order_and_each_run_once() -> None:
    """The runs of a dead worker are taken over."""
    store = MemoryStore()
    order: list[str] = []

    @workflow("job")
    async def job(step: Step) -> None:
        await step("work", lambda: order.append(step.run_id))

    data = Runtime(store)._start(job, None, "job", Plan()).new_run().snapshot
    at = datetime.now(UTC) - MINUTE
    for n in range(100):
        await store.enqueue([NewRun(f"job-{n:03}", "job", data, at + timedelta(milliseconds=n))])
    await store.claim("dead worker", timedelta(milliseconds=1), 5)
    runtimes = [Runtime(MemoryStore(shares=store), workflows=[job]) for _ in range(2)]
    async with Worker(runtimes[0], concurrency=3), Worker(runtimes[1], concurrency=3):
        started = time.monotonic()
        while len(order) < 100 and time.monotonic() - started < 10:
            await asyncio.sleep(0.01)
    assert sorted(order) == sorted(set(order))
    assert len(order) == 100
    assert max(order[:50]) < "job-080"


async def test_changed_code_is_refused_if_the_options_ask_for_it() -> None:
    """This holds for a changed definition and for unknown steps."""

    async def one(step: Step) -> None:
        await step("one", double, 1)

    async def two(step: Step) -> None:
        await step("two", double, 1)

    first = Workflow("w", {})
    await first.run(one)
    for option in ("on_definition_change", "on_unknown_steps"):
        options: Any = {"on_definition_change": "ignore", "on_unknown_steps": "ignore"}
        options[option] = "error"
        with pytest.raises(SnapshotMismatch):
            await Workflow("w", {}, snapshot=first.snapshot(), **options).run(two)


async def test_caches_evict_the_least_recently_used_and_keys_do_not_collide(tmp_path: Path) -> None:
    """Replacing an entry evicts no other."""
    record: Any = {"ok": True, "value": 1}
    memory = MemoryCache(max_size=2)
    for key in ("a", "b"):
        memory.set(key, record)
    memory.get("a")
    memory.set("a", record)
    memory.set("c", record)
    assert [memory.get(key) is not None for key in "abc"] == [True, False, True]
    files = FileCache(tmp_path)
    for key in ("a/b", "a:b", "a_b", "A_B"):
        await files.set(key, {"ok": True, "value": key})
    for key in ("a/b", "a:b", "a_b", "A_B"):
        stored_record: Any = await FileCache(tmp_path).get(key)
        assert stored_record["value"] == key


async def test_closing_keeps_the_callers_client_open_and_clearing_keeps_other_prefixes() -> None:
    kv = MemoryKeyValue()
    mine, theirs = keyvalue(kv, prefix="mine:"), keyvalue(kv, prefix="theirs:")
    await mine.save("run", snapshot())
    await theirs.save("run", snapshot())
    assert await durable.clear_state(mine) == 1
    await mine.close()
    assert await theirs.load("run") is not None


def test_merging_keeps_the_workflow_name_and_validation_checks_every_part() -> None:
    assert merge_snapshots(snapshot(a=1), {"steps": {}}).get("workflowName") == "w"
    assert not looks_like_workflow_snapshot({"formatVersion": 1, "steps": {}, "execution": None})
    wrong = {**snapshot(), "metadata": 7, "warnings": 7}
    errors = validate_snapshot(wrong).errors
    assert any("metadata" in error for error in errors)
    assert any("warnings" in error for error in errors)


async def test_listeners_are_awaited_and_notified_of_a_cancellation() -> None:
    """No event is pending when the run is over."""
    observations: list[str] = []

    async def listen(event: Any) -> None:
        await asyncio.sleep(0)
        observations.append(event.type)

    async def body(step: Step) -> None:
        await step("long", lambda: asyncio.sleep(60))

    options: Any = {"id": "run", "store": MemoryStore(), "on_event": listen}
    running = asyncio.ensure_future(durable.run({}, body, **options))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    await asyncio.sleep(0.01)
    assert observations[-1] == "workflow_cancelled"


async def test_sleeps_and_waits_survive_the_process() -> None:
    """A sleep is a time in the store, and another process continues the run."""
    clock = TestClock()
    store = MemoryStore(clock=clock)

    @workflow("nap")
    async def nap(step: Step) -> Any:
        await step.sleep("week", "7d")
        return await step.wait_for_event("go", "go")

    await Runtime(store, workflows=[nap], clock=clock).trigger(nap, run_id="run")
    await clock.advance("7d")
    later = Runtime(store, workflows=[nap], clock=clock)
    await later.sweep()
    signalled = await later.signal("run", "go", 5)
    assert signalled.run is not None
    assert signalled.run.output == 5


async def test_a_replayed_error_keeps_its_message_and_its_cause() -> None:
    store = MemoryStore()
    assert not await durable.has_state(store, "run")

    async def fail() -> None:
        try:
            raise KeyError("deep")
        except KeyError as error:
            raise RuntimeError("shallow") from error

    async def body(step: Step) -> None:
        await step("fail", fail)

    await durable.run({}, body, id="run", store=store)
    again: Any = await durable.run({}, body, id="run", store=store, replay_errors=True)
    assert (str(again.error), type(again.error.__cause__)) == ("shallow", KeyError)


async def test_a_recorded_step_does_not_open_its_resource_again() -> None:
    store = MemoryStore()
    opened: list[str] = []
    broken = True

    class Resource:
        async def __aenter__(self) -> str:
            opened.append("opened")
            return "resource"

        async def __aexit__(self, *_: object) -> None:
            opened.append("closed")

    async def use() -> str:
        async with Resource() as resource:
            return resource

    async def body(step: Step) -> str:
        used = await step("use", use)
        if broken:
            raise RuntimeError("crash")
        return used

    await durable.run({}, body, id="run", store=store)
    broken = False
    assert await durable.run({}, body, id="run", store=store) == Ok("resource")
    assert opened == ["opened", "closed"]
