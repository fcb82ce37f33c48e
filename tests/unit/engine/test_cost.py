"""The cost of a step and of a run, counted and not timed: store calls, encodings, tasks, calls.

If a number grows here, every step or every run became slower.
"""

import asyncio
import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest

from perdure import Client, Retry, Runtime, Step, Worker, Workflow, durable, workflow
from perdure.codec import text
from perdure.engine.history import History
from perdure.runtime.definition import Definition
from perdure.store import Entry, Grant, LeaseRequest, Refusal, Verdict
from perdure.stores.memory import MemoryStore
from perdure.testing.faults import FaultyStore


async def fetch(id: str) -> dict[str, str]:
    return {"id": id}


async def ten(step: Step) -> None:
    for _ in range(10):
        await step("fetch", fetch, "1")


async def hundred(step: Step) -> None:
    for _ in range(100):
        await step("fetch", fetch, "1")


async def nothing(_: Step) -> None:
    """Return without any steps."""


@workflow("one-step")
async def one_step(step: Step) -> None:
    await step("fetch", fetch, "1")


async def calls_of_worker(runs: int) -> int:
    """Return how many Python functions are called for this number of due runs."""
    runtime = Runtime(MemoryStore(), workflows=[one_step])
    await Client(runtime.store).trigger_many("one-step", [None] * runs)
    return await calls_in(Worker(runtime, concurrency=runs).run_until_idle())


class YieldingStore(MemoryStore):
    """A store that yields to the event loop while it writes, like one on a disk or a server."""

    async def append(self, entries: Sequence[Entry], /) -> Sequence[Verdict]:
        await asyncio.sleep(0)
        return await super().append(entries)

    async def acquire(self, requests: Sequence[LeaseRequest], /) -> Sequence[Grant | Refusal]:
        await asyncio.sleep(0)
        return await super().acquire(requests)


class EncodingCounter:
    """Counts how often a value is encoded as JSON."""

    def __init__(self, encode: Any) -> None:
        self._encode = encode
        self.count = 0

    def __call__(self, data: Any) -> bytes:
        self.count += 1
        encoded: bytes = self._encode(data)
        return encoded


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> EncodingCounter:
    counter = EncodingCounter(text._to_json)
    monkeypatch.setattr(text, "_to_json", counter)
    return counter


def tasks_so_far() -> int:
    """Return how many tasks this process has created: the number in the name of a new one."""
    task = asyncio.Task(asyncio.sleep(0), loop=asyncio.get_running_loop())
    number = int(task.get_name().removeprefix("Task-"))
    task.cancel()
    return number


async def calls_in(work: Awaitable[object]) -> int:
    """Return how many Python functions are called while `work` is awaited; a coroutine counts
    whenever it is resumed.
    """
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        await work
    finally:
        sys.setprofile(previous)
    return calls


async def test_a_single_run_makes_one_append_per_step() -> None:
    """One more store call starts the run, and one ends it."""
    store: Any = FaultyStore(MemoryStore())
    (await durable.run({}, hundred, id="a", store=store)).unwrap()
    calls = Counter(call.verb for call in store.calls)
    assert calls == {"acquire": 1, "append": 101}


async def test_many_runs_share_their_appends() -> None:
    """Two hundred runs of ten steps make far fewer writes than steps."""
    store: Any = FaultyStore(YieldingStore())
    runs = (durable.run({}, ten, id=f"b-{n}", store=store) for n in range(200))
    await asyncio.gather(*runs)
    calls = Counter(call.verb for call in store.calls)
    assert sum(len(call.ids) for call in store.calls if call.verb == "append") == 200 * 11
    assert calls["append"] <= 30
    assert calls["acquire"] <= 5


async def test_a_value_is_encoded_once(encodings: EncodingCounter) -> None:
    """A step encodes its record and its key, once each."""
    (await durable.run({}, ten, id="warm")).unwrap()
    encodings.count = 0
    (await durable.run({}, hundred, id="c")).unwrap()
    assert encodings.count <= 100 * 2 + 2


async def test_a_step_creates_no_task() -> None:
    """A short run has one task, that of its function; its steps have none."""
    (await durable.run({}, ten, id="warm")).unwrap()
    before = tasks_so_far()
    (await durable.run({}, hundred, id="d")).unwrap()
    assert tasks_so_far() - before <= 2


async def test_a_step_without_a_store_creates_no_task_and_encodes_once(
    encodings: EncodingCounter,
) -> None:
    """Only its record is encoded."""
    wf = Workflow("plain")
    before = tasks_so_far()
    (await wf.run(hundred)).unwrap()
    assert tasks_so_far() - before <= 1
    assert encodings.count <= 100


async def test_a_step_makes_few_calls() -> None:
    """From the call of the step to its value, the store in memory included."""
    store = MemoryStore()
    (await durable.run({}, ten, id="warm", store=store)).unwrap()
    few = await calls_in(durable.run({}, ten, id="few", store=store))
    many = await calls_in(durable.run({}, hundred, id="many", store=store))
    assert (many - few) / 90 <= 38


async def test_a_run_makes_few_calls_beside_its_steps() -> None:
    """The start and the end of a run, with its session and the event loop's own functions."""
    store = MemoryStore()
    (await durable.run({}, ten, id="warm", store=store)).unwrap()
    assert await calls_in(durable.run({}, nothing, id="one", store=store)) <= 255


def in_memory(cls: type) -> int:
    """Return how many objects of a class are in memory."""
    return sum(type(each) is cls for each in gc.get_objects())


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Barrier:
    """A step's function that returns only when it is released."""

    def __init__(self) -> None:
        self._reached = asyncio.Semaphore(0)
        self._released = asyncio.Event()

    async def wait(self) -> None:
        self._reached.release()
        await self._released.wait()

    @asynccontextmanager
    async def reached_by(self, runs: int) -> AsyncGenerator[None]:
        """Enter when this number of runs wait, and release them on exit."""
        for _ in range(runs):
            await self._reached.acquire()
        yield
        self._released.set()


@workflow("held")
async def held(step: Step[Barrier]) -> None:
    await step("wait", step.deps.wait)


@asynccontextmanager
async def active_runs(count: int) -> AsyncGenerator[None]:
    """Execute runs with `durable.run`, each of which is in a step."""
    store, barrier = MemoryStore(), Barrier()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(durable.run(barrier, held.fn, id=str(number), store=store))
        async with barrier.reached_by(count):
            yield


@asynccontextmanager
async def claimed_runs(count: int) -> AsyncGenerator[None]:
    """Execute runs with a worker, each of which is in a step."""
    barrier = Barrier()
    runtime = Runtime(MemoryStore(), workflows=[held], deps=barrier)
    await Client(runtime.store).trigger_many("held", [None] * count)
    async with Worker(runtime, concurrency=count), barrier.reached_by(count):
        yield


Active: TypeAlias = Callable[[int], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize(("runs", "most"), [(active_runs, 12_000), (claimed_runs, 12_000)])
async def test_an_active_run_takes_little_memory(runs: Active, most: int) -> None:
    """In a step, with its row in the store in memory, and with its tasks."""
    async with runs(10):
        # Fill caches that do not grow later.
        pass
    # The difference leaves out what the process needs only once. With both numbers, dicts of runs
    # are nearly full, so that no spare room is counted.
    differences = [
        await _traced_memory(runs(300)) - await _traced_memory(runs(150)) for _ in range(3)
    ]
    # The set in which asyncio keeps all tasks of the process may grow to four times its size in
    # between, by up to 1.7 KB for each of these runs, but hardly twice in a row.
    assert min(differences) / 150 <= most


async def _traced_memory(active: AbstractAsyncContextManager[None]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        async with active:
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
            return size
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="empty dicts are examined, too")
@pytest.mark.parametrize(("runs", "most"), [(active_runs, 67), (claimed_runs, 70)])
async def test_an_active_run_gives_the_garbage_collector_little_to_examine(
    runs: Active, most: int
) -> None:
    """The objects of all active runs are examined again and again."""
    async with runs(10):
        pass
    gc.collect()
    before = len(gc.get_objects())
    async with runs(300):
        gc.collect()
        assert (len(gc.get_objects()) - before) / 300 <= most


@pytest.mark.parametrize("runs", [active_runs, claimed_runs])
async def test_an_active_run_does_not_keep_its_grant(runs: Active) -> None:
    """Its snapshot may have thousands of records, and the history has them too."""
    gc.collect()
    # Earlier tests may have left some.
    before = in_memory(Grant)
    async with runs(10):
        gc.collect()
        assert in_memory(Grant) == before


@workflow("visit")
async def visit(step: Step) -> None:
    """Use waits, branches and a report, which refer to the run in different ways."""
    await step.sleep("nap", 0.001)
    await asyncio.gather(step("a", fetch, "1"), step("b", fetch, "2"))
    step.report(progress=0.5)


@pytest.mark.usefixtures("no_collection")
async def test_a_run_leaves_memory_when_it_ends() -> None:
    """Without the garbage collector, which would have to look for the records of thousands."""
    before = in_memory(History)
    (await Workflow("plain").run(ten)).unwrap()
    (await durable.run({}, ten, id="run", store=MemoryStore())).unwrap()
    assert in_memory(History) == before
    runtime = Runtime(MemoryStore(), workflows=[visit])
    for number in range(3):
        assert (await runtime.trigger(visit, run_id=str(number))).status == "completed"
    assert in_memory(History) == before


@workflow("pause")
async def pause(step: Step) -> None:
    await step.wait_for_event("go", "go", timeout="1 day")


@workflow("pause in branches")
async def pause_in_branches(step: Step) -> None:
    await asyncio.gather(step.wait_for_event("go", "go"), step.sleep("long", "1 day"))


async def fail() -> None:
    raise ConnectionError("down")


@workflow("pause before a retry")
async def pause_before_a_retry(step: Step) -> None:
    await step("fail", fail, retry=Retry(2, delay="1 day", max_delay="1 day"))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("definition", [pause, pause_in_branches, pause_before_a_retry])
async def test_a_run_leaves_memory_when_it_is_suspended(definition: Definition[None, None]) -> None:
    before = in_memory(History)
    runtime = Runtime(MemoryStore(), workflows=[definition])
    run = await runtime.trigger(definition, run_id="run")
    assert run.status in ("waiting", "suspended")
    assert in_memory(History) == before


async def test_a_worker_makes_few_calls_for_a_run() -> None:
    """From the claim of a due run with one step to its rest, without what the worker does once."""
    few, many = [await calls_of_worker(count) for count in (10, 110)]
    assert (many - few) / 100 <= 306


async def calls_of_conversation(runs: int) -> tuple[int, int, int]:
    """Return the calls until runs wait for an event, for the events, and until the runs end."""
    runtime = Runtime(MemoryStore(), workflows=[pause])
    handles = await Client(runtime.store).trigger_many("pause", [None] * runs)

    async def send() -> None:
        for run in handles:
            await runtime.signal(run.id, "go", wait=False)

    return (
        await calls_in(Worker(runtime, concurrency=runs).run_until_idle()),
        await calls_in(send()),
        await calls_in(Worker(runtime, concurrency=runs).run_until_idle()),
    )


async def test_an_event_makes_few_calls() -> None:
    """Until the run waits and has left memory, for the message, and until the run has ended."""
    few, many = [await calls_of_conversation(count) for count in (10, 110)]
    wait, message, rest = [(more - less) / 100 for less, more in zip(few, many, strict=True)]
    assert wait <= 441
    assert message <= 102
    assert rest <= 371
