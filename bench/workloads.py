"""The workloads of perdure, each a coroutine that returns a value."""

import asyncio
import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias, cast

from bench.timing import now, timed
from perdure import Retry, Runtime, Step, Worker, Workflow, codec, durable, workflow
from perdure.clock import SystemClock
from perdure.runtime.definition import Definition
from perdure.snapshot import new_snapshot
from perdure.store import (
    Entry,
    NewRun,
    ScheduleStore,
    Store,
    Verdict,
    require_journal,
    require_schedule,
)

Body: TypeAlias = Callable[[int], Callable[[Step], Awaitable[None]]]

LAST_ROUNDS = 1000

VALUE = {"id": "1", "name": "Ann", "padding": "x" * 60}


async def fetch(id: str) -> dict[str, str]:
    """Return the value of a step: about 100 bytes."""
    return VALUE


fetch_as_call = durable.step(name="fetch")(fetch)


def calls(count: int) -> Callable[[Step], Awaitable[None]]:
    """Return a workflow function with this number of consecutive steps, as plain calls."""

    async def sequence(_: Step) -> None:
        for _ in range(count):
            await fetch_as_call("1")

    return sequence


def steps(count: int) -> Callable[[Step], Awaitable[None]]:
    """Return a workflow function with this number of consecutive steps."""

    async def sequence(step: Step) -> None:
        for _ in range(count):
            await step("fetch", fetch, "1")

    return sequence


async def one_run(
    store: Store, id: str, count: int, *, keep: bool = False, body: Body = steps
) -> float:
    """Return the seconds per step, for consecutive steps (A, D)."""
    began = now()
    (await durable.run({}, body(count), id=id, store=store, keep=keep)).unwrap()
    return (now() - began) / count


async def many_runs(store: Store, name: str, runs: int) -> float:
    """Return steps per second, for concurrent runs of ten steps (B)."""
    runs_at_once = asyncio.gather(*(one_run(store, f"{name}-{n}", 10) for n in range(runs)))
    return runs * 10 / await timed(runs_at_once)


async def ends(store: Store, name: str, runs: int) -> float:
    """Return the seconds of the start and the end of a run, for concurrent runs (D)."""
    runs_at_once = (durable.run({}, steps(0), id=f"{name}-{n}", store=store) for n in range(runs))
    return await timed(asyncio.gather(*runs_at_once)) / runs


async def resume(store: Store, id: str, count: int) -> float:
    """Return the seconds per recorded step, from the call until the last record is replayed (C)."""
    ended = 0.0

    async def stopping(step: Step) -> None:
        await steps(count)(step)
        raise asyncio.CancelledError

    async def again(step: Step) -> None:
        nonlocal ended
        await steps(count)(step)
        ended = now()

    task = asyncio.ensure_future(durable.run({}, stopping, id=id, store=store))
    await asyncio.wait([task])
    began = now()
    (await durable.run({}, again, id=id, store=store)).unwrap()
    return (ended - began) / count


async def first_step(store: Store, id: str) -> float:
    """Return the seconds from the call of a run to the first line of its first step."""
    reached = 0.0

    async def reach() -> None:
        nonlocal reached
        reached = now()

    async def begin(step: Step) -> None:
        await step("reach", reach)

    began = now()
    (await durable.run({}, begin, id=id, store=store)).unwrap()
    return reached - began


@workflow("bench-due")
async def due_workflow(step: Step) -> None:
    """Execute one step; it is due when the measurement begins."""
    await step("fetch", fetch, "1")


@workflow("bench-waiting")
async def waiting_workflow(step: Step) -> None:
    """Execute one step after an event."""
    await step.wait_for_event("go", "go")
    await step("fetch", fetch, "1")


@workflow("bench-sleeping")
async def sleeping_workflow(step: Step) -> None:
    """Sleep for longer than the measurement takes."""
    await step.sleep("long", "30d")


async def fail() -> None:
    """Fail like a service that is down."""
    raise ConnectionError("down")


@workflow("bench-retrying")
async def retrying_workflow(step: Step) -> None:
    """Wait for the second attempt for longer than the measurement takes."""
    await step("call", fail, retry=Retry(10, delay="10m", max_delay="10m"))


async def enqueue(
    store: ScheduleStore, workflow: str, ids: Sequence[str], **metadata: object
) -> None:
    """Create runs that are due at once, in one write."""
    now = SystemClock().now()
    new = [
        NewRun(
            id,
            workflow,
            codec.dumps(new_snapshot(workflow, now=now, metadata={"version": 1, **metadata})),
        )
        for id in ids
    ]
    await store.enqueue(new)


async def finished(worker: Worker, runs: int) -> None:
    """Wait until the worker has finished or suspended this number of runs."""
    while worker.counters.finished < runs:
        await asyncio.sleep(0.002)


async def due_runs(store: Store, name: str, runs: int) -> float:
    """Return runs per second of one worker, for runs that are all due (E)."""
    ids = [f"{name}-{n}" for n in range(runs)]
    await enqueue(require_schedule(store), due_workflow.name, ids)
    runtime = Runtime(store, workflows=[due_workflow])
    began = now()
    async with Worker(runtime, concurrency=200, poll=0.05) as worker:
        await finished(worker, runs)
        return runs / (now() - began)


async def signalled_runs(store: Store, name: str, runs: int) -> float:
    """Return runs per second of one worker, for waiting runs that are all signalled (E)."""
    ids = [f"{name}-{n}" for n in range(runs)]
    await enqueue(require_schedule(store), waiting_workflow.name, ids)
    runtime = Runtime(store, workflows=[waiting_workflow])
    async with Worker(runtime, concurrency=200, poll=0.05) as worker:
        await finished(worker, runs)
        began = now()
        await asyncio.gather(*(runtime.signal(id, "go", wait=False) for id in ids))
        await finished(worker, 2 * runs)
        return runs / (now() - began)


async def reaction(store: Store, name: str, times: int = 7) -> float:
    """Return the seconds from a signal to the first line of the next step (F).

    A worker of this process continues the run, and does not find it by polling in time. Each signal
    is sent after the previous run was settled, so three commits are measured: the message, the
    claim, and the record of the wait.
    """
    reached: asyncio.Queue[float] = asyncio.Queue()

    async def reach() -> None:
        reached.put_nowait(now())

    @workflow("bench-reacting")
    async def reacting(step: Step) -> None:
        await step.wait_for_event("go", "go")
        await step("reach", reach)

    runtime = Runtime(store, workflows=[reacting])
    ids = [f"{name}-{n}" for n in range(times)]
    await enqueue(require_schedule(store), reacting.name, ids)
    took = []
    async with Worker(runtime, poll=5) as worker:
        await finished(worker, times)
        for done, id in enumerate(ids, start=times + 1):
            began = now()
            await runtime.signal(id, "go", wait=False)
            took.append(await reached.get() - began)
            await finished(worker, done)
    return median(took)


class Counted:
    """A store that counts the bytes passed to it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, entries: Sequence[Entry]) -> Sequence[Verdict]:
        """Count the bytes, and forward the call."""
        self.bytes += sum(len(entry.data) for entry in entries)
        return await require_journal(self._store).append(entries)


async def bytes_handed(store: Store, id: str, count: int) -> float:
    """Return the bytes per step that are passed to the store, including the last write (F)."""
    counted = Counted(store)
    await one_run(cast(Store, counted), id, count, keep=True)
    return counted.bytes / count


async def suspended_bytes(
    store: Store, name: str, runs: int, definition: Definition[None, None]
) -> float:
    """Return the memory that a worker process uses for each suspended run (F)."""
    schedule = require_schedule(store)
    runtime = Runtime(store, workflows=[definition])
    tracemalloc.start()
    try:
        async with Worker(runtime, concurrency=200, poll=0.05) as worker:
            # The first runs fill caches that do not grow later.
            before = 0
            for ids in (range(1000), range(1000, 1000 + runs)):
                before = await _held()
                await enqueue(schedule, definition.name, [f"{name}-{n}" for n in ids])
                await finished(worker, ids.stop)
            return max(0, await _held() - before) / runs
    finally:
        tracemalloc.stop()


async def _held() -> int:
    # Wait for the last tasks to end.
    await asyncio.sleep(0.2)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@workflow("bench-loop")
async def loop(step: Step, rounds_left: int) -> None:
    """Start over this many times."""
    await step("fetch", fetch, "1")
    rounds[step.run_id].append(now())
    if rounds_left > 1:
        await step.continue_as_new(rounds_left - 1)


rounds: defaultdict[str, list[float]] = defaultdict(list)


async def last_rounds(store: Store, id: str, count: int) -> float:
    """Return the seconds per round at the end of a loop of this many rounds (L)."""
    await Runtime(store, workflows=[loop]).trigger(loop, count, run_id=id)
    times = rounds.pop(id)[-LAST_ROUNDS:]
    return median(later - earlier for earlier, later in pairwise(times))


async def plain_step(count: int) -> float:
    """Return the seconds of a step without a store, minus those of its function."""
    took = await timed(Workflow("bench").run(steps(count)))
    began = now()
    for _ in range(count):
        await fetch("1")
    return (took - (now() - began)) / count


async def plain_replay(count: int) -> float:
    """Return the seconds of a replayed step without a store."""
    wf = Workflow("bench")
    await wf.run(steps(count))
    again = Workflow("bench", snapshot=wf.snapshot())
    return await timed(again.run(steps(count))) / count
