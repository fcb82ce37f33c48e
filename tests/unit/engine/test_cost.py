"""The cost of a step and of a run, counted and not timed: store calls, encodings, tasks, calls.

If a number grows here, every step or every run became slower.
"""

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest

from perdure import Client, Runtime, Step, Worker, Workflow, codec, durable, workflow
from perdure.engine.history import History
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
    counter = EncodingCounter(codec._to_json)
    monkeypatch.setattr(codec, "_to_json", counter)
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
    assert (many - few) / 90 <= 44


async def test_a_run_makes_few_calls_beside_its_steps() -> None:
    """The start and the end of a run, with its session and the event loop's own functions."""
    store = MemoryStore()
    (await durable.run({}, ten, id="warm", store=store)).unwrap()
    assert await calls_in(durable.run({}, nothing, id="one", store=store)) <= 310


def histories() -> int:
    """Return how many histories of runs are in memory."""
    return sum(type(each) is History for each in gc.get_objects())


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@workflow("visit")
async def visit(step: Step) -> None:
    """Use waits, branches and a report, which refer to the run in different ways."""
    await step.sleep("nap", 0.001)
    await asyncio.gather(step("a", fetch, "1"), step("b", fetch, "2"))
    step.report(progress=0.5)


@pytest.mark.usefixtures("no_collection")
async def test_a_run_leaves_memory_when_it_ends() -> None:
    """Without the garbage collector, which would have to look for the records of thousands."""
    before = histories()
    (await Workflow("plain").run(ten)).unwrap()
    (await durable.run({}, ten, id="run", store=MemoryStore())).unwrap()
    assert histories() == before
    runtime = Runtime(MemoryStore(), workflows=[visit])
    for number in range(3):
        assert (await runtime.trigger(visit, run_id=str(number))).status == "completed"
    assert histories() == before


async def test_a_worker_makes_few_calls_for_a_run() -> None:
    """From the claim of a due run with one step to its rest, without what the worker does once."""
    few, many = [await calls_of_worker(count) for count in (10, 110)]
    assert (many - few) / 100 <= 360
