"""A worker gets a waiting run with the message that wakes it, if it has a free slot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from perdure import Queue, Runtime, Step, Worker, workflow
from perdure.durable.handoff import Slots
from perdure.errors import StoreUnavailable
from perdure.runtime.definition import Definition
from perdure.stores.memory import MemoryStore
from perdure.testing.clock import TestClock
from perdure.testing.faults import FaultyStore
from perdure.worker.claims import Claims

TTL = timedelta(seconds=30)

Make = Callable[..., Runtime]


@workflow("waits")
async def waits(step: Step) -> Any:
    return await step.wait_for_event("go", "go")


@pytest.fixture
def calls(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture
def make(calls: FaultyStore, clock: TestClock) -> Make:
    """Return a function that creates a runtime on a store that lists its calls."""

    def make(*workflows: Definition[Any, Any], **options: Any) -> Runtime:
        on = options.pop("on", calls)
        defaults: dict[str, Any] = {"clock": clock, "random": Random(7), "lease_ttl": TTL}
        return Runtime(on, workflows=workflows or [waits], **{**defaults, **options})

    return make


@asynccontextmanager
async def working(runtime: Runtime, **options: Any) -> AsyncIterator[Worker]:
    """Start a worker that polls rarely, and wait until it has claimed once."""
    async with Worker(runtime, poll="1h", **options) as worker:
        await settled(runtime)
        yield worker


async def settled(runtime: Runtime) -> None:
    """Let everything happen that does not need time to pass."""
    await runtime.clock.advance(0)  # type: ignore[attr-defined]


async def waiting_runs(runtime: Runtime, *ids: str, of: Definition[Any, Any] = waits) -> None:
    """Start runs, and leave them when they wait."""
    for id in ids:
        run = await runtime.trigger(of, run_id=id)
        assert run.status == "waiting"


async def status_of(runtime: Runtime, id: str) -> str:
    """Return the status of a run that exists."""
    run = await runtime.get_run(id)
    assert run is not None
    return run.status


def verbs(calls: FaultyStore) -> list[str]:
    """Return the names of the calls that read or write runs."""
    names = [call.verb for call in calls.calls]
    calls.calls.clear()
    return names


async def test_a_signalled_run_continues_after_one_write(make: Make, calls: FaultyStore) -> None:
    """The message and the lease are one write: nothing is claimed before the next step."""
    runtime = make()
    await waiting_runs(runtime, "run")
    async with working(runtime):
        verbs(calls)
        await runtime.signal("run", "go", {"n": 1}, wait=False)
        await settled(runtime)
        assert verbs(calls) == ["send_and_claim", "append", "append"]
        assert (await runtime.result("run")) == {"n": 1}


async def test_runs_that_are_signalled_together_share_the_writes(
    make: Make, calls: FaultyStore
) -> None:
    """The first message is sent alone, the others that arrive during its write together."""
    runtime = make()
    ids = [f"run-{n}" for n in range(10)]
    await waiting_runs(runtime, *ids)
    async with working(runtime):
        verbs(calls)
        await asyncio.gather(*(runtime.signal(id, "go", wait=False) for id in ids))
        await settled(runtime)
        assert verbs(calls).count("send_and_claim") == 2
        assert [await status_of(runtime, id) for id in ids] == ["completed"] * 10


async def test_a_worker_gets_no_more_runs_than_it_has_slots(make: Make) -> None:
    """The other runs become due, and it claims them when slots are free."""
    most = inside = 0
    gate = asyncio.Event()

    async def pass_through() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1

    @workflow("slow")
    async def slow(step: Step) -> None:
        await step.wait_for_event("go", "go")
        await step("pass", pass_through)

    runtime = make(slow)
    ids = [f"run-{n}" for n in range(9)]
    await waiting_runs(runtime, *ids, of=slow)
    async with working(runtime, concurrency=2) as worker:
        await asyncio.gather(*(runtime.signal(id, "go", wait=False) for id in ids))
        await settled(runtime)
        assert (worker.running, most) == (2, 2)
        gate.set()
        await settled(runtime)
        assert most == 2
        assert [await status_of(runtime, id) for id in ids] == ["completed"] * 9


async def test_a_cancelled_signal_leaves_no_run_without_a_process(
    make: Make, store: MemoryStore
) -> None:
    """The write is finished, and the worker executes the run whose lease it got."""

    class SlowStore(FaultyStore):
        async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
            if verb == "send_and_claim":
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            return await super()._pass(verb, *arguments, **options)

    runtime = make(on=SlowStore(store))
    await waiting_runs(runtime, "run")
    async with working(runtime):
        signal = asyncio.ensure_future(runtime.signal("run", "go", wait=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        signal.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await signal
        # `asyncio.timeout` knows no subclasses of it.
        assert type(cancelled.value) is asyncio.CancelledError
        await settled(runtime)
        assert await status_of(runtime, "run") == "completed"


async def test_a_failed_signal_frees_the_slots(make: Make, store: MemoryStore) -> None:
    """The error is raised to the sender, and the worker can execute as many runs as before."""
    faulty = FaultyStore(store, fail_at=1, verbs={"send_and_claim"})
    runtime = make(on=faulty)
    await waiting_runs(runtime, "run")
    async with working(runtime, concurrency=1):
        with pytest.raises(StoreUnavailable):
            await runtime.signal("run", "go", wait=False)
        await runtime.signal("run", "go", wait=False)
        await settled(runtime)
        assert await status_of(runtime, "run") == "completed"


async def test_a_run_whose_lease_was_lost_with_the_reply_continues_when_it_expires(
    make: Make, store: MemoryStore, clock: TestClock
) -> None:
    """As after a claim whose reply was lost: the message is there, and it is not doubled."""
    faulty = FaultyStore(store, fail_at=1, how="after", verbs={"send_and_claim"})
    runtime = make(on=faulty)
    await waiting_runs(runtime, "run")
    async with Worker(runtime, poll=1):
        await settled(runtime)
        with pytest.raises(StoreUnavailable):
            await runtime.signal("run", "go", 1, dedup_id="x", wait=False)
        sent = await runtime.signal("run", "go", 1, dedup_id="x", wait=False)
        assert sent.delivery.value == "duplicate"
        await clock.advance(TTL + timedelta(seconds=2))
        assert (await runtime.result("run")) == 1


async def test_a_worker_that_drains_leaves_the_run_to_others(
    make: Make, store: MemoryStore
) -> None:
    """A lease that arrives while the worker stops is released with the message in the inbox."""
    gate = asyncio.Event()

    class SlowStore(FaultyStore):
        async def _pass(self, verb: str, *arguments: Any, **options: Any) -> Any:
            result = await super()._pass(verb, *arguments, **options)
            if verb == "send_and_claim":
                await gate.wait()
            return result

    runtime = make(on=SlowStore(store))
    await waiting_runs(runtime, "run")
    async with working(runtime) as worker:
        signal = asyncio.ensure_future(runtime.signal("run", "go", wait=False))
        await settled(runtime)
        await worker.drain()
        gate.set()
        assert (await signal).delivery.value == "delivered"
    assert (await store.summaries(["run"]))[0].owner is None  # type: ignore[union-attr]
    other = make(on=store)
    async with working(other):
        assert await status_of(other, "run") == "completed"


async def test_only_workflows_that_the_worker_may_execute_are_handed_off(make: Make) -> None:
    """Not those in a queue, of a paused workflow, or of a worker for other queues."""
    emails = Queue("emails", concurrency=1)

    @workflow("in-queue", queue=emails)
    async def in_queue(step: Step) -> None:
        """Do nothing."""

    runtime = make(waits, in_queue)

    def supported(*paused: str, queues: list[str] | None = None) -> set[str]:
        slots: Slots = Claims(runtime, "me", queues).slots(1, paused)
        return {each.workflow for each in slots.supports if not each.workflow.startswith("~")}

    assert supported() == {"waits"}
    assert supported("waits") == set()
    assert supported(queues=["emails"]) == set()
    assert supported(queues=["", "emails"]) == {"waits"}


async def test_a_caller_that_continues_the_run_itself_gets_it(
    make: Make, calls: FaultyStore
) -> None:
    """`signal(wait=True)` continues the run in the caller's task, and hands nothing off."""
    runtime = make()
    await waiting_runs(runtime, "run")
    async with working(runtime):
        verbs(calls)
        sent = await runtime.signal("run", "go", 7)
        assert sent.run is not None
        assert sent.run.output == 7
        assert "send_and_claim" not in verbs(calls)


async def test_a_run_does_not_see_the_context_of_its_sender(make: Make) -> None:
    """It is executed in a context of the worker, as after a claim."""
    request: ContextVar[str] = ContextVar("request", default="none")

    @workflow("reads-context")
    async def reads_context(step: Step) -> str:
        await step.wait_for_event("go", "go")
        return request.get()

    runtime = make(reads_context)
    await waiting_runs(runtime, "run", of=reads_context)
    request.set("of the worker")
    async with working(runtime):
        request.set("of the sender")
        await runtime.signal("run", "go", wait=False)
        await settled(runtime)
        assert await runtime.result("run") == "of the worker"


async def test_a_parent_is_handed_off_with_the_end_of_its_child(
    make: Make, calls: FaultyStore
) -> None:
    """The message that reports the end is also the lease of the parent."""

    @workflow("child")
    async def child(step: Step) -> int:
        await step.wait_for_event("go", "go")
        return 5

    @workflow("parent")
    async def parent(step: Step) -> int:
        return await step.call("child", child) + 1

    runtime = make(parent, child)
    async with working(runtime):
        await runtime.trigger(parent, run_id="p", wait=False)
        await settled(runtime)
        assert await status_of(runtime, "p") == "waiting"
        run = await runtime.get_run("p")
        assert run is not None
        [child_run] = run.children
        verbs(calls)
        await runtime.signal(child_run, "go", wait=False)
        await settled(runtime)
        assert await runtime.result("p") == 6
        assert verbs(calls).count("send_and_claim") == 2
