"""The cost of a step, counted and not timed: store calls, encodings, tasks.

If a number grows here, every step became slower.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Step, Workflow, codec, durable
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
    assert encodings.count <= 100 * 2 + 20


async def test_a_step_creates_no_task() -> None:
    """A run has a few tasks; its steps have none."""
    (await durable.run({}, ten, id="warm")).unwrap()
    before = tasks_so_far()
    (await durable.run({}, hundred, id="d")).unwrap()
    assert tasks_so_far() - before <= 8


async def test_a_step_without_a_store_creates_no_task_and_encodes_once(
    encodings: EncodingCounter,
) -> None:
    """Only its record is encoded."""
    wf = Workflow("plain")
    before = tasks_so_far()
    (await wf.run(hundred)).unwrap()
    assert tasks_so_far() - before <= 1
    assert encodings.count <= 100
