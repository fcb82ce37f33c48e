"""Clients that crash, race and wait: a run is started once, never lost, and seen by all."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Client, Run, RunConflict, Runtime, Signal, Step, workflow
from perdure.errors import Cancelled, RunNotFound, StoreError
from perdure.runtime.definition import Definition
from perdure.snapshot import generation_of
from perdure.store import Delivery, NewMessage, Store
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import sqlite
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore, How
from tests.durability.processes import Job, job, worker_process

Verb = Callable[[Client], Awaitable[Run]]


class Payments:
    """A workflow that charges once, and what it has charged."""

    def __init__(self) -> None:
        self.charged: Counter[int] = Counter()
        self.refused: set[int] = set()

    @property
    def workflow(self) -> Definition[int, int]:
        @workflow("pay")
        async def pay(step: Step, n: int) -> int:
            return await step("charge", self.charge, n)

        return pay

    async def charge(self, n: int) -> int:
        if n in self.refused:
            raise ValueError(f"refused: {n}")
        self.charged[n] += 1
        return n


@workflow("listen")
async def listen(step: Step) -> Any:
    return await step.wait_for_event("event", "told", timeout="1h")


async def restart(client: Client) -> Run:
    return await client.trigger("pay", 2, run_id="run", if_exists="restart_if_over")


async def crashes(verb: Verb, how: How, prepare: Callable[[Runtime, Payments], Any]) -> int:
    """Crash a client at each call of a verb; another repeats it, and a third executes the run.

    Return how many calls the verb makes.
    """
    for call in range(1, 100):
        clock, payments = TestClock(), Payments()
        store = MemoryStore(clock=clock)
        runtime = Runtime(store, workflows=[payments.workflow], clock=clock)
        await prepare(runtime, payments)
        mortal = MemoryStore(clock=clock, shares=store)
        dying = FaultyStore(mortal, fail_at=call, how=how, error=StoreError, stays_down=True)
        with suppress(StoreError):
            await verb(Client(dying, clock=clock))
        # What the dead client had leased is free again.
        await clock.advance("31s")
        await verb(Client(MemoryStore(clock=clock, shares=store), clock=clock))
        await runtime.sweep()
        assert (await runtime.result("run", timeout=0), payments.charged[2]) == (2, 1)
        if not dying.failed:
            return call
    raise AssertionError("the verb never ends")


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_trigger_that_crashes_anywhere_can_be_repeated(how: How) -> None:
    async def nothing(runtime: Runtime, payments: Payments) -> None: ...

    assert await crashes(lambda client: client.trigger("pay", 2, run_id="run"), how, nothing) == 2


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_restart_that_crashes_anywhere_can_be_repeated(how: How) -> None:
    async def finish_first(runtime: Runtime, payments: Payments) -> None:
        assert (await runtime.trigger("pay", 1, run_id="run")).status == "completed"

    assert await crashes(restart, how, finish_first) > 4


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_retry_that_crashes_anywhere_can_be_repeated(how: How) -> None:
    async def fail_first(runtime: Runtime, payments: Payments) -> None:
        payments.refused.add(2)
        assert (await runtime.trigger("pay", 2, run_id="run")).status == "failed"
        payments.refused.clear()

    assert await crashes(lambda client: client.retry("run"), how, fail_first) > 3


@pytest.mark.parametrize("run_id", ["a'b\"c", "a/b\\c", "🐍 %s {} \n", "é" * 512])
async def test_ids_may_contain_anything(run_id: str, tmp_path: Path) -> None:
    payments = Payments()
    async with sqlite(tmp_path / "runs.db") as store:
        runtime = Runtime(store, workflows=[payments.workflow])
        await Client(store).trigger("pay", 2, run_id=run_id)
        watched = [run.status async for run in Client(store).watch(run_id) if await runtime.sweep()]
        assert await Client(store).result(run_id) == 2
    assert watched[-1] == "queued"


async def both(store: Store, other: Store, verb: Verb) -> list[Any]:
    """Call a verb from two processes at once; return its answers or errors."""
    clients = [Client(store), Client(other)]
    return await asyncio.gather(*map(verb, clients), return_exceptions=True)


@pytest.fixture(params=["memory", "sqlite"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Yield one database as two processes open it."""
    if request.param == "memory":
        store = MemoryStore()
        yield store, MemoryStore(shares=store)
        return
    async with sqlite(tmp_path / "runs.db") as first, sqlite(tmp_path / "runs.db") as second:
        yield first, second


async def test_two_processes_that_trigger_one_id_make_one_run(pair: tuple[Store, Store]) -> None:
    first, second = await both(*pair, lambda client: client.trigger("pay", 2, run_id="run"))
    assert (first.id, second.id) == ("run", "run")
    assert first.created_at == second.created_at


async def test_two_processes_with_two_payloads_conflict(pair: tuple[Store, Store]) -> None:
    payloads = iter([1, 2])
    answers = await both(*pair, lambda client: client.trigger("pay", next(payloads), run_id="run"))
    assert sum(isinstance(answer, RunConflict) for answer in answers) == 1


async def test_two_processes_that_restart_a_run_restart_it_once(pair: tuple[Store, Store]) -> None:
    payments, (store, _) = Payments(), pair
    runtime = Runtime(store, workflows=[payments.workflow])
    await runtime.trigger("pay", 1, run_id="run")
    answers = await both(*pair, restart)
    await runtime.sweep()
    assert [answer.payload for answer in answers] == [2, 2]
    stored = await store.load("run")
    assert stored is not None
    assert (generation_of(stored.get("metadata")), payments.charged[2]) == (2, 1)


async def test_a_restart_with_another_payload_does_not_replace_a_run(
    store: MemoryStore, clock: TestClock
) -> None:
    """Only a run that is over starts again."""
    client = Client(store, clock=clock)
    await client.trigger("pay", 1, run_id="run")
    with pytest.raises(RunConflict, match="its payload is 1, not 2"):
        await restart(client)


async def test_a_restart_keeps_the_inbox(store: MemoryStore, clock: TestClock) -> None:
    """But a request to cancel that came before it is dropped."""
    runtime = Runtime(store, workflows=[listen], clock=clock)
    await runtime.trigger(listen, run_id="run")
    request = b'{"id":"1","verb":"cancel"}'
    await store.send([NewMessage("run", "other", b"1"), NewMessage("run", "~operator", request)])
    await runtime.cancel("run")
    await runtime.trigger(listen, run_id="run", if_exists="restart_if_over")
    assert [message.name for message in await store.inbox("run")] == ["other"]
    stored_run = (await runtime.signal("run", "told", 1)).run
    assert stored_run is not None
    assert stored_run.output == 1


async def test_a_runtime_drives_what_it_restarts(store: MemoryStore, clock: TestClock) -> None:
    payments = Payments()
    runtime = Runtime(store, workflows=[payments.workflow], clock=clock)
    await runtime.trigger("pay", 1, run_id="run")
    again = await runtime.trigger("pay", 2, run_id="run", if_exists="restart_if_over")
    assert (again.output, payments.charged) == (2, {1: 1, 2: 1})


async def test_a_retry_drops_a_deadline_that_has_passed(
    store: MemoryStore, clock: TestClock
) -> None:
    """One that counts from the first claim is kept."""
    payments = Payments()
    payments.refused.add(1)
    runtime = Runtime(store, workflows=[payments.workflow], clock=clock)
    for run_id, deadline in (("passed", clock.now()), ("relative", "1h")):
        await runtime.trigger("pay", 1, run_id=run_id, deadline=deadline)
        await Client(store, clock=clock).retry(run_id)
    passed, relative = await store.load("passed"), await store.load("relative")
    assert passed is not None
    assert relative is not None
    assert "deadline" not in (passed.get("metadata") or {})
    assert (relative.get("metadata") or {})["deadlineAfter"] == 3600.0


async def test_a_paused_run_is_resumed_by_a_worker(store: MemoryStore, clock: TestClock) -> None:
    """`resume` of a client writes one rest and calls nothing."""
    runtime = Runtime(store, workflows=[listen], clock=clock)
    run = await runtime.trigger(listen)
    resumed = await Client(store, clock=clock).resume(run.id)
    assert (resumed.status, len(resumed.pending)) == ("queued", 1)
    (swept,) = await runtime.sweep()
    assert (swept.status, swept.pending) == ("waiting", run.pending)


async def test_a_time_that_has_passed_does_not_overtake(
    store: MemoryStore, clock: TestClock
) -> None:
    client = Client(store, clock=clock)
    await client.trigger("pay", 1, run_id="first")
    await clock.advance("1s")
    await client.trigger("pay", 2, run_id="second", at=clock.now() - timedelta(days=1))
    assert [run.id for run in await store.due(clock.now(), 2)] == ["first", "second"]


async def test_a_trigger_is_one_store_call(store: MemoryStore) -> None:
    """The run that is returned is known from what was written."""
    counted = FaultyStore(store)
    run = await Client(counted).trigger("pay", 2, run_id="run", tags={"a": "b"})
    assert [call.verb for call in counted.calls] == ["enqueue"]
    assert run == await Client(store).get_run("run")


async def test_many_runs_and_signals_are_written_in_batches(store: MemoryStore) -> None:
    counted = FaultyStore(store)
    client = Client(counted)
    runs = await client.trigger_many("pay", range(1200))
    results = await client.signal_many(Signal(run.id, "hello") for run in runs)
    assert [call.verb for call in counted.calls] == ["enqueue"] * 3 + ["send"] * 3
    assert [run.payload for run in runs] == list(range(1200))
    assert {result.delivery for result in results} == {Delivery.DELIVERED}


async def test_only_existing_runs_are_read(store: MemoryStore) -> None:
    client = Client(counted := FaultyStore(store))
    await client.trigger("pay", 1, run_id="b")
    await client.trigger_many("pay", [0, 1, 2], run_ids=["a", "b", "c"])
    assert {call.ids for call in counted.calls if call.verb in ("load", "summaries")} == {("b",)}


async def test_a_thousand_waiting_callers_share_few_store_calls(
    store: MemoryStore, clock: TestClock
) -> None:
    """One call asks for all runs; each run is loaded once, when it is over."""
    payments = Payments()
    counted = FaultyStore(store)
    client = Client(counted, clock=clock)
    runs = await client.trigger_many("pay", range(100))
    calls = asyncio.gather(*(client.result(run) for run in runs for _ in range(10)))
    await clock.advance(0)
    shared = MemoryStore(clock=clock, shares=store)
    await Runtime(shared, workflows=[payments.workflow], clock=clock).sweep()
    await clock.advance("1s")
    assert sum(await calls) == 10 * sum(range(100))
    verbs = Counter(call.verb for call in counted.calls)
    assert verbs["load"] == 100
    assert verbs["summaries"] < 10


async def test_pauses_between_polls_grow_to_a_second(store: MemoryStore, clock: TestClock) -> None:
    counted = FaultyStore(store)
    client = Client(counted, clock=clock)
    run = await client.trigger("pay", 1)
    waiting = asyncio.ensure_future(client.result(run, timeout="1h"))
    await clock.advance("10s")
    early = len(counted.calls)
    await clock.advance("100s")
    assert 20 < early < 100
    assert 99 <= len(counted.calls) - early <= 102
    waiting.cancel()


async def test_a_new_caller_does_not_make_others_poll_sooner(
    store: MemoryStore, clock: TestClock
) -> None:
    """Each run has its own pauses; one that is due soon joins a look at another."""
    counted = FaultyStore(store)
    client = Client(counted, clock=clock)
    await client.trigger_many("pay", [1, 2], run_ids=["old", "new"])
    waiting = [asyncio.ensure_future(client.result("old"))]
    await clock.advance("100s")
    waiting.append(asyncio.ensure_future(client.result("new")))
    counted.calls.clear()
    await clock.advance("900ms")
    looks = Counter(id for call in counted.calls for id in call.ids)
    assert looks["old"] <= 2 < 10 < looks["new"]
    for each in waiting:
        each.cancel()


async def test_a_run_that_ends_here_is_seen_at_once(store: MemoryStore, clock: TestClock) -> None:
    """No time passes on this clock: its end is announced in this process."""
    payments = Payments()
    runtime = Runtime(store, workflows=[payments.workflow], clock=clock)
    run = await runtime.trigger("pay", 2, wait=False)
    waiting = asyncio.ensure_future(Client(store, clock=clock).result(run))
    await clock.advance(0)
    await runtime.sweep()
    assert await waiting == 2


async def test_a_cancelled_caller_harms_no_other(store: MemoryStore, clock: TestClock) -> None:
    client = Client(store, clock=clock)
    run = await client.trigger("listen", run_id="run")
    first, second = (asyncio.ensure_future(client.result(run)) for _ in range(2))
    await clock.advance(0)
    first.cancel()
    await client.cancel("run", reason="enough")
    with pytest.raises(Cancelled, match="enough"):
        await second


async def test_nothing_is_left_when_no_caller_waits(store: MemoryStore, clock: TestClock) -> None:
    """No task, and nothing that sleeps on the clock."""
    client = Client(store, clock=clock)
    run = await client.trigger("pay", 1)
    with pytest.raises(TimeoutError):
        await client.result(run, timeout=0)
    async for _ in client.watch(run):
        break
    await clock.advance(0)
    assert (clock.sleepers, len(asyncio.all_tasks())) == (0, 1)


@pytest.mark.parametrize("verb", ["summaries", "load"])
async def test_a_short_outage_is_waited_out(
    store: MemoryStore, clock: TestClock, verb: str
) -> None:
    payments = Payments()
    runtime = Runtime(store, workflows=[payments.workflow], clock=clock)
    run = await runtime.trigger("pay", 2)
    shaky = FaultyStore(store, fail_at=1, verbs={verb})
    waiting = asyncio.ensure_future(Client(shaky, clock=clock).result(run.id))
    await clock.advance("1s")
    assert (await waiting, shaky.failed) == (2, True)


async def test_a_broken_store_is_an_error(store: MemoryStore, clock: TestClock) -> None:
    broken = FaultyStore(store, fail_at=1, verbs={"summaries"}, error=StoreError)
    with pytest.raises(StoreError, match="planned failure"):
        await Client(broken, clock=clock).result("run")


async def test_waiting_for_a_run_that_is_deleted_raises(
    store: MemoryStore, clock: TestClock
) -> None:
    client = Client(store, clock=clock)
    run = await client.trigger("pay", 1)
    waiting = asyncio.ensure_future(client.result(run))
    await clock.advance(0)
    await client.delete(run.id)
    await clock.advance("1s")
    with pytest.raises(RunNotFound):
        await waiting


async def test_a_store_without_search_is_polled(store: MemoryStore, clock: TestClock) -> None:
    store.capabilities = replace(store.capabilities, search=False)
    payments = Payments()
    client = Client(store, clock=clock)
    run = await client.trigger("pay", 2)
    waiting = asyncio.ensure_future(client.result(run))
    await clock.advance(0)
    await Runtime(store, workflows=[payments.workflow], clock=clock).sweep()
    assert await waiting == 2


async def test_a_watcher_sees_reports_of_a_running_step(
    store: MemoryStore, clock: TestClock
) -> None:
    client = Client(store, clock=clock)
    run = await client.trigger("pay", 1)
    await store.claim("worker", timedelta(minutes=1), 1)
    watch = client.watch(run)
    assert (await anext(watch)).progress is None
    change = asyncio.ensure_future(anext(watch))
    report = '{"progress": 0.5, "note": "half", "at": "2030-01-01T00:00:01.000Z"}'
    await store.documents.set(f"report:{run.id}", report)
    await clock.advance("1s")
    assert (await change).progress == 0.5
    await watch.aclose()


async def test_a_report_from_before_a_restart_is_ignored(
    store: MemoryStore, clock: TestClock
) -> None:
    await Client(store, clock=clock).trigger("pay", 1, run_id="run")
    await store.claim("worker", timedelta(minutes=1), 1)
    report = '{"progress": 0.5, "at": "2029-12-31T23:59:59.000Z"}'
    await store.documents.set("report:run", report)
    run = await Client(store, clock=clock).get_run("run")
    assert run is not None
    assert run.progress is None


class Slow(FaultyStore):
    """A store whose answers to `summaries` arrive when the test says so."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.gate.set()

    async def summaries(self, ids: Sequence[str], /) -> Any:
        answer = await self._pass("summaries", ids)
        await self.gate.wait()
        return answer


async def test_a_run_that_ends_during_a_poll_is_seen_at_once(
    store: MemoryStore, clock: TestClock
) -> None:
    """The answer that was on its way is older than the end of the run."""
    payments = Payments()
    slow = Slow(store)
    runtime = Runtime(slow, workflows=[payments.workflow], clock=clock)
    run = await runtime.trigger("pay", 2, wait=False)
    waiting = asyncio.ensure_future(runtime.result(run))
    await clock.advance("5s")
    slow.gate.clear()
    await clock.advance("1s")
    await runtime.sweep()
    slow.gate.set()
    assert await waiting == 2


async def test_a_run_of_another_process_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    with worker_process(url) as process:
        async with Client(url) as client:
            run = await client.trigger(job, Job(str(tmp_path / "log"), 0.1))
            assert await client.result(run, timeout="30s") == process.pid


async def test_two_event_loops_wait_for_one_run(tmp_path: Path) -> None:
    """Each has its own store and its own poller."""
    url = f"sqlite:///{tmp_path}/runs.db"

    async def wait_for(run_id: str) -> Any:
        async with Client(url) as client:
            return await client.result(run_id, timeout="30s")

    async with Client(url) as client:
        run = await client.trigger(job, Job(str(tmp_path / "log"), 0.1))
        threads = [asyncio.to_thread(asyncio.run, wait_for(run.id)) for _ in range(2)]
        with worker_process(url) as process:
            assert await asyncio.gather(*threads) == [process.pid] * 2
